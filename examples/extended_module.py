"""The default module, extended by a trunk and rescaled values.

    python examples/extended_module.py

trains it on CartPole for a few seconds, until the mean return is 300. In this directory, the
command line finds it by name: juggler train cartpole --module extended_module:Extended
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import torch

import juggler


class Extended(juggler.ActorCritic):
    """Adds a residual block, and a value head that begins near 50.

    Discounted returns of CartPole reach 100. The value function of the default module starts at 0,
    and would need thousands of steps to get there, or a `reward_scale`.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        super().__init__(observation_space, action_space, model_config)
        size: Any = self.encoder.size
        self.encoder = torch.nn.Sequential(self.encoder, Residual(size))

    def _forward_train(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        outputs = super()._forward_train(batch)
        return {**outputs, "values": 50 + 20 * outputs["values"]}  # [B]


class Residual(torch.nn.Module):
    """Adds the output of a layer to its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.LayerNorm(size), torch.nn.Linear(size, size), torch.nn.ReLU()
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.layers(features)  # [B, size]
        return features + added  # [B, size]


if __name__ == "__main__":
    result = juggler.train(
        "cartpole", module=Extended, reward_scale=1.0, stop_return=300, stop_steps=2_000_000
    )
    assert result.checkpoint is not None
    played = juggler.evaluate(result.checkpoint, module=Extended)
    print(f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f}")
