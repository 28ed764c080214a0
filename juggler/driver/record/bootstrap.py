"""Confidence intervals of a statistic of a few numbers, by an expanded percentile bootstrap.

Hesterberg, "What Teachers Should Know About the Bootstrap" (2015): percentiles of resampled means
are too near to each other where there are few numbers, by sqrt((n - 1) / n), and because they are
those of a normal distribution where the interval of a mean takes Student's t. So percentiles are
taken that lie farther out, by as much as makes up for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

#: Fewer numbers have no interval. In simulations with scores of several distributions, intervals of
#: five have held the true interquartile mean 94 or 95 times of 100 (the true mean 86 to 93 times),
#: those of four 87 to 90 times, and those of three, which go from the least to the most, 71 to 75.
FEWEST = 5
#: Of each of several groups: with three of each, it was 91 to 95 times of 100; with two, 68 to 90.
_FEWEST_OF_EACH = 3
_CONFIDENCE = 0.95
#: With five numbers, the bounds of a mean are the thousandth part from either end.
_REPETITIONS = 5_000


def bootstrap_interval(
    statistic: Callable[[Column], Column], groups: Sequence[Column]
) -> tuple[float, float] | None:
    """The 95 % confidence interval of a statistic.

    Args:
        statistic: [..., numbers] -> [...].
        groups: the numbers, [numbers] each; each group is resampled by itself. One group has to
            have five; each of several three.

    Returns:
        None: there are too few numbers.
    """
    count = sum(map(len, groups))
    freedom = count - len(groups)
    if freedom < FEWEST - 1 or min(map(len, groups)) < _FEWEST_OF_EACH:
        return None
    random = np.random.default_rng(0)
    drawn = [
        group[random.integers(len(group), size=(_REPETITIONS, len(group)))] for group in groups
    ]  # [repetitions, numbers] each
    found = statistic(np.concatenate(drawn, axis=1))  # [repetitions]
    below = NormalDist().cdf(-math.sqrt(count / freedom) * _quantile_of_t(freedom))
    low, high = np.quantile(found, (below, 1 - below))
    return float(low), float(high)


@lru_cache
def _quantile_of_t(freedom: int) -> float:
    """What Student's t is beyond, on one side, as often as half of what is not in the interval."""
    x = np.linspace(0, 3, 30_001)  # 2.78 with four degrees of freedom, and less with more
    density = np.exp(
        math.lgamma((freedom + 1) / 2)
        - math.lgamma(freedom / 2)
        - 0.5 * math.log(freedom * math.pi)
        - (freedom + 1) / 2 * np.log1p(x**2 / freedom)
    )
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * (x[1] - x[0]))])
    return float(np.interp(_CONFIDENCE / 2, below, x))
