"""A cooperative game whose value depends on what no agent can see alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


class HiddenBits:
    """Each of two agents sees its own bit, and both get 1 in every step if the bits differ.

    Nothing that they do changes that. An episode is cut off after three steps, which has nothing to
    do with the game: with a discount γ the value of a state is 1 / (1 - γ) where the bits differ,
    and 0 where they are equal. What one agent sees says nothing about it.
    """

    possible_agents = ("left", "right")
    state_space = spaces.MultiBinary(2)
    length = 3

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return _BIT

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return _ACTIONS

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, ...]:
        self._bits = np.random.default_rng(seed).integers(2, size=2).astype(np.int8)
        self._steps = 0
        self.agents = list(self.possible_agents)
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> tuple[Any, ...]:
        self._steps += 1
        over = self._steps == self.length
        told = self.possible_agents
        self.agents = [] if over else self.agents
        reward = float(self._bits[0] != self._bits[1])
        return (
            self._seen(),
            dict.fromkeys(told, reward),
            dict.fromkeys(told, False),
            dict.fromkeys(told, over),
            {agent: {} for agent in told},
        )

    def state(self) -> np.ndarray:
        return self._bits

    def _seen(self) -> dict[str, Any]:
        return {
            agent: np.array([bit], np.float32)
            for agent, bit in zip(self.possible_agents, self._bits, strict=True)
        }


_BIT, _ACTIONS = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)
