"""Greedy play of a policy from fixed starts, so that policies of different packages are compared
with as little chance as possible. Needs Gymnasium and NumPy alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

EPISODES = 500


def greedy_return(act: Callable[[NDArray[Any]], NDArray[Any]], env: str) -> float:
    """The mean return of the episodes that begin with the seeds 0, 1, ….

    Args:
        act: actions [500, ...] for observations [500, ...].
        env: the environment's id.
    """
    made = [lambda: gymnasium.make(env)] * EPISODES
    envs = gymnasium.vector.SyncVectorEnv(made)
    observations, _ = envs.reset(seed=list(range(EPISODES)))  # [500, ...]
    total, plays = 0.0, np.ones(EPISODES, np.bool_)  # [500]
    while plays.any():  # what an environment does after its episode does not count
        observations, rewards, terminated, truncated, _ = envs.step(act(observations))
        total += float(rewards[plays].sum())
        plays &= ~(terminated | truncated)
    return total / EPISODES
