"""CartPole with hidden velocities: "juggler.envrunner.memory_cartpole:MemoryCartPole-v0"."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

Infos = dict[str, Any]
Floats = NDArray[np.float32]


class MemoryCartPole(CartPoleEnv):
    """CartPole that shows positions [2] but no velocities: a policy needs memory."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.observation_space = _positions(self.observation_space)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Floats, Infos]:
        observation, info = super().reset(seed=seed, options=options)  # [4]
        return observation[::2], info

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)  # type: ignore[no-untyped-call]  # [4]
        return observation[::2], *rest


class MemoryCartPoleVector(CartPoleVectorEnv):
    """N environments, stepped together; observations [N, 2]."""

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        super().__init__(num_envs, **options)
        self.single_observation_space = _positions(self.single_observation_space)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Floats, Infos]:
        observations, infos = super().reset(seed=seed, options=options)  # [N, 4]
        return observations[:, ::2], infos

    def step(self, actions: Any) -> Any:
        observations, *rest = super().step(actions)  # [N, 4]
        return observations[:, ::2], *rest


def _positions(every: Any) -> spaces.Box:
    """Remove the velocities from the space."""
    return spaces.Box(every.low[::2], every.high[::2])


gymnasium.register(
    "MemoryCartPole-v0",
    entry_point=MemoryCartPole,
    vector_entry_point=MemoryCartPoleVector,
    max_episode_steps=500,
    reward_threshold=475.0,
)
