"""A thread that calls back when it is time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_FAR = 1e9  # seconds: nothing is due


class Clock:
    """
    Args:
        strike: called in the clock's thread, once for everything that is due.
    """

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike
        self._news = threading.Condition()
        self._due = time.monotonic() + _FAR
        self._over = False
        self._thread = threading.Thread(target=self._run, name="gateway-clock", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def within(self, seconds: float) -> None:
        """Strike within so many seconds. May be called in any thread."""
        due = time.monotonic() + seconds
        if due >= self._due:
            return
        with self._news:
            self._due = min(due, self._due)
            self._news.notify()

    def close(self) -> None:
        with self._news:
            self._over = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._over and (left := self._due - time.monotonic()) > 0:
                    self._news.wait(min(left, threading.TIMEOUT_MAX))
                if self._over:
                    return
                self._due = time.monotonic() + _FAR
            self._strike()
