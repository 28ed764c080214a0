"""What a driver does that is started again by the same command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.record.run_directory import has_checkpoint
from juggler.driver.result import goal_reached, goals_behind, nothing_to_do
from juggler.runtime.checkpoints.checkpoint import Checkpoint

CONFIG = RunConfig.from_flat({"stop_return": 475.0, "stop_steps": 1000})


def _ended(run_dir: Path, reason: str) -> Path:
    """What a run leaves behind."""
    (run_dir / "metrics.jsonl").write_text("{}\n")
    (run_dir / "summary.json").write_text(json.dumps({"reason_for_stop": reason}))
    return run_dir


@pytest.mark.parametrize("reason", ["solved", "stop_steps"])
def test_a_run_that_reached_its_goal_is_over(tmp_path: Path, reason: str) -> None:
    assert goal_reached(_ended(tmp_path, reason), CONFIG, CONFIG) == reason


@pytest.mark.parametrize("reason", ["terminated", "interrupted", "no_envrunner", "killed"])
def test_a_run_that_was_ended_by_something_else_goes_on(tmp_path: Path, reason: str) -> None:
    assert goal_reached(_ended(tmp_path, reason), CONFIG, CONFIG) == ""


def test_a_run_with_a_goal_further_off_goes_on(tmp_path: Path) -> None:
    further = RunConfig.from_flat({"stop_return": 490.0, "stop_steps": 1000})
    assert goal_reached(_ended(tmp_path, "solved"), CONFIG, further) == ""
    assert goal_reached(_ended(tmp_path, "stop_steps"), CONFIG, further) == "stop_steps"


def test_what_was_given_for_a_run_that_has_ended_is_told_to_have_no_effect() -> None:
    def said(**keys: object) -> str:
        now = RunConfig.from_flat({**CONFIG.flat(), **keys})
        return nothing_to_do(Path("runs/mine"), "stop_steps", CONFIG, now)

    assert said() == (
        "the run in runs/mine has ended (stop_steps): nothing to go on with. To go further, give "
        "it another stop_steps than 1000"
    )
    assert said(progress="off") == said()
    assert said(lr=1e-4, env="Acrobot-v1") == (
        "the run in runs/mine has ended (stop_steps): nothing to go on with, so that what was "
        "given for 'env' and 'lr' has no effect. To go further, give it another stop_steps than "
        "1000, too"
    )


def test_a_run_is_not_resumed_for_seconds_that_it_has_trained_for() -> None:
    counters = {"trained": 9600, "training_time": 8.0}
    checkpoint = Checkpoint((1, 1), {}, {}, counters, CONFIG.flat(), {})
    past = RunConfig.from_flat({"stop_steps": 900, "stop_seconds": 7.5})
    with pytest.raises(ConfigError, match=r"stop_seconds = 7\.5: .* trained for 8 s already"):
        goals_behind(checkpoint, CONFIG, past)
    assert goals_behind(checkpoint, past, past) == [], "they are as they were"
    (steps,) = goals_behind(checkpoint, CONFIG, RunConfig.from_flat({"stop_steps": 900}))
    assert steps.startswith("stop_steps = 900: the run has trained on 9,600 steps already")
    further = RunConfig.from_flat({"stop_steps": 9601, "stop_seconds": 9.0})
    assert goals_behind(checkpoint, CONFIG, further) == []


def test_a_run_that_went_on_after_its_summary_and_was_killed_goes_on(tmp_path: Path) -> None:
    _ended(tmp_path, "solved")
    later = (tmp_path / "summary.json").stat().st_mtime_ns + 1
    os.utime(tmp_path / "metrics.jsonl", ns=(later, later))
    assert goal_reached(tmp_path, CONFIG, CONFIG) == ""


def test_a_directory_without_a_summary_is_one_of_a_run_to_go_on_with(tmp_path: Path) -> None:
    assert goal_reached(tmp_path, CONFIG, CONFIG) == ""


def test_only_whole_names_are_checkpoints(tmp_path: Path) -> None:
    assert not has_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / ".000000007.tmp").mkdir(parents=True)
    assert not has_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "000000007").mkdir()
    assert has_checkpoint(tmp_path)
