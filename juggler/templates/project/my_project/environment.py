"""The environment: its observations, actions and rewards."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

Observation = NDArray[np.float32]


class Thermostat(gymnasium.Env[Observation, np.int64]):
    """Keep a room at 20 °C by switching the heating.

    Args:
        minutes: the length of an episode.
    """

    #: What the agent observes: the temperature inside and outside. Numbers of about 1 are learned
    #: best.
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    #: What it may do: 0 is not to heat, and 1 is to heat.
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, minutes: int = 100) -> None:
        self.minutes = minutes

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode, with randomness from the seeded `self.np_random`."""
        super().reset(seed=seed)
        self.inside, self.outside = self.np_random.uniform([10, -10], [30, 15])
        self.minute = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Advance by a minute."""
        self.inside += 0.02 * (self.outside - self.inside) + int(action)
        self.minute += 1
        error = abs(self.inside - 20)
        reward = -error / 10
        # Terminated: the task itself is over. Truncated: only the time is. This task never ends.
        terminated, truncated = False, self.minute == self.minutes
        # Numbers in `info` are in the metrics and in the trackers.
        return self._observe(), reward, terminated, truncated, {"error": error}

    def _observe(self) -> Observation:
        return np.array([(self.inside - 20) / 10, self.outside / 10], np.float32)
