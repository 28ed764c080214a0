"""Intervals: what is to be done every so often."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.synchronous_rounds import answer_the_snapshot, play_a_round, synchronous

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


@pytest.mark.parametrize("keys", [{"metrics_steps": 60}, {"stop_steps": 6000}])
def test_lines_come_at_marks_of_steps_too(tmp_path: Path, keys: dict[str, int]) -> None:
    world = synchronous(tmp_path / "checkpoints", **keys)
    for turn in range(4):
        play_a_round(world)  # of 40 steps
        world.turn()
        if turn == 1:
            answer_the_snapshot(world)
            (written,) = world.written.gather(timeout=30)
            world._loop._hear(written)
            world.turn()
    told = [(line["step_mark"], line["env_steps_trained"]) for line in world.lines]
    assert told == [(60, 80), (120, 120)], "one line, however many turns are taken at a mark"
    assert [line["env_steps_in_flight"] for line in world.lines] == [0, 0]


@pytest.mark.parametrize("keys", [{}, {"metrics_steps": 0, "stop_steps": 4000}])
def test_no_lines_at_marks_where_no_steps_are_known_or_wanted(
    tmp_path: Path, keys: dict[str, int]
) -> None:
    world = synchronous(tmp_path / "checkpoints", **keys)
    play_a_round(world)
    assert world.lines == []
