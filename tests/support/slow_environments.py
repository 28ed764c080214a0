"""Environments that are slow to step, one that ends its process, and what never ends."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from typing import Any

import gymnasium
from gymnasium import spaces


class Slow(gymnasium.Env[Any, Any]):
    """Each step takes a while."""

    observation_space = spaces.Box(-1, 1, (3,))
    action_space = spaces.Discrete(2)
    seconds = 0.05

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return self.observation_space.sample(), 0.0, False, False, {}


class TooSlow(Slow):
    seconds = 60.0


class Leaving(Slow):
    """Ends its process after some steps."""

    seconds = 0.0

    def __init__(self) -> None:
        self.steps = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == 20:
            os._exit(3)
        return super().step(action)


def loop(_: object) -> None:
    """Loop in C, where no Python code runs, such as a handler of signals."""
    deque(itertools.repeat(None), maxlen=0)
