"""The reason why a run ends, and its clock."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from juggler.runtime.checkpoints.checkpoint import Checkpoint

#: Reasons that only the run itself may give.
OWN_REASONS: Final = ("solved", "stop_steps", "stop_seconds")


class RunEnd:
    """The end of a run; the first reason stands.

    Attributes:
        reason: "" during the run.
        failure: description of the failure; "": no failure.
        solved_at: seconds of the run until it was confirmed as solved; None: not solved.
    """

    def __init__(self, clock: RunClock) -> None:
        self.reason = ""
        self.failure = ""
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
        self.reason = "solved"
        self.solved_at = self._clock.now().wall


class Times(NamedTuple):
    """Seconds of a run; both continue when a run is resumed."""

    wall: float  # since the command was given
    training: float  # since the first sample request


class RunClock:
    """The clock of a run, and of its training.

    Made when a run begins to wait for its workers.

    Args:
        started: when the command was given, in seconds of `time.monotonic`.
    """

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
