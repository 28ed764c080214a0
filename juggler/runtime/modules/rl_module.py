"""RLModule: what a policy (and its value function) must be able to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import torch
from torch import Tensor

from juggler.runtime.modules.distributions import DistributionSpec, distribution_for

#: Columns by name; see `columns`.
Batch = Mapping[str, Tensor]


class RLModule(torch.nn.Module):
    """A policy as a torch module, with one forward pass for each of its three uses.

    Every pass takes a batch with "observations" [B, ...] in the dtype of the observation space
    (a module casts by itself: bytes travel smaller than floats) and returns "action_dist_inputs"
    [B, D], "actions" [B, ...], or both. A subclass overrides `_forward`, or those of the three
    passes that differ from it:

        class Linear(RLModule):
            def __init__(self, observation_space, action_space, model_config):
                super().__init__(observation_space, action_space, model_config)
                inputs = observation_space.shape[0]
                self.policy = torch.nn.Linear(inputs, self.action_distribution().inputs_size)
                self.value = torch.nn.Linear(inputs, 1)

            def _forward(self, batch):
                observations = batch["observations"].float()
                return {
                    "action_dist_inputs": self.policy(observations),
                    "values": self.value(observations).squeeze(-1),
                }
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.observation_space = observation_space
        self.action_space = action_space
        self.model_config = dict(model_config)

    def action_distribution(self) -> DistributionSpec:
        """What "action_dist_inputs" mean; by default what the action space says."""
        return distribution_for(self.action_space)

    def forward_inference(self, batch: Batch) -> dict[str, Tensor]:
        """To act as well as it can: in evaluation and in production."""
        return self._forward_inference(batch)

    def forward_exploration(self, batch: Batch) -> dict[str, Tensor]:
        """To act in training, where actions are also there to learn from."""
        return self._forward_exploration(batch)

    def forward_train(self, batch: Batch) -> dict[str, Tensor]:
        """To compute losses. An actor-critic adds "values" [B]."""
        return self._forward_train(batch)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """`forward_train`, under the name that `torch.func.functional_call` calls."""
        return self.forward_train(batch)

    def _forward_inference(self, batch: Batch) -> dict[str, Tensor]:
        return self._forward(batch)

    def _forward_exploration(self, batch: Batch) -> dict[str, Tensor]:
        return self._forward(batch)

    def _forward_train(self, batch: Batch) -> dict[str, Tensor]:
        return self._forward(batch)

    def _forward(self, batch: Batch) -> dict[str, Tensor]:
        raise NotImplementedError(
            f"{type(self).__name__} must define _forward, or _forward_inference, "
            "_forward_exploration and _forward_train"
        )
