"""How long a run has taken, and how long it has trained."""

from __future__ import annotations

import time
from typing import NamedTuple

from juggler.runtime.checkpoints.checkpoint import Checkpoint


class Times(NamedTuple):
    """In seconds; both go on where a run is resumed."""

    wall: float  # since the command was given
    training: float  # since the first sample request


class RunClock:
    """Begins with the command; training begins with the first sample request. It is made when a run
    begins to wait for its workers.

    Args:
        started: when the command was given, in seconds of `time.monotonic`.
        resume: the state that the run goes on from.
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
        """Whether a run that is to train for so long has done so; or has waited for its workers for
        as long, and for longer than anything is waited for.

        Time before it has workers to wait for does not count: importing torch alone may take
        longer, and a process that runs several commands gives all of them its own start.
        """
        if self.training:
            return self.now().training >= stop_seconds
        return time.monotonic() - self._waits_since >= max(stop_seconds, patience)
