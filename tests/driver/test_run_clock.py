"""RunClock: what counts as training, where a run goes on, and when its time is up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from juggler.driver import run_clock
from juggler.driver.record.wording import conclude
from juggler.driver.run_clock import RunClock
from juggler.runtime.checkpoints.checkpoint import Checkpoint


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Wound on by hand."""
    now = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(run_clock, "time", SimpleNamespace(monotonic=lambda: now.now))
    return now


def _checkpoint(**counters: float) -> Checkpoint:
    return cast(Checkpoint, cast(Any, SimpleNamespace(counters=counters)))


def test_training_counts_from_where_it_begins_and_the_wall_from_the_command(
    time: SimpleNamespace,
) -> None:
    clock = RunClock(990.0)
    assert clock.now() == (10.0, 0.0)
    time.now += 5
    assert not clock.training
    clock.begin_training()
    assert clock.training
    time.now += 7
    assert clock.now() == (22.0, 7.0)


def test_both_go_on_where_a_run_is_resumed(time: SimpleNamespace) -> None:
    clock = RunClock(990.0, _checkpoint(wall_time=500.0, training_time=480.0))
    assert clock.now() == (510.0, 480.0)
    clock.begin_training()
    time.now += 20
    assert clock.now() == (530.0, 500.0)
    assert clock.is_up(500.0, patience=60)
    assert not clock.is_up(501.0, patience=60)


def test_a_checkpoint_of_before_training_was_timed_has_trained_all_the_time(
    time: SimpleNamespace,
) -> None:
    assert RunClock(1000.0, _checkpoint(wall_time=500.0)).now() == (500.0, 500.0)


def test_time_is_up_after_so_much_training_however_long_the_start_took(
    time: SimpleNamespace,
) -> None:
    clock = RunClock(1000.0)
    time.now += 55
    assert not clock.is_up(10, patience=60)
    clock.begin_training()
    time.now += 9
    assert not clock.is_up(10, patience=60)
    time.now += 1
    assert clock.is_up(10, patience=60)


@pytest.mark.parametrize(("stop_seconds", "waits"), [(10, 60), (100, 100)])
def test_time_is_up_for_a_run_that_cannot_begin_too(
    time: SimpleNamespace, stop_seconds: float, waits: float
) -> None:
    clock = RunClock(1000.0, _checkpoint(wall_time=500.0, training_time=5.0))
    time.now += waits - 1
    assert not clock.is_up(stop_seconds, patience=60)
    time.now += 1
    assert clock.is_up(stop_seconds, patience=60)


def test_a_run_waits_for_its_workers_however_long_ago_the_command_was_given(
    time: SimpleNamespace,
) -> None:
    clock = RunClock(time.now - 1000)  # imports took long, or the process has had other commands
    assert not clock.is_up(10, patience=60)
    time.now += 59
    assert not clock.is_up(10, patience=60)
    time.now += 1
    assert clock.is_up(10, patience=60)


def test_the_end_tells_both() -> None:
    summary = {
        "solved": True,
        "episode_return_mean": 480.0,
        "env_steps_trained": 1000,
        "wall_time": 83.0,
        "startup_time": 7.5,
        "training_time": 75.5,
    }
    assert conclude(summary) == (
        "solved: return 480.0 after 1k steps in 1:23 (start-up 7.5 s, training 1:15)"
    )


def test_the_end_of_an_interrupted_run_says_how_to_go_on() -> None:
    summary = {"reason_for_stop": "interrupted", "run_dir": "/runs/my run", "checkpoint": "/c/1"}
    assert conclude(summary).endswith("to go on: juggler train --resume '/runs/my run'")
    of_a_script = conclude({**summary, "command": "python"})
    assert of_a_script.endswith(
        "to go on: juggler.resume('/runs/my run', ...), with what is of the script passed again"
    )
    assert "--resume" not in conclude({**summary, "checkpoint": None})
    assert "--resume" not in conclude({**summary, "reason_for_stop": "stop_steps"})
