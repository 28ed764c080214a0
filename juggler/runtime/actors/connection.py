"""What the driver's hub knows of a worker that is attached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.actors.processor_time import seconds_waited
from juggler.runtime.wire.v1 import attach_pb2

_SILENCE_BEGINS = 3.0  # seconds
_MOST_PATIENCE = 0.9  # of a silence: finally, even a worker that never gets to run is lost


@dataclass(eq=False, slots=True)
class Connection:
    """The attach stream of a worker, as the hub sees it."""

    worker: Worker
    wake: asyncio.Event
    cancel: Callable[[], bool]  # ends the stream
    outbox: list[attach_pb2.Command] = field(default_factory=list)
    wake_pending: bool = False
    last_seen: float = field(default_factory=time.monotonic)
    waited: float | None = None  # seconds it had waited for a processor when it fell silent
    heartbeat: attach_pb2.Heartbeat = field(default_factory=attach_pb2.Heartbeat)
    over: str = ""  # if set, the stream shall end for this reason
    unheard: bool = False  # the reason is silence; the worker may live
    has_left: bool = False  # its Left event was put

    def silent(self, now: float) -> float:
        """Seconds of silence, without those for which a worker on this host waited for a
        processor."""
        silent = now - self.last_seen
        if silent < _SILENCE_BEGINS or not self.worker.local:
            self.waited = None
            return silent
        waited = seconds_waited(self.worker.pid)
        if self.waited is None:
            self.waited = waited
        return silent - min(waited - self.waited, _MOST_PATIENCE * silent)
