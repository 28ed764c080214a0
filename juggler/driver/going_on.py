"""What a command finds that goes on with a run."""

from __future__ import annotations

import json
from pathlib import Path

from juggler.driver.config import RunConfig
from juggler.driver.record.run_directory import METRICS_FILE, SUMMARY_FILE
from juggler.runtime.checkpoints.checkpoint import DIRECTORY, newest_first

_GOALS = {"solved": "stop_return", "stop_steps": "stop_steps", "stop_seconds": "stop_seconds"}


def has_checkpoint(run_dir: Path) -> bool:
    """Whether a run was there for long enough to leave a checkpoint, good or not."""
    checkpoints = run_dir / DIRECTORY
    return checkpoints.is_dir() and bool(newest_first(checkpoints))


def goal_reached(run_dir: Path, before: RunConfig, now: RunConfig) -> str:
    """The stop condition that ended a run; "" where it did not end so, or is to go further now.

    Args:
        run_dir: of the run.
        before: its configuration then.
        now: with what is given to the command that goes on with it.
    """
    try:
        # The summary is the last thing that a run writes: an older one is that of an earlier part.
        last_line = (run_dir / METRICS_FILE).stat().st_mtime_ns
        if (run_dir / SUMMARY_FILE).stat().st_mtime_ns < last_line:
            return ""
        reason = json.loads((run_dir / SUMMARY_FILE).read_text())["reason_for_stop"]
    except (OSError, ValueError, KeyError):
        return ""
    goal = _GOALS.get(reason, "")
    return reason if goal and vars(now.driver)[goal] == vars(before.driver)[goal] else ""


def nothing_to_do(run_dir: Path, reached: str, config: RunConfig) -> str:
    """For people, where `goal_reached` says something."""
    goal = _GOALS[reached]
    return (
        f"the run in {run_dir} has ended ({reached}): nothing to go on with. To go further, give "
        f"it another {goal} than {vars(config.driver)[goal]}"
    )
