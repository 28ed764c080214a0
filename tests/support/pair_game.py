"""A game of two agents with equal spaces, with PettingZoo's Parallel interface."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


class Pair:
    """Both choose a number; who chose the larger one gets 1, and the other loses 1."""

    possible_agents = ("left", "right")
    length = 4
    _sees = spaces.Box(-1, 1, (3,), np.float32)
    _acts = spaces.Discrete(3)

    def __init__(self) -> None:
        self.agents: list[str] = []
        self._steps = 0
        self._random = np.random.default_rng(0)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._sees

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._acts

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.agents, self._steps = list(self.possible_agents), 0
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        self._steps += 1
        over, both = self._steps == self.length, self.possible_agents
        won = float(np.sign(int(actions["left"]) - int(actions["right"])))
        self.agents = [] if over else self.agents
        return (
            self._observe(),
            {"left": won, "right": -won},
            dict.fromkeys(both, over),
            dict.fromkeys(both, False),
            {agent: {} for agent in both},
        )

    def close(self) -> None:
        pass

    def _observe(self) -> dict[str, Any]:
        return {
            agent: self._random.uniform(-1, 1, 3).astype(np.float32)
            for agent in self.possible_agents
        }
