"""Modules that need no training to be told apart."""

from __future__ import annotations

import torch

from juggler.runtime.modules.rl_module import RLModule


class LinearPolicy(RLModule):
    """Action distribution inputs as a fixed function of the observation's three numbers."""

    def __init__(self, observation_space, action_space, model_config=None):
        super().__init__(observation_space, action_space, model_config or {})
        outputs = self.action_distribution().inputs_size
        self.register_buffer("weight", torch.sin(torch.arange(3.0 * outputs)).reshape(3, -1))

    def _forward(self, batch):
        return {"action_dist_inputs": torch.tanh(numbers(batch["observations"]) @ self.weight)}


class Summing(LinearPolicy):
    """A policy of the sum of all observations of the episode so far."""

    def get_initial_state(self):
        return {"sum": {"of": torch.zeros(3)}, "start": torch.tensor(0.5)}

    def _forward(self, batch):
        seen = numbers(batch["observations"])  # [B, T, 3]
        sums = batch["states"]["sum"]["of"][:, None] + seen.cumsum(1)  # [B, T, 3]
        outputs = sums + batch["states"]["start"][:, None, None]
        return {
            "action_dist_inputs": torch.tanh(outputs @ self.weight),
            "states": {"sum": {"of": sums[:, -1]}, "start": batch["states"]["start"]},
        }


def numbers(observations) -> torch.Tensor:
    """A tree of observations as the one array of three numbers that it was made of."""
    if isinstance(observations, torch.Tensor):
        return observations
    if "count" in observations:  # of AsTrees
        first, rest = observations["floats"]["0"], observations["floats"]["1"]["state"]
        return torch.cat([first, observations["count"].unsqueeze(-1).float(), rest], -1)
    return next(numbers(branch) for key, branch in observations.items() if key != "action_mask")
