"""The rate of a run: how many steps it trains on per second."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest

from juggler.driver.record.metrics import TrainingRate


def _seen(seconds: Iterable[int], every: int, steps: int, rate: TrainingRate) -> list[float]:
    """The rate at each of these seconds, where an update of so many steps is made every so many
    seconds."""
    found = []
    for second in seconds:
        rate.note(float(second), second // every * steps)
        found.append(rate.per_second())
    return found


@pytest.mark.parametrize("every", [1, 3, 7, 40])
def test_updates_that_take_longer_than_a_line_have_one_rate_in_all_of_their_lines(
    every: int,
) -> None:
    rates = _seen(range(1, 200), every, 2048, TrainingRate())
    assert rates[: every - 1] == [0.0] * (every - 1), "no update has been made"
    assert rates[every - 1 :] == pytest.approx([2048 / every] * (200 - every))


def test_the_rate_falls_while_nothing_is_trained_on_for_longer_than_an_update_takes() -> None:
    rate = TrainingRate()
    before = _seen(range(1, 31), 3, 300, rate)[-1]
    after = []
    for second in range(31, 100):
        rate.note(float(second), 3000)
        after.append(rate.per_second())
    assert before == after[2] == 100.0
    assert all(one > next_one for one, next_one in pairwise(after[2:]))
    assert after[-1] == pytest.approx(300 / 69)


def test_the_rate_is_that_of_the_last_seconds_and_not_of_the_whole_run() -> None:
    rate = TrainingRate()
    _seen(range(1, 101), 1, 1000, rate)
    for second in range(101, 121):
        rate.note(float(second), 100_000 + (second - 100) * 50)
    assert rate.per_second() == pytest.approx(50.0)


def test_a_run_that_goes_on_counts_what_it_adds() -> None:
    rate = TrainingRate(600.0, 1_000_000)
    assert rate.per_second() == 0.0
    rate.note(602.0, 1_000_400)
    assert rate.per_second() == pytest.approx(200.0)
