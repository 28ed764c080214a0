"""Updates that run beside their caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from juggler.learner.core import Metrics


class UpdatesInFlight:
    """Updates made one after the other by a thread of their own, in the order they are asked for.

    The thread starts with the first of them.
    """

    def __init__(self, limit: int) -> None:
        """Args:
            limit: how many may be asked for and not finished.

        Raises:
            ValueError: that is none.
        """
        if limit < 1:
            raise ValueError(f"updates_in_flight = {limit}: must be at least 1")
        self._places = threading.BoundedSemaphore(limit)
        self._executor = ThreadPoolExecutor(1, "updates", initializer=self._started)
        self._thread: int | None = None
        self._begun = False
        self._closed = False

    def begin(self, update: Callable[..., Metrics], *arguments: Any) -> Future[Metrics]:
        """Have an update made; waits first while as many as may be are in flight.

        Raises:
            RuntimeError: closed before.
        """
        if self._closed:
            raise RuntimeError("the learner is closed: it makes no more updates with async_update")
        self._places.acquire()
        self._begun = True
        future = self._executor.submit(update, *arguments)
        future.add_done_callback(self._finished)
        return future

    def wait(self) -> None:
        """Until none is in flight; at once in the course of one of them."""
        if self._begun and not self._closed and threading.get_ident() != self._thread:
            self._executor.submit(int).result()  # its turn comes after those that are there

    def close(self) -> None:
        """Wait for those in flight, and end the thread."""
        self._closed = True
        self._executor.shutdown()

    def _started(self) -> None:
        self._thread = threading.get_ident()

    def _finished(self, _: Future[Metrics]) -> None:
        self._places.release()
