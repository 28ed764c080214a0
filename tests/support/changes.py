"""Waits for changes by other threads, without polling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 60.0  # seconds until a test fails; nothing takes as long


class Changes:
    """Wakes a waiting test after every change by a thread."""

    def __init__(self) -> None:
        self._number = 0
        self._noted = threading.Condition()

    def note(self) -> None:
        with self._noted:
            self._number += 1
            self._noted.notify_all()

    @contextmanager
    def after(self, work: AbstractContextManager[None]) -> Iterator[None]:
        """Note a change whenever this work is done."""
        try:
            with work:
                yield
        finally:
            self.note()

    def wait_for(self, what: Callable[[], T], otherwise: str = "it never came to that") -> T:
        """Return the result of `what` as soon as it is true.

        It may take locks: it is called without one, at once and after every change.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            seen = self._number
            if result := what():
                return result
            with self._noted:
                changed = self._noted.wait_for(
                    lambda seen=seen: self._number != seen, deadline - time.monotonic()
                )
            assert changed, otherwise


def newer_threads_end(before: set[threading.Thread]) -> None:
    """Wait for the end of all threads but these."""
    deadline = time.monotonic() + PATIENCE
    while left := set(threading.enumerate()) - before:
        for each in left:
            # One that is just being started cannot be joined.
            each._started.wait(deadline - time.monotonic())  # type: ignore[attr-defined]
            each.join(max(0.0, deadline - time.monotonic()))
            assert not each.is_alive(), f"{each.name}: still running"


class SkippedTime:
    """Replaces a module's `time`: sleeping only moves the clock."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += seconds
