"""Forward and Loss: what an algorithm's loss function takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from juggler.learner.optim.parameter_group import ParameterGroup
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.structures import tree_map


class Loss(NamedTuple):
    """The loss of one module on its part of a sample."""

    total: Tensor  # [] to minimize, a mean over live steps
    live_steps: Tensor  # [] int64
    metrics: dict[str, Tensor]  # [] each
    means: dict[str, Tensor]  # [] each: what the algorithm's decisions depend on


class Forward(NamedTuple):
    """The training pass of one module, with the parameters and buffers of a state."""

    group: ParameterGroup
    module_id: str
    parameters: Tensor  # [P]
    buffers: dict[str, Tensor]

    @property
    def module(self) -> RLModule:
        """The module, for its spaces and its distribution. Its own parameters are not trained."""
        return self.group.modules[self.module_id]

    def initial_state(self) -> dict[str, Any]:
        """The module's `get_initial_state`, with the parameters and buffers of the state."""
        return self.group.initial_state(self.module_id, self.parameters, self.buffers)

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Set a buffer of the module from this optimizer step on. EnvRunners get it with the
        weights."""
        name = self.group.names(self.module_id)[name]
        self.buffers[name] = value.to(self.buffers[name].dtype)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        return self.group.forward_train(self.module_id, self.parameters, self.buffers, batch)


#: Observations in one chunk.
CHUNK = 2048


class InChunks(Forward):
    """A training pass without gradients, in chunks, so that its memory does not grow with the
    number of observations."""

    @torch.no_grad()
    def __call__(self, batch: Batch) -> dict[str, Any]:
        leaf = _first_leaf(batch[c.OBSERVATIONS])  # [B, ...], or [B, T, ...] beside states
        size = max(1, CHUNK // leaf.shape[1]) if c.STATES in batch else CHUNK
        if len(leaf) <= size:
            return super().__call__(batch)
        outputs = [
            super(InChunks, self).__call__(tree_map(lambda x, at=at: x[at : at + size], batch))
            for at in range(0, len(leaf), size)
        ]
        joined: dict[str, Any] = tree_map(lambda *parts: torch.cat(parts), *outputs)
        return joined


def _first_leaf(tree: Any) -> Tensor:
    while isinstance(tree, Mapping):
        tree = next(iter(tree.values()))
    leaf: Tensor = tree
    return leaf
