"""Environments computed together in torch, on a GPU if possible.

    python examples/tensor_environments.py

trains the thermostat of custom_environment.py, 256 of which are rows of one tensor. The vector
takes actions and gives observations as tensors, which stay on their device: there the policy acts,
and what it sampled is copied to the host once in a fragment.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

import juggler

MINUTES = 100


class Thermostats(VectorEnv[Tensor, Tensor, Tensor]):
    """Keep rooms at 20 °C by heating or not, minute after minute."""

    single_observation_space = gymnasium.spaces.Box(-float("inf"), float("inf"), (2,))
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, num_envs: int = 256) -> None:
        # An episode that ends is followed by the next one in the same step.
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = num_envs
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.generator = torch.Generator(self.device)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.inside, self.outside = self._draw(10, 30), self._draw(-10, 15)  # [N] both
        # Rooms begin at different minutes, so that not all episodes end together.
        self.minutes = self._draw(0, MINUTES).long()  # [N]
        return self._observe(), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        self.inside = self.inside + 0.02 * (self.outside - self.inside) + actions  # [N]
        self.minutes = self.minutes + 1  # [N]
        rewards = -(self.inside - 20).abs() / 10  # [N]
        truncated = self.minutes == MINUTES  # [N]
        last = self._observe()  # [N, 2]
        self.inside = torch.where(truncated, self._draw(10, 30), self.inside)  # [N]
        self.outside = torch.where(truncated, self._draw(-10, 15), self.outside)  # [N]
        self.minutes = torch.where(truncated, 0, self.minutes)  # [N]
        terminated = torch.zeros_like(truncated)  # [N]
        return self._observe(), rewards, terminated, truncated, {"final_obs": last}

    def _draw(self, low: float, high: float) -> Tensor:
        drawn = torch.rand(self.num_envs, generator=self.generator, device=self.device)  # [N]
        return low + (high - low) * drawn

    def _observe(self) -> Tensor:
        return torch.stack([(self.inside - 20) / 10, self.outside / 10], 1)  # [N, 2]


if __name__ == "__main__":
    result = juggler.train(
        env=Thermostats,
        num_env_runners=1,
        envs_per_runner=256,
        stop_return=-7,
        stop_steps=4_000_000,
        lr=1e-3,
        gamma=0.9,
    )
    assert result.checkpoint is not None
    played = juggler.evaluate(result.checkpoint, env=Thermostats)
    print(f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f}")
