"""What the loss of an algorithm gets and gives: a training pass, and a loss."""

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
    """What an algorithm makes of one module's part of a sample."""

    total: Tensor  # [] to be minimized, a mean over live steps
    live_steps: Tensor  # [] int64
    metrics: dict[str, Tensor]  # [] each
    means: dict[str, Tensor]  # [] each: what the algorithm decides by


class Forward(NamedTuple):
    """The training pass of one module, with the parameters and buffers of a state."""

    group: ParameterGroup
    module_id: str
    parameters: Tensor  # [P]
    buffers: dict[str, Tensor]

    @property
    def module(self) -> RLModule:
        """For its spaces and its distribution; its own parameters are not those in training."""
        return self.group.modules[self.module_id]

    def initial_state(self) -> dict[str, Any]:
        """As the module's `get_initial_state`."""
        return self.group.initial_state(self.module_id, self.parameters, self.buffers)

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Have a buffer of the module hold a value, from this step of the optimizer on: who acts
        gets it with the weights."""
        name = self.group.names(self.module_id)[name]
        self.buffers[name] = value.to(self.buffers[name].dtype)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        return self.group.forward_train(self.module_id, self.parameters, self.buffers, batch)


#: Observations in one part.
CHUNK = 2048


class InChunks(Forward):
    """A training pass for outputs that need no gradient, in parts, whose memory does not grow with
    the number of observations."""

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
