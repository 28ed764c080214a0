"""A queue from many threads to one loop."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any thread puts; one loop gathers whatever there is, and sleeps only when it wants to."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._ready = threading.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._ready.set()

    def gather(self, timeout: float = 0.0) -> list[T]:
        """All items that are here, oldest first.

        Args:
            timeout: seconds to wait for a first item where there is none. 0 never waits. A wait
                may end early with an empty list.
        """
        if not self._items and timeout > 0:
            self._ready.wait(timeout)
        # Cleared before the items are taken: a put in between leaves the flag set, never an item
        # that nobody is woken for.
        self._ready.clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def wake(self) -> None:
        """End a wait without an item."""
        self._ready.set()
