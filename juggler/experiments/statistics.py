"""Statistics over several runs with different seeds.

Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (2021): the
interquartile mean is less affected by single runs than the mean, and more informative than the
median; a bootstrap stratified by task estimates its uncertainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from juggler.driver.record.episode_returns import Column, bootstrap_interval

_POINTS = 100  # of a curve


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean of several runs, with a confidence interval.

    Attributes:
        mean: the interquartile mean.
        low: the lower bound of its 95 % confidence interval; None: too few runs to estimate their
            variance: fewer than five of a single task, or three of one of several tasks.
        high: the upper bound, or None.
    """

    mean: float
    low: float | None
    high: float | None


def interquartile_mean(*tasks: ArrayLike) -> Interval:
    """Return the interquartile mean of all scores, with a bootstrap interval.

    Args:
        tasks: for each task the scores of its runs, such as their returns. All tasks need the same
            scale of scores.

    Raises:
        ValueError: there are no scores, or not only finite ones.
    """
    scores = [np.asarray(task, dtype=np.float64).reshape(-1) for task in tasks]  # [runs] each
    if not scores or not all(len(task) and np.isfinite(task).all() for task in scores):
        raise ValueError("give finite scores of at least one run for each task")
    mean = float(_middle_mean(np.concatenate(scores)))
    low, high = bootstrap_interval(_middle_mean, scores) or (None, None)
    return Interval(mean, low, high)


@dataclass(frozen=True, slots=True)
class MeanCurve:
    """Interquartile mean of curves, with intervals."""

    x: Column  # the places, [points]
    mean: Column  # [points]
    low: Column  # [points]; NaN where there are too few curves for an interval
    high: Column  # [points]; NaN like `low`


def mean_curve(curves: Sequence[tuple[Column, Column]]) -> MeanCurve | None:
    """Return the mean of curves, from where all have begun.

    A curve that ends earlier keeps its last value.

    Args:
        curves: of each run x, which rises, and y, which may have NaN.

    Returns:
        The mean; None if a curve has no values.
    """
    known = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in curves]  # [values] each
    if not known or not all(len(x) for x, _ in known):
        return None
    places = np.linspace(max(x[0] for x, _ in known), max(x[-1] for x, _ in known), _POINTS)
    values = np.array([np.interp(places, x, y) for x, y in known])  # [runs, points]
    found = [interquartile_mean(at) for at in values.T]
    columns = [(each.mean, each.low, each.high) for each in found]
    mean, low, high = np.array(columns, dtype=np.float64).T  # [points] each
    return MeanCurve(places, mean, low, high)


def _middle_mean(scores: Column) -> Column:
    """Return the mean of the middle half: [..., runs] -> [...]."""
    ordered = np.sort(scores, axis=-1)
    cut = ordered.shape[-1] // 4
    middle: Column = ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)
    return middle
