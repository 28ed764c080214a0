"""Reports of a hub about its workers: events, mailbox, and vitals."""

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
        """Return all current items, oldest first.

        Args:
            timeout: seconds to wait for a first item if there is none. 0 never waits. A wait may
                end early with an empty list.
        """
        if not self._items and timeout > 0:
            self._ready.wait(timeout)
        # Cleared before the items are taken: a `put` in between leaves the flag set, so no reader
        # misses an item.
        self._ready.clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def wake(self) -> None:
        """End a wait without adding an item."""
        self._ready.set()


class Service(Protocol):
    """A further service of an asyncio server."""

    async def add_to(self, server: Any) -> None:
        """Add the service; called before the server starts, in its loop."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """The state of an attached worker, according to its heartbeats.

    Attributes:
        held_up_by: description of the call that holds up its main loop; "": none, or unknown.
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
class WorkerJoined:
    worker: Worker


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The worker's stream has ended.

    `farewell`: the worker announced it. Then its process ends by itself, and `unanswered` has the
    commands that it has begun but not answered. `stack`: where its main loop hung. `unresponsive`:
    its heartbeats were also missing.
    """

    worker: Worker
    reason: str
    failure: attach_pb2.Failure | None = None
    farewell: bool = False
    unanswered: frozenset[int] = frozenset()
    stack: str = ""
    unresponsive: bool = False


@dataclass(frozen=True, slots=True)
class WorkerReplied:
    worker: Worker
    reply: attach_pb2.Reply


@dataclass(frozen=True, slots=True)
class WorkerReported:
    worker: Worker
    body: any_pb2.Any


HubEvent = WorkerJoined | WorkerLeft | WorkerReplied | WorkerReported
