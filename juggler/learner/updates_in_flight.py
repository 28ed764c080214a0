"""Updates that run in a thread while their caller continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Unpack

from juggler.learner.config import Passes
from juggler.learner.core.learner_core import Metrics


class Handle(Future[Metrics]):
    """The future of an update, which knows whether anybody has asked for its result."""

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
    """A thread that makes updates one after the other, in the order of the calls to `begin`.

    The thread starts with the first update.
    """

    def __init__(self, limit: int) -> None:
        """Args:
            limit: the largest number of unfinished updates.

        Raises:
            ValueError: the limit is below 1.
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
        """Start an update; first wait while the limit of unfinished updates is reached.

        Raises:
            RuntimeError: the learner is closed.
        """
        if self._closed:
            raise RuntimeError("the learner is closed: async_update makes no more updates")
        self._places.acquire()
        self._begun = True
        handle = Handle()
        self._executor.submit(self._make, handle, partial(update, *arguments, **passes))
        return handle

    def wait(self) -> None:
        """Wait until no update is in flight. Returns at once if called from within an update.

        Raises:
            Exception: the error of a failed update, if nobody has asked its handle.
        """
        if self._begun and not self._closed and threading.get_ident() != self._thread:
            self._executor.submit(int).result()  # runs after all that were submitted before
            self._tell()

    def close(self) -> None:
        """Wait for the updates in flight, and end the thread.

        Raises:
            Exception: as in `wait`.
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
