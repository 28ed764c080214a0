"""Updates that run beside their caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Unpack

from juggler.learner.config import Passes
from juggler.learner.core.learner_core import Metrics


class Handle(Future[Metrics]):
    """Of an update; knows whether anybody has been told how it ended."""

    told = False

    def result(self, timeout: float | None = None) -> Metrics:
        try:
            return super().result(timeout)
        finally:
            self.told = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self.told = self.done()


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
        self._failed: list[Handle] = []
        self._begun = False
        self._closed = False

    def begin(
        self, update: Callable[..., Metrics], *arguments: Any, **passes: Unpack[Passes]
    ) -> Future[Metrics]:
        """Have an update made; waits first while as many as may be are in flight.

        Raises:
            RuntimeError: closed before.
        """
        if self._closed:
            raise RuntimeError("the learner is closed: it makes no more updates with async_update")
        self._places.acquire()
        self._begun = True
        handle = Handle()
        self._executor.submit(self._make, handle, partial(update, *arguments, **passes))
        return handle

    def wait(self) -> None:
        """Until none is in flight; at once in the course of one of them.

        Raises:
            Exception: of an update that failed, if nobody has asked its handle.
        """
        if self._begun and not self._closed and threading.get_ident() != self._thread:
            self._executor.submit(int).result()  # its turn comes after those that are there
            self._tell()

    def close(self) -> None:
        """Wait for those in flight, and end the thread.

        Raises:
            Exception: as for `wait`.
        """
        self._closed = True
        self._executor.shutdown()
        self._tell()

    def _make(self, handle: Handle, update: Callable[[], Metrics]) -> None:
        try:
            metrics = update()
        except BaseException as error:
            self._failed.append(handle)
            handle.set_exception(error)
        else:
            handle.set_result(metrics)
        finally:
            self._places.release()

    def _tell(self) -> None:
        failed, self._failed = self._failed, []
        for handle in failed:
            if not handle.told:
                handle.result()  # raises

    def _started(self) -> None:
        self._thread = threading.get_ident()
