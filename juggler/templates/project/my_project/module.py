"""The module: the network for policy and value function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import torch

import juggler


class OneTrunk(juggler.RLModule):
    """A hidden layer for both the policy and the value function.

    Args:
        observation_space: of the environment.
        action_space: of the environment.
        model_config: the table `model` of the configuration.
    """

    # Acting depends on observations and parameters alone, so its operations may be traced, which
    # takes less time for small networks. Remove this line if that changes.
    may_act_in_numpy = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        super().__init__(observation_space, action_space, model_config)
        assert observation_space.shape is not None
        units = model_config["units"]
        self.hidden = torch.nn.Linear(observation_space.shape[0], units)
        # The action space decides how many numbers a distribution of actions is made from.
        self.policy = torch.nn.Linear(units, self.action_distribution().inputs_size)
        self.value = torch.nn.Linear(units, 1)

    def _forward(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features = torch.nn.functional.silu(self.hidden(batch["observations"]))  # [B, units]
        return {
            "action_dist_inputs": self.policy(features),  # [B, D]
            "values": self.value(features).squeeze(-1),  # [B]
        }
