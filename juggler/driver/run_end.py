"""The end of a run: its reason, its clock, and its result."""

from __future__ import annotations

import html
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.reporting.run_directory import last_summary, metrics_table
from juggler.driver.reporting.wording import conclude, here
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.near_matches import listed

#: Reasons that only the run itself may give.
OWN_REASONS: Final = ("solved", "stop_steps", "stop_seconds")


class RunEnd:
    """The end of a run; the first reason stands."""

    def __init__(self, clock: RunClock) -> None:
        self.reason = ""  # "" during the run
        self.failure = ""  # description of the failure; "": no failure
        # Seconds of the run until it was confirmed as solved; None: not solved
        self.solved_at: float | None = None
        self._clock = clock

    @property
    def reached(self) -> bool:
        return bool(self.reason)

    def stop(self, reason: str) -> None:
        """End the run normally."""
        if not self.reason:
            self.reason = reason
            if reason == "solved":
                self.solved_at = self._clock.now().wall

    def fail(self, failure: str, reason: str = "failed") -> None:
        """End the run, which cannot continue."""
        if not self.reason:
            self.reason, self.failure = reason, failure

    def failed_at(self, failure: str) -> None:
        """Mark an ended run as failed, for its present reason."""
        self.failure = self.failure or failure

    def solved_after_all(self) -> None:
        """Mark the run as solved, by an evaluation after the last step."""
        self.reason, self.failure = "solved", ""
        self.solved_at = self._clock.now().wall


class Times(NamedTuple):
    """Seconds of a run; both continue when a run is resumed."""

    wall: float  # since the command was given
    training: float  # since the first sample request


class RunClock:
    """The clock of a run, and of its training."""

    def __init__(self, started: float, resume: Checkpoint | None = None) -> None:
        self._started = started
        self._waits_since = time.monotonic()  # time since the run waits for its workers
        self._began: float | None = None  # time of the first sample request
        self._before = Times(0.0, 0.0)
        if resume is not None:
            wall = resume.counters["wall_time"]
            # Older checkpoints have one time for both.
            self._before = Times(wall, resume.counters.get("training_time", wall))

    @property
    def training(self) -> bool:
        """Whether training has begun."""
        return self._began is not None

    def begin_training(self) -> None:
        self._began = time.monotonic()

    def now(self) -> Times:
        now = time.monotonic()
        trained = 0.0 if self._began is None else now - self._began
        return Times(self._before.wall + now - self._started, self._before.training + trained)

    def is_up(self, stop_seconds: float, patience: float) -> bool:
        """Return whether a run has trained, or waited for workers, long enough.

        The time before it waits for workers does not count: importing torch may take longer, and a
        process that runs several commands gives all of them its own start.
        """
        if self.training:
            return self.now().training >= stop_seconds
        return time.monotonic() - self._waits_since >= max(stop_seconds, patience)


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
        return conclude(self.summary)

    def _repr_html_(self) -> str:
        named = (line.partition(": ") for line in conclude(self.summary).splitlines())
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, _, value in named
        )
        return f"<table>{rows}</table>"


def goal_reached(run_dir: Path, before: RunConfig, now: RunConfig) -> str:
    """Return the stop condition that ended a run, if unchanged."""
    summary, _ = last_summary(run_dir)
    reason = str(summary.get("reason_for_stop", ""))
    goal = _GOALS.get(reason, "")
    return reason if goal and vars(now.driver)[goal] == vars(before.driver)[goal] else ""


def goals_behind(checkpoint: Checkpoint, before: RunConfig, now: RunConfig) -> list[str]:
    """Warn of a given stop condition that a resumed run has passed.

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
