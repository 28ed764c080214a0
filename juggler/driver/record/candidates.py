"""Candidates: weights that may have solved the task, until an evaluation confirms it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

#: Episodes that the training return is a mean over. If it reaches the goal, there is a candidate.
RETURN_WINDOW = 100

#: Episodes that confirm a candidate. The standard error of their mean is a tenth of the standard
#: deviation, so that a policy 0.3 deviations below the goal is confirmed once in 700 times.
CONFIRMING_EPISODES = 100

#: Limit of the factor by which these episodes grow with each refusal. They grow because every
#: candidate is another chance to be lucky.
_MORE_EPISODES = 5

#: Of a bootstrap.
_REPETITIONS = 2000

#: An episode may take _MORE_STEPS times the longest training episode, which counts as at least
#: _FEW_STEPS.
_MORE_STEPS, _FEW_STEPS = 10, 1000


@dataclass(slots=True)
class Candidates:
    """When the next candidate is due, and how many episodes must confirm it.

    After the n-th refusal, the next candidate needs n times 100 new training episodes. A run that
    hovers about the goal is evaluated less often, and for longer.

    Attributes:
        refused: number of refused candidates.
        not_before: episodes of the run before which no candidate is due.
    """

    refused: int = 0
    not_before: int = 0

    @property
    def episodes(self) -> int:
        """Episodes that must confirm the next candidate."""
        return CONFIRMING_EPISODES * min(self.refused + 1, _MORE_EPISODES)

    def due(self, episodes: int) -> bool:
        return episodes >= self.not_before

    def refuse(self, episodes: int) -> None:
        """Count a candidate, found after this many episodes, as refused."""
        self.refused += 1
        self.put_off(episodes, self.refused)

    def put_off(self, episodes: int, windows: int = 1) -> None:
        """Wait for more windows of new episodes before the next candidate."""
        self.not_before = episodes + windows * RETURN_WINDOW


@dataclass(frozen=True, slots=True)
class Played:
    """The result of an evaluation: mean and standard deviation of its episodes' returns."""

    mean: float
    deviation: float
    episodes: int

    @classmethod
    def of(cls, returns: Sequence[float]) -> Played:
        mean = math.fsum(returns) / len(returns)
        variance = math.fsum((each - mean) ** 2 for each in returns) / len(returns)
        return cls(mean, math.sqrt(variance), len(returns))


class WithReturns:
    """Episodes that were played, with the statistics of their returns."""

    __slots__ = ()
    returns: list[float]

    @property
    def mean(self) -> float:
        """Mean of the returns."""
        return Played.of(self.returns).mean

    @property
    def deviation(self) -> float:
        """Standard deviation of the returns."""
        return Played.of(self.returns).deviation

    @property
    def interval(self) -> tuple[float, float] | None:
        """The mean's 95 % confidence interval: a percentile bootstrap over the episodes. It is
        about other episodes of the same policy, and not about other runs. None: one episode does
        not say how much returns vary."""
        if len(self.returns) < 2:
            return None
        returns = np.asarray(self.returns, dtype=np.float64)  # [episodes]
        random, count = np.random.default_rng(0), len(returns)
        means = [returns[random.integers(count, size=count)].mean() for _ in range(_REPETITIONS)]
        low, high = np.percentile(means, (2.5, 97.5))
        return float(low), float(high)


def most_steps(lengths: Iterable[int]) -> int:
    """Return the limit of an evaluation episode's steps, from the lengths of training episodes.

    Without a limit, a deterministic policy may go in circles for ever.
    """
    return _MORE_STEPS * max((_FEW_STEPS, *lengths))
