"""Why a run ends."""

from __future__ import annotations

from typing import Final

from juggler.driver.run_clock import RunClock

#: Reasons that mean more than that somebody stopped the run.
OWN_REASONS: Final = ("solved", "stop_steps", "stop_seconds")


class RunEnd:
    """Why a run ends, once it is to end. The first reason stands.

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
