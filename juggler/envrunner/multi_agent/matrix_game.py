"""Games in which all players choose once, at the same time: "juggler:MatrixGame"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

#: Rock, paper and scissors: payoff of the first player, by its choice and its opponent's.
ROCK_PAPER_SCISSORS = [[0, -1, 1], [1, 0, -1], [-1, 1, 0]]


class MatrixGame:
    """A two-player game of one simultaneous choice (PettingZoo's Parallel interface).

    Both players see the same constant observation [1].

    Args:
        payoffs: of "row", by its choice and the choice of "column".
        column_payoffs: of "column"; None: the negative, as in a zero-sum game.

    Raises:
        ValueError: the two tables are not matrices of one shape.
    """

    possible_agents = ("row", "column")

    def __init__(
        self,
        payoffs: Sequence[Sequence[float]] = ROCK_PAPER_SCISSORS,
        column_payoffs: Sequence[Sequence[float]] | None = None,
    ) -> None:
        self._row = np.array(payoffs, np.float64)  # [R, C]
        self._column = -self._row if column_payoffs is None else np.array(column_payoffs, float)
        if self._row.ndim != 2 or self._row.shape != self._column.shape:
            raise ValueError(
                f"payoffs and column_payoffs must be matrices of one shape, and have the shapes "
                f"{self._row.shape} and {self._column.shape}"
            )
        self.agents: list[str] = []
        self._observation_space = spaces.Box(0, 1, (1,), np.float32)
        rows, columns = self._row.shape
        self._action_spaces = {"row": spaces.Discrete(rows), "column": spaces.Discrete(columns)}

    def observation_space(self, agent: str) -> Space[Any]:
        return self._observation_space

    def action_space(self, agent: str) -> Space[Any]:
        return self._action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: Any = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        self.agents = list(self.possible_agents)
        return self._shown(), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Apply both choices, which ends the episode."""
        chosen = int(actions["row"]), int(actions["column"])
        rewards = {"row": float(self._row[chosen]), "column": float(self._column[chosen])}
        shown = self._shown()
        self.agents = []
        ended, cut = dict.fromkeys(rewards, True), dict.fromkeys(rewards, False)
        return shown, rewards, ended, cut, {agent: {} for agent in rewards}

    def close(self) -> None:
        """Do nothing."""

    def _shown(self) -> dict[str, Any]:
        return {agent: np.ones(1, np.float32) for agent in self.possible_agents}
