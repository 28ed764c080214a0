"""Limits on incomplete frames: how much memory they may hold, and for how long."""

from __future__ import annotations

import threading
import time

import grpc

from juggler.runtime.actors.resources import total_memory
from juggler.runtime.wire.errors import WireError

_SLOWEST = 64 << 10  # bytes a second
_GRACE_SECONDS = 30.0  # that a frame may take beyond its time at this rate


class Unfinished:
    """The incomplete frames of all streams of a server. A stream whose frame takes too long ends
    when others send something: until then, nobody needs its memory.

    Args:
        most_bytes: of all frames together; None: a quarter of the memory.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = total_memory() // 4 if most_bytes is None else most_bytes
        self._lock = threading.Lock()
        self._began: dict[grpc.ServicerContext, float] = {}
        self._bytes: dict[grpc.ServicerContext, int] = {}

    def hold(self, stream: grpc.ServicerContext, size: int) -> None:
        """Note how many bytes of a stream's frame have come; 0: it has no incomplete frame.

        Raises:
            WireError: all frames together hold too much.
        """
        if not size and not self._began:  # as for nearly every message
            return
        now = time.monotonic()
        with self._lock:
            if size:
                self._began.setdefault(stream, now)
                self._bytes[stream] = size
            elif self._bytes.pop(stream, None) is not None:
                del self._began[stream]
            slow = [
                each
                for each, began in self._began.items()
                if each is not stream
                and now > began + _GRACE_SECONDS + self._bytes[each] / _SLOWEST
            ]
            held = sum(self._bytes.values())
            too_much = size > 0 and held > self._most_bytes
            if too_much:  # this one makes room for the others
                del self._began[stream], self._bytes[stream]
        for each in slow:
            each.cancel()
        if too_much:
            raise WireError(f"{held} bytes of unfinished frames wait here already")
