"""An RLModule of your own: one trunk, two heads.

    python examples/custom_module.py

trains it on CartPole for a few seconds, until the mean return is 300.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import torch

import juggler


class OneTrunk(juggler.RLModule):
    """A normalized hidden layer of `units` units, and two heads."""

    may_act_in_numpy = True  # acting depends on observations and parameters alone

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
        self.normalize = torch.nn.LayerNorm(units)
        self.policy = torch.nn.Linear(units, self.action_distribution().inputs_size)
        self.value = torch.nn.Linear(units, 1)

    def _forward(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = torch.nn.functional.silu(self.hidden(batch["observations"]))  # [B, units]
        features = self.normalize(hidden)  # [B, units]
        return {
            "action_dist_inputs": self.policy(features),  # [B, D]
            "values": self.value(features).squeeze(-1),  # [B]
        }


if __name__ == "__main__":
    result = juggler.train(
        "cartpole", module=OneTrunk, model={"units": 64}, stop_return=300, stop_steps=2_000_000
    )
    assert result.checkpoint is not None
    played = juggler.evaluate(result.checkpoint, module=OneTrunk)
    print(f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f}")
