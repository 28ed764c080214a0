"""The state of a hub's workers, and further services of its server."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol, Self

from juggler.runtime.wire.v1 import attach_pb2


class Service(Protocol):
    """A further service of an asyncio server."""

    async def add_to(self, server: Any) -> None:
        """Called before the server starts, in its loop."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """The state of an attached worker, according to its heartbeats."""

    seconds_silent: float
    resident_bytes: int
    device_bytes: int
    cpu_seconds: float

    @classmethod
    def of(cls, last_seen: float, heartbeat: attach_pb2.Heartbeat) -> Self:
        silent = max(0.0, time.monotonic() - last_seen)
        resident, device = heartbeat.resident_bytes, heartbeat.device_bytes
        return cls(silent, resident, device, heartbeat.cpu_seconds)
