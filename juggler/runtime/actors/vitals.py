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
