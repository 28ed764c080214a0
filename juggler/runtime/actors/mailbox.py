"""A queue from many threads to one loop."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any thread may put items; one loop gathers them, and sleeps only if it wants to."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._ready = threading.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._ready.set()

    def gather(self, timeout: float = 0.0) -> list[T]:
        """All current items, oldest first.

        Args:
            timeout: seconds to wait for a first item if there is none. 0 never waits. A wait may
                end early with an empty list.
        """
        if not self._items and timeout > 0:
            self._ready.wait(timeout)
        # Cleared before the items are taken: a put in between leaves the flag set, so nobody misses
        # an item.
        self._ready.clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def wake(self) -> None:
        """End a wait without an item."""
        self._ready.set()
