"""The result of a run, and whether it can continue."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.record.run_directory import last_summary, metrics_table
from juggler.driver.record.wording import best_checkpoint, here, outcome, restarted
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.near_matches import listed

_GOALS = {"solved": "stop_return", "stop_steps": "stop_steps", "stop_seconds": "stop_seconds"}
_OF_COMMANDS = ("run_dir", "progress")  # keys without effect on training


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """Result of a run: its directory, its end, its metrics.

    It prints as a few lines, and as a table in a notebook.

    Attributes:
        summary: the content of `summary.json`.
        run_dir: the run's directory, absolute.
        checkpoint: the newest checkpoint; None if the run has none.
    """

    summary: dict[str, Any]
    run_dir: Path
    checkpoint: Path | None

    @property
    def solved(self) -> bool:
        return bool(self.summary["solved"])

    @property
    def best(self) -> Path | None:
        """Checkpoint with the best evaluation during training.

        None: no evaluation; a run has evaluations only with `evaluation_seconds` above 0.
        """
        best = self.summary.get("best")
        return Path(best["checkpoint"]) if best else None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics as a flat table.

        For `pandas.DataFrame(result.metrics())`: a dict for each line, with keys joined by "/".
        Steps that a resumed run made again count once.

        Raises:
            RunDirectoryError: the run's `metrics.jsonl` cannot be read.
        """
        return metrics_table(self.run_dir)

    def __repr__(self) -> str:
        return "\n".join(f"{name:<10} {value}" for name, value in self._rows())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{name}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return f"<table>{rows}</table>"

    def _rows(self) -> list[tuple[str, str]]:
        checkpoint = "none" if self.checkpoint is None else here(self.checkpoint)
        where = [("run", here(self.run_dir)), ("checkpoint", checkpoint)]
        more = ("best", best_checkpoint(self.summary)), ("restarts", restarted(self.summary))
        return [*outcome(self.summary), *where, *(row for row in more if row[1])]


def goal_reached(run_dir: Path, before: RunConfig, now: RunConfig) -> str:
    """Return the stop condition that ended a run, if unchanged."""
    summary, _ = last_summary(run_dir)
    reason = str(summary.get("reason_for_stop", ""))
    goal = _GOALS.get(reason, "")
    return reason if goal and vars(now.driver)[goal] == vars(before.driver)[goal] else ""


def goals_behind(checkpoint: Checkpoint, before: RunConfig, now: RunConfig) -> list[str]:
    """Find a given stop condition that a resumed run has passed.

    Returns:
        A warning for stop_steps, with which the run ends after one more update.

    Raises:
        ConfigError: stop_seconds leaves no time for an update.
    """
    was, wanted = before.driver, now.driver
    steps, seconds = checkpoint.counters["trained"], checkpoint.counters.get("training_time", 0.0)
    limit = wanted.stop_seconds
    if limit is not None and limit != was.stop_seconds and seconds >= limit:
        raise ConfigError(
            f"stop_seconds = {limit}: the run has trained for {seconds:.0f} s already, and the "
            "limit includes this time: give more than that"
        )
    most = wanted.stop_steps
    if most is not None and most != was.stop_steps and steps >= most:
        done = f"the run has trained on {steps:,} steps already, and the limit includes them"
        return [f"stop_steps = {most}: {done}: it ends after one more update"]
    return []


def nothing_to_do(run_dir: Path, reached: str, before: RunConfig, now: RunConfig) -> str:
    """Describe that a run has reached its goal, and how to continue."""
    goal, was, given = _GOALS[reached], before.flat(), now.flat()
    changed = [key for key in given if given[key] != was.get(key) and key not in _OF_COMMANDS]
    so = f", so the new values of {listed(changed)} have no effect" if changed else ""
    return (
        f"the run in {here(run_dir)} has ended ({reached}): nothing is left to do{so}. To "
        f"continue, give it another {goal} than {vars(now.driver)[goal]}{', too' if so else ''}"
    )
