"""What a hub reports about its workers: events, mailbox, and vitals."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from google.protobuf import any_pb2

from juggler.runtime.wire.v1 import attach_pb2

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue that any thread fills and one loop empties."""

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
        # Cleared before the items are taken: a put in between leaves the flag set, so no reader
        # misses an item.
        self._ready.clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def wake(self) -> None:
        """End a wait without an item."""
        self._ready.set()


class Service(Protocol):
    """A further service of an asyncio server."""

    async def add_to(self, server: Any) -> None:
        """Called before the server starts, in its loop."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """The state of an attached worker, according to its heartbeats.

    Attributes:
        held_up_by: the call that holds its main loop up, in words; "": none does, or it is not
            known.
    """

    seconds_silent: float
    resident_bytes: int
    device_bytes: int
    cpu_seconds: float
    held_up_by: str = ""

    @classmethod
    def of(cls, last_seen: float, heartbeat: attach_pb2.Heartbeat) -> Self:
        silent = max(0.0, time.monotonic() - last_seen)
        resident, device = heartbeat.resident_bytes, heartbeat.device_bytes
        return cls(silent, resident, device, heartbeat.cpu_seconds, heartbeat.held_up_by)


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """One incarnation of a worker.

    Two are equal only if they are the same object.
    """

    worker_id: str  # role and index; a replacement has the same
    incarnation: str
    role: str
    index: int
    host: str
    pid: int
    devices: tuple[str, ...]
    data_addresses: tuple[str, ...]
    local: bool


@dataclass(frozen=True, slots=True)
class Joined:
    worker: Worker


@dataclass(frozen=True, slots=True)
class Left:
    """The worker's stream is over.

    `farewell`: the worker said so itself. Then its process ends by itself, and of the commands
    without an answer it has begun exactly those in `unanswered`. `stack`: where its main loop hung.
    `unheard`: its heartbeats were missing too.
    """

    worker: Worker
    reason: str
    failure: attach_pb2.Failure | None = None
    farewell: bool = False
    unanswered: frozenset[int] = frozenset()
    stack: str = ""
    unheard: bool = False


@dataclass(frozen=True, slots=True)
class Replied:
    worker: Worker
    reply: attach_pb2.Reply


@dataclass(frozen=True, slots=True)
class Reported:
    worker: Worker
    body: any_pb2.Any


HubEvent = Joined | Left | Replied | Reported
