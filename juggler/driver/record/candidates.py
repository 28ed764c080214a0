"""Weights that may have solved a task, and what an evaluation of them says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Episodes that the training return is a mean over. Those who reach the goal are a candidate.
RETURN_WINDOW = 100

#: Episodes that confirm a candidate: as many as proposed it. Their mean is off by a tenth of what
#: single episodes differ by, so that a policy 0.3 deviations below the goal passes once in 700.
CONFIRMING_EPISODES = 100

#: At most so many times as many, where candidates were refused before: each of them is another
#: chance to be lucky, and chances must not add up.
_MORE_EPISODES = 5

#: Episodes may take so many times as many steps as the longest in training, or as this many.
_MORE_STEPS, _FEW_STEPS = 10, 1000


@dataclass(slots=True)
class Candidates:
    """When the next candidate is due, and what is asked of it.

    Behind the n-th that was refused, n times 100 new episodes come first: what proposes one is new,
    and those who hover about the goal for long are evaluated ever more seldom, and longer.

    Attributes:
        refused: how many were.
        not_before: episodes of the run until the next is due.
    """

    refused: int = 0
    not_before: int = 0

    @property
    def episodes(self) -> int:
        """That confirm the next one."""
        return CONFIRMING_EPISODES * min(self.refused + 1, _MORE_EPISODES)

    def due(self, episodes: int) -> bool:
        return episodes >= self.not_before

    def refuse(self, episodes: int) -> None:
        """That of so many episodes plays worse than it was asked to."""
        self.refused += 1
        self.put_off(episodes, self.refused)

    def put_off(self, episodes: int, windows: int = 1) -> None:
        """Look for another one later than that of so many episodes."""
        self.not_before = episodes + windows * RETURN_WINDOW


@dataclass(frozen=True, slots=True)
class Played:
    """Episodes of a candidate.

    Attributes:
        mean: of their returns.
        deviation: standard deviation of these.
        episodes: how many.
    """

    mean: float
    deviation: float
    episodes: int

    @classmethod
    def of(cls, returns: Sequence[float]) -> Played:
        mean = math.fsum(returns) / len(returns)
        variance = math.fsum((each - mean) ** 2 for each in returns) / len(returns)
        return cls(mean, math.sqrt(variance), len(returns))

    def confirms(self, stop_return: float, episodes: int) -> bool:
        """Whether these are as many as were asked for, and good enough."""
        return self.episodes >= episodes and self.mean >= stop_return


def most_steps(lengths: Iterable[int]) -> int:
    """That an episode of an evaluation may take, after training episodes of these lengths.

    The best action in every state may lead in a circle, in an environment without a limit.
    """
    return _MORE_STEPS * max((_FEW_STEPS, *lengths))
