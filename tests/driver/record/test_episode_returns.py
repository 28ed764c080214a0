"""What returns of episodes say about their mean."""

from __future__ import annotations

import numpy as np
import pytest

from juggler.driver.record.episode_returns import Played, WithReturns


def test_the_mean_and_deviation_of_what_was_played() -> None:
    assert Played.of([1.0, 3.0]) == Played(2.0, 1.0, 2)


class PlayedSome(WithReturns):
    def __init__(self, returns: list[float]) -> None:
        self.returns = returns


def bounds(*returns: float) -> tuple[float, float]:
    interval = PlayedSome(list(returns)).interval
    assert interval is not None
    return interval


def test_the_interval_of_a_mean_is_that_of_a_normal_distribution_where_returns_are_normal() -> None:
    returns = np.random.default_rng(5).normal(100, 20, size=400)
    low, high = bounds(*returns)
    error = 1.96 * returns.std() / 20
    assert low == pytest.approx(returns.mean() - error, abs=0.1 * error)
    assert high == pytest.approx(returns.mean() + error, abs=0.1 * error)


def test_the_interval_of_equal_returns_is_one_number() -> None:
    assert bounds(*[500.0] * 20) == (500.0, 500.0)


@pytest.mark.parametrize("episodes", [1, 4])
def test_few_episodes_have_no_interval(episodes: int) -> None:
    assert PlayedSome([3.0] * episodes).interval is None


def test_the_interval_of_five_episodes_holds_the_mean_nearly_as_often_as_it_says() -> None:
    """Plain percentiles do 86 % of the time."""
    random = np.random.default_rng(11)
    held = 0
    for _ in range(300):
        low, high = bounds(*random.normal(size=5))
        held += low <= 0 <= high
    assert 0.89 < held / 300 < 0.97


def test_the_interval_of_skewed_returns_stays_among_them() -> None:
    """Normal bounds would not: their lower one is below 0."""
    returns = [0.0] * 9 + [100.0]
    low, high = bounds(*returns)
    assert 0.0 == low < 10.0 < high <= 50.0
