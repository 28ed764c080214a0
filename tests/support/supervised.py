"""What a supervisor tells of the processes that it starts, for tests."""

from __future__ import annotations

import time
from typing import Any

from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.processes import WorkerProgram
from juggler.runtime.actors.supervisor import Exited, RestartPolicy

QUICK = RestartPolicy(first_delay=0.01, longest_delay=0.05, quarantine_after=3)
NEVER = RestartPolicy(quarantine_after=1)


def eventually(what: Any, seconds: float = 90.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := what():
            return result
        time.sleep(0.02)
    raise AssertionError(f"it did not happen within {seconds} s")


class Exits:
    """What a supervisor tells, one after the other."""

    def __init__(self) -> None:
        self.events: Mailbox[Any] = Mailbox()
        self._waiting: list[Any] = []

    def next(self, seconds: float = 90.0) -> Exited:
        deadline = time.monotonic() + seconds
        while not self._waiting and time.monotonic() < deadline:
            self._waiting += self.events.gather(deadline - time.monotonic())
        assert self._waiting, "nothing ended"
        exited = self._waiting.pop(0)
        assert isinstance(exited, Exited)
        return exited


def sleeper() -> WorkerProgram:
    return WorkerProgram("time:sleep", 60)
