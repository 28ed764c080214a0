"""Returns of episodes: what those of an evaluation say about the mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from juggler.driver.record.bootstrap import bootstrap_interval

#: Episodes that the training return is a mean over. If it reaches the goal, there is a candidate.
RETURN_WINDOW = 100


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
        """The mean's 95 % confidence interval: a bootstrap over the episodes. It is about other
        episodes of the same policy, and not about other runs. None: fewer than five episodes do not
        say how much returns vary."""
        returns = np.asarray(self.returns, dtype=np.float64)  # [episodes]
        return bootstrap_interval(lambda drawn: drawn.mean(axis=-1), [returns])
