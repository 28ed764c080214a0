"""Intervals: what is to be done every so often."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from juggler.driver.upkeep import Intervals


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that goes when it is told to."""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr("juggler.driver.upkeep.time.monotonic", lambda: made.now)
    return made


def test_each_thing_comes_after_its_own_interval_and_again_after_another(
    clock: SimpleNamespace,
) -> None:
    intervals = Intervals({"often": 1.0, "seldom": 2.5})
    named = []
    for _ in range(6):
        clock.now += 1.0
        named.append(intervals.due())
    seldom = ["often", "seldom"]
    assert named == [["often"], ["often"], seldom, ["often"], ["often"], seldom]


def test_what_was_missed_for_long_comes_once(clock: SimpleNamespace) -> None:
    intervals = Intervals({"line": 1.0})
    clock.now += 100.0
    assert intervals.due() == ["line"]
    assert intervals.due() == []


def test_an_interval_of_0_never_comes(clock: SimpleNamespace) -> None:
    intervals = Intervals({"line": 5.0, "evaluation": 0.0})
    assert intervals.left() == 5.0
    clock.now += 7.0
    assert intervals.left() == 0.0
    assert intervals.due() == ["line"]
