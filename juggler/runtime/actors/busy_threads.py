"""For how long the threads of this process have been at work without progress."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from juggler.runtime.actors.processor_time import thread_waited


class BusyThreads:
    """Times threads that say when they are at work.

    Time for which the whole process stood still, or for which a thread waited for a processor, does
    not count: a thread that cannot run does not hang.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # by thread, in time of `_awake`
        self._stood_still = 0.0  # seconds
        self._waited: dict[int, tuple[float, float]] = {}  # see `longest`

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark this thread as at work."""
        thread = threading.get_ident()
        self._since[thread] = self._awake()
        try:
            yield
        finally:
            del self._since[thread]

    def progresses(self) -> None:
        """Note that this thread's work makes progress, however long it takes: it does not hang."""
        self._since[threading.get_ident()] = self._awake()

    def stood_still(self, seconds: float) -> None:
        """Note that the whole process was stopped for so long (by Ctrl-Z, say)."""
        self._stood_still += seconds

    def longest(self) -> tuple[float, int]:
        """The time since the thread that has been busy longest made progress, and this thread.

        Time for which it waited for a processor counts from the first call that finds it busy.
        """
        busy = self._since.copy()  # a consistent copy
        native = {thread.ident: thread.native_id or 0 for thread in threading.enumerate()}
        before, self._waited = self._waited, {}
        longest = (0.0, 0)
        for thread, since in busy.items():
            waited = thread_waited(os.getpid(), native.get(thread, 0))
            seen = before.get(thread, (since, waited))
            first = seen[1] if seen[0] == since else waited
            self._waited[thread] = (since, first)
            longest = max(longest, (self._awake() - since - (waited - first), thread))
        return longest

    def _awake(self) -> float:
        """Seconds on a clock that stops while this process stands still."""
        return time.monotonic() - self._stood_still
