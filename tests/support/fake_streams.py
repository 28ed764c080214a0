"""Streams and events of torch, for a device played by a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.changes import Changes

PATIENCE = 60.0  # seconds until a test fails; nothing takes as long


class FakeEvent:
    """Over on request, or at once on a device without delay."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._over = threading.Event()
        self.stream: Any = None

    def record(self, stream: Any = None) -> None:
        self.stream = stream or self._device.current_stream()
        self._device.events.append(self)
        if not self._device.slow:
            self._over.set()
        self._device.changes.note()

    def finish(self) -> None:
        self._over.set()

    def query(self) -> bool:
        return self._over.is_set()

    def synchronize(self) -> None:
        self._device.awaited.append(self)
        self._device.changes.note()
        assert self._over.wait(PATIENCE), "the device never got there"


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.waited_for: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waited_for.append(event)


class FakeDevice:
    """Stands in for `torch.cuda`.

    Attributes:
        slow: whether events are over only when the test says so.
        events: that were recorded, in order.
        awaited: events that a thread has waited for.
        threads: names of threads that have set their device.
        changes: of `events` and `awaited`.
    """

    def __init__(self) -> None:
        self.slow = False
        self.events: list[FakeEvent] = []
        self.awaited: list[FakeEvent] = []
        self.threads: list[str] = []
        self.changes = Changes()
        self.main = FakeStream("main")
        self._streams = 0
        self._current = threading.local()

    def set_device(self, device: Any) -> None:
        self.threads.append(threading.current_thread().name)

    def current_stream(self, device: Any = None) -> FakeStream:
        stream: FakeStream = getattr(self._current, "stream", self.main)
        return stream

    def synchronize(self, device: Any = None) -> None:
        pass

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        yield
        self._current.stream = before

    def Stream(self) -> FakeStream:
        self._streams += 1
        return FakeStream(f"side {self._streams}")

    def Event(self, **_: Any) -> FakeEvent:
        return FakeEvent(self)
