"""Games of a few agents, with PettingZoo's Parallel interface."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces


class Tag:
    """Two adversaries with two actions, and a runner with a motor."""

    metadata: ClassVar[dict[str, Any]] = {"name": "tag"}
    possible_agents = ("adversary_0", "adversary_1", "runner_0")
    length = 5

    def __init__(self) -> None:
        self.agents: list[str] = []
        self._steps = 0
        self._random = np.random.default_rng(0)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return _SPACES[agent.partition("_")[0]][0]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return _SPACES[agent.partition("_")[0]][1]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.agents, self._steps = list(self.possible_agents), 0
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        self._steps += 1
        seen, before = self._observe(), self.agents
        over = self._steps == self.length
        self.agents = [] if over else self.agents
        return (
            seen,
            dict.fromkeys(before, 1.0),
            dict.fromkeys(before, over),
            dict.fromkeys(before, False),
            {agent: {} for agent in before},
        )

    def close(self) -> None:
        pass

    def _observe(self) -> dict[str, Any]:
        return {
            agent: self._random.uniform(-1, 1, self.observation_space(agent).shape).astype(
                np.float32
            )
            for agent in self.agents
        }


_SPACES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {
    "adversary": (spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)),
    "runner": (spaces.Box(-1, 1, (2,), np.float32), spaces.Box(-1, 1, (1,), np.float32)),
}


class UnpaidTag(Tag):
    """The runner's rewards are no numbers from the second step on."""

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        seen, rewards, *others = super().step(actions)
        if self._steps > 1:
            rewards["runner_0"] = float("nan")
        return seen, rewards, *others


class MisnamedTag(Tag):
    """Infos of a step contain a number without an agent."""

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        *others, infos = super().step(actions)
        return *others, {**infos, "touches": 1.0}


class MiscountingTag(Tag):
    """All agents see their number, which the runner counts wrong."""

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(4)

    def _observe(self) -> dict[str, Any]:
        seen: dict[str, Any] = dict.fromkeys(self.agents, 3)
        return {**seen, "runner_0": 9} if self._steps else seen


class DesertedTag(Tag):
    """The runner leaves after one step; the others play forever."""

    length = -1

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        seen, rewards, terminated, *others = super().step(actions)
        if "runner_0" in self.agents:
            terminated["runner_0"] = True
            self.agents = [agent for agent in self.agents if agent != "runner_0"]
        return seen, rewards, terminated, *others


class Pair(Tag):
    """Both choose a number; the larger one wins 1."""

    possible_agents = ("left", "right")  # type: ignore[assignment]
    length = 4

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1, 1, (3,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        seen, _, *others = super().step(actions)
        won = float(np.sign(int(actions["left"]) - int(actions["right"])))
        return seen, {"left": won, "right": -won}, *others


class HiddenBits:
    """Both get 1 per step if their hidden bits differ.

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
