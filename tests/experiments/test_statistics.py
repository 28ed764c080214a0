"""Interquartile means and their intervals, beside slow ones that are written out."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import ArrayLike

import juggler
from juggler.experiments.seeds import Interval, mean_curve


def trimmed_mean(scores: ArrayLike) -> float:
    """That of SciPy, which takes a second to import."""
    from scipy import stats

    return float(stats.trim_mean(scores, 0.25))


def bounds(found: Interval) -> tuple[float, float]:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


@pytest.mark.parametrize("runs", [1, 2, 3, 4, 5, 10, 33])
def test_the_interquartile_mean_is_that_of_scipy(runs: int) -> None:
    scores = np.random.default_rng(runs).normal(size=runs) * 100
    found = juggler.interquartile_mean(scores)
    assert found.mean == pytest.approx(trimmed_mean(scores))
    if runs >= 5:
        low, high = bounds(found)
        assert low <= found.mean <= high


def test_the_interval_is_that_of_an_expanded_bootstrap_that_draws_within_each_task() -> None:
    """Bounds with other random numbers agree within some percent."""
    from scipy import stats

    random = np.random.default_rng(7)
    tasks = [random.normal(1, 0.5, size=10), random.normal(5, 2, size=6)]
    means = []
    for _ in range(8000):
        drawn: list[float] = []
        for task in tasks:
            drawn += [task[random.integers(len(task))] for _ in task]
        means.append(trimmed_mean(drawn))
    beyond = stats.norm.cdf(-np.sqrt(16 / 14) * stats.t.ppf(0.975, 14))
    low, high = np.quantile(means, [beyond, 1 - beyond])
    found = bounds(juggler.interquartile_mean(*tasks))
    assert found == pytest.approx((low, high), abs=0.08 * (high - low))
    mixed = bounds(juggler.interquartile_mean(np.concatenate(tasks)))
    assert np.ptp(mixed) > 1.2 * np.ptp(found), "strata make it narrower"


@pytest.mark.parametrize(
    "tasks", [([7.0],), ([7.0], [5.0]), ([1.0, 2.0, 3.0, 4.0],), ([1.0] * 9, [2.0, 3.0])]
)
def test_too_few_runs_of_a_task_have_no_interval(tasks: tuple[list[float], ...]) -> None:
    found = juggler.interquartile_mean(*tasks)
    assert (found.low, found.high) == (None, None)
    assert found.mean == pytest.approx(trimmed_mean(np.concatenate(tasks)))


@pytest.mark.parametrize("sizes", [(5,), (6,), (20,), (3, 3)])
def test_it_holds_the_true_value_as_often_as_it_says(sizes: tuple[int, ...]) -> None:
    """About 95 % of the time; plain percentiles reach 84 to 90."""
    random = np.random.default_rng(3)
    held = 0
    for _ in range(300):
        tasks = [random.normal(size=size) for size in sizes]
        low, high = bounds(juggler.interquartile_mean(*tasks))
        held += low <= 0 <= high
    assert 0.905 < held / 300 < 0.99


@pytest.mark.parametrize("tasks", [(), ([],), ([1.0], []), ([float("nan")],)])
def test_scores_have_to_be_there_and_finite(tasks: tuple[list[float], ...]) -> None:
    with pytest.raises(ValueError, match="finite"):
        juggler.interquartile_mean(*tasks)


def test_a_mean_curve_has_the_mean_at_every_place() -> None:
    """Lines are their own interpolation, so the mean is known everywhere."""
    x = np.arange(11.0)
    curves = [(x, slope * x) for slope in (1.0, 2.0, 3.0, 4.0, 5.0)]
    found = mean_curve(curves)
    assert found is not None
    np.testing.assert_allclose(found.mean, 3.0 * found.x)
    assert (found.x[0], found.x[-1]) == (0, 10)
    assert (found.low <= found.mean).all()
    assert (found.mean <= found.high).all()


def test_a_run_that_ends_sooner_keeps_its_last_value_and_one_that_begins_later_bounds_it() -> None:
    short = np.array([0.0, 1.0]), np.array([np.nan, 4.0])
    long = np.array([0.0, 1.0, 3.0]), np.array([0.0, 2.0, 2.0])
    found = mean_curve([short, long])
    assert found is not None
    assert (found.x[0], found.x[-1]) == (1, 3)
    np.testing.assert_allclose(found.mean, 3.0)
    assert mean_curve([short, (np.array([0.0]), np.array([np.nan]))]) is None
