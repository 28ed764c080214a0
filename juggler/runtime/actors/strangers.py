"""Room for the calls of those who have not shown the run's token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Strangers:
    """A room for a few. One call more ends the one that has been there longest, so that whoever
    says at once what it has to say is served, however many others only sit there. For any thread.

    Args:
        most: calls at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._ends: dict[object, Callable[[], object]] = {}  # oldest first

    @contextmanager
    def visit(self, end: Callable[[], object]) -> Iterator[None]:
        """Be in the room.

        Args:
            end: ends the call, from the thread of another one. It must not wait.
        """
        visit, crowded_out = object(), None
        with self._lock:
            if len(self._ends) >= self._most:
                crowded_out = self._ends.pop(next(iter(self._ends)))
            self._ends[visit] = end
        if crowded_out is not None:
            crowded_out()
        try:
            yield
        finally:
            with self._lock:
                self._ends.pop(visit, None)
