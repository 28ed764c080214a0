"""An encoder of your own in the default module.

    python examples/custom_encoder.py

trains it on CartPole for a few seconds, until the mean return is 300. custom_encoder.toml has the
same run in a file.
"""

from __future__ import annotations

import math

import gymnasium
import torch

import juggler


class Waves(torch.nn.Module):
    """Encodes observations as sines of many frequencies.

    A linear layer can then learn sharp functions (Tancik et al. 2020, "Fourier Features Let
    Networks Learn High Frequency Functions in Low Dimensional Domains").
    """

    def __init__(self, space: gymnasium.spaces.Box, config: juggler.ModelConfig) -> None:
        super().__init__()
        self.size = config.hidden_sizes[-1]  # the number of features
        self.waves = torch.nn.Linear(math.prod(space.shape), 64)
        self.linear = torch.nn.Linear(64, self.size)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        waves = torch.sin(self.waves(observations))  # [B, 64]
        return torch.relu(self.linear(waves))  # [B, size]


if __name__ == "__main__":
    module = juggler.RLModuleSpec(model_config={"encoder": Waves, "hidden_sizes": [32]})
    result = juggler.train("cartpole", module=module, stop_return=300, stop_steps=2_000_000)
    assert result.checkpoint is not None
    played = juggler.evaluate(result.checkpoint, module=module)
    print(f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f}")
