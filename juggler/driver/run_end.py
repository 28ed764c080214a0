"""Why a run ends."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from juggler.runtime.checkpoints.checkpoint import Checkpoint

#: Reasons that mean more than that a user stopped the run.
OWN_REASONS: Final = ("solved", "stop_steps", "stop_seconds")


class RunEnd:
    """Why a run ends; the first reason stands.

    Attributes:
        reason: "" while the run goes on.
        failure: what failed, for people; "": nothing.
        solved_at: seconds of the run until it was known to be solved; None: it is not.
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
        """The run is to end, and nothing is wrong."""
        if not self.reason:
            self.reason = reason
            if reason == "solved":
                self.solved_at = self._clock.now().wall

    def fail(self, failure: str, reason: str = "failed") -> None:
        """The run cannot go on."""
        if not self.reason:
            self.reason, self.failure = reason, failure

    def failed_at(self, failure: str) -> None:
        """The run ended for the reason it has, and not well."""
        self.failure = self.failure or failure

    def solved_after_all(self) -> None:
        """What came after the last step says that the run is solved."""
        self.reason = "solved"
        self.solved_at = self._clock.now().wall


class Times(NamedTuple):
    """In seconds; both go on where a run is resumed."""

    wall: float  # since the command was given
    training: float  # since the first sample request


class RunClock:
    """The clock of a run, and of its training.

    It is made when a run begins to wait for its workers.

    Args:
        started: when the command was given, in seconds of `time.monotonic`.
    """

    def __init__(self, started: float, resume: Checkpoint | None = None) -> None:
        self._started = started
        self._waits_since = time.monotonic()  # for its workers
        self._began: float | None = None  # to train
        self._before = Times(0.0, 0.0)
        if resume is not None:
            wall = resume.counters["wall_time"]
            # Checkpoints of before training was timed have one time for both.
            self._before = Times(wall, resume.counters.get("training_time", wall))

    @property
    def training(self) -> bool:
        """It has begun."""
        return self._began is not None

    def begin_training(self) -> None:
        self._began = time.monotonic()

    def now(self) -> Times:
        now = time.monotonic()
        trained = 0.0 if self._began is None else now - self._began
        return Times(self._before.wall + now - self._started, self._before.training + trained)

    def is_up(self, stop_seconds: float, patience: float) -> bool:
        """Whether a run has trained, or waited for workers, long enough.

        Time before it has workers to wait for does not count: importing torch alone may take
        longer, and a process that runs several commands gives all of them its own start.
        """
        if self.training:
            return self.now().training >= stop_seconds
        return time.monotonic() - self._waits_since >= max(stop_seconds, patience)
