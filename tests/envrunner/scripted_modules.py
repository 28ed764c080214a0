"""Modules that need no training to be told apart."""

from __future__ import annotations

import torch

from juggler.runtime.modules.rl_module import RLModule


class LinearPolicy(RLModule):
    """Action distribution inputs as a fixed function of the observation."""

    def __init__(self, observation_space, action_space, model_config=None):
        super().__init__(observation_space, action_space, model_config or {})
        outputs = self.action_distribution().inputs_size
        self.register_buffer("weight", torch.sin(torch.arange(3.0 * outputs)).reshape(3, -1))

    def _forward(self, batch):
        return {"action_dist_inputs": torch.tanh(batch["observations"] @ self.weight)}
