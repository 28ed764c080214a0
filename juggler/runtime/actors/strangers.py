"""Limits the calls that have not shown the run's token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Strangers:
    """Room for a few calls, for any thread. One call more ends the oldest one. So a call that says
    at once what it has to say is served, however many others only wait.

    Args:
        most: the most calls at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._ends: dict[object, Callable[[], object]] = {}  # oldest first

    @contextmanager
    def visit(self, end: Callable[[], object]) -> Iterator[None]:
        """Take a place.

        Args:
            end: ends the call, from another call's thread. It must not wait.
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
