"""The exception for failures of environments."""

from __future__ import annotations

import re
from typing import Final

from juggler.runtime.user_tracebacks import place_of_readers, traceback_of

#: Python's errors about arguments that a function does not take.
_MISCALLED: Final = re.compile(r"\(\) (got an unexpected|got multiple|missing \d+|takes )")

_OLD_RESET: Final = re.compile(r"reset\(\) got an unexpected keyword argument '(seed|options)'")


class VideoFailed(OSError):
    """A video could not be made; the environment has not failed."""


class EnvironmentFailed(Exception):
    """An environment raised, hung, died, or broke Gymnasium's contract.

    Args:
        environment, call, reason, traceback: as below.
        passing: it may not happen again, because it hung, or its process or connection ended.

    Attributes:
        environment: its name, such as "environment 3 (CartPole-v1)".
        call: the call that failed: "constructor", "reset" or "step".
        reason: one line.
        traceback: of the environment's exception, from its own process; "": none.
        lasting: it would fail again, because it broke a rule or raised at a known time.
        when: text that names the EnvRunner's round at the failure; "": unknown.
    """

    def __init__(
        self,
        environment: str,
        call: str,
        reason: str,
        traceback: str = "",
        *,
        passing: bool = False,
    ) -> None:
        super().__init__(environment, call, reason, traceback)
        self.environment = environment
        self.call = call
        self.reason = reason
        self.traceback = traceback
        # An exception may pass by itself, too, as long as its time is unknown.
        self.lasting = not (passing or traceback)
        self.when = ""
        if traceback:
            self.add_note(traceback)  # notes are part of every printed traceback

    @classmethod
    def during(cls, environment: str, call: str, error: Exception) -> EnvironmentFailed:
        """Convert the exception that is being handled.

        Raises:
            VideoFailed: it is one of these, and the environment is not at fault.
        """
        if isinstance(error, VideoFailed):
            raise error
        return cls(environment, call, *_explained(call, error))

    def __str__(self) -> str:
        return f"{self.environment} failed in {self.call}: {self.reason}{self.when}"

    def in_round(self, number: int) -> None:
        """Set the round of a failure, with which an exception becomes lasting."""
        if self.call in ("reset", "step"):
            self.when = f" (in round {number} of its EnvRunner)"
            self.lasting = self.lasting or bool(self.traceback)


def _explained(call: str, error: Exception) -> tuple[str, str]:
    """Return the reason and traceback of a failure, for the environment's author."""
    reason, place = f"{type(error).__name__}: {error}".partition("\n")[0], place_of_readers(error)
    if call == "reset" and isinstance(error, TypeError) and _OLD_RESET.search(reason):
        place += "; write reset(self, *, seed=None, options=None), as Gymnasium specifies"
    # If a constructor does not take its arguments, the reason is enough.
    refused = call == "constructor" and isinstance(error, TypeError) and _MISCALLED.search(reason)
    was_called = place or not refused
    return reason + place, traceback_of(error) if was_called else ""


class _Failures:
    """The context of `failures_of`; a generator would take longer than many steps."""

    __slots__ = ("_call", "_environment")

    def __init__(self, environment: str, call: str) -> None:
        self._environment, self._call = environment, call

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, EnvironmentFailed):
            raise EnvironmentFailed.during(self._environment, self._call, error) from None


def failures_of(environment: str, call: str) -> _Failures:
    """Turn exceptions of an environment in this context into `EnvironmentFailed`."""
    return _Failures(environment, call)
