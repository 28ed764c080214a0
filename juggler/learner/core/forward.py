"""What the loss of an algorithm gets and gives."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from juggler.learner.optim.parameter_group import Unit
from juggler.runtime.modules.rl_module import Batch, RLModule


class Loss(NamedTuple):
    """What an algorithm makes of one module's part of a sample."""

    total: Tensor  # [] to be minimized, a mean over live steps
    live_steps: Tensor  # [] int64
    metrics: dict[str, Tensor]  # [] each
    means: dict[str, Tensor]  # [] each: what the algorithm decides by


class Forward(NamedTuple):
    """The training pass of one module, with the parameters and buffers of a state."""

    unit: Unit
    module_id: str
    parameters: Tensor  # [P]
    buffers: dict[str, Tensor]

    @property
    def module(self) -> RLModule:
        """For its spaces and its distribution; its own parameters are not those in training."""
        return self.unit.modules[self.module_id]

    def initial_state(self) -> dict[str, Any]:
        """As the module's `get_initial_state`."""
        return self.unit.initial_state(self.module_id, self.parameters, self.buffers)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        return self.unit.forward_train(self.module_id, self.parameters, self.buffers, batch)
