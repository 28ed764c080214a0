"""How the two ends of a call come to share memory, or do not.

Each end of a call is a `Reader` or a `Writer` of shared memory, whichever of them listens.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.streams.memory_reader import Reader
from juggler.runtime.streams.memory_sockets import (
    MEMORY_METADATA,
    MemorySocket,
    connect,
    memory_path,
    new_token,
    token_in,
)
from juggler.runtime.streams.memory_writer import Writer
from juggler.runtime.streams.shared_memory import Memory, least_bytes
from juggler.runtime.wire.errors import WireError

E = TypeVar("E", Reader, Writer)

_PROBE_SECONDS = 1.0  # a thread of the server only has to be woken
_ANSWER_SECONDS = 10.0  # which may wait for a core; without an answer, nothing is ever shared


class Expected(Generic[E]):
    """The server's end of one call.

    Attributes:
        end: of the connection; None: the client has not connected, or cannot.
    """

    def __init__(
        self, memory: MemorySocket | None, token: str, make_end: Callable[[socket.socket], E]
    ) -> None:
        self.end: E | None = None
        self._make_end: Callable[[socket.socket], E] = make_end
        self._forget = memory.expect(token, self._take) if memory is not None and token else None

    def lease(self, slot: int, size: int) -> memoryview:
        return _lease(self.end, slot, size)

    def close(self) -> None:
        if self._forget is not None:
            self._forget()
        if self.end is not None:
            self.end.close()

    def _take(self, connection: socket.socket) -> None:
        self.end = self._make_end(connection)


def expected(
    memory: MemorySocket | None,
    context: grpc.ServicerContext,
    make_end: Callable[[socket.socket], E],
) -> Expected[E]:
    """Expect the client of a call, if it wants to share memory."""
    metadata: CallMetadata = context.invocation_metadata()
    return Expected(memory, token_in(metadata), make_end)


class Dialled(Generic[E]):
    """The client's end of one call.

    Attributes:
        end: of the connection; None: there is none, or none any more.
    """

    def __init__(
        self,
        address: str,
        make_end: Callable[[socket.socket], E],
        inline: Callable[[str], None] | None,
        memory: str,
    ) -> None:
        """Args:
        address: of the server; over TCP, nothing is shared unless `memory` is given.
        make_end: makes the end of a connection.
        inline: called with the reason, for people, if nothing is shared although both ends are
            on one host.
        memory: the address of the server's socket in the shared directory; "": it has none there.
        """
        self.end: E | None = None
        self._make_end: Callable[[socket.socket], E] = make_end
        self._inline = inline
        self._least = least_bytes()
        self._path = memory_path(memory or address) if self._least is not None else ""
        self._token = new_token()
        self._lock = threading.Lock()
        self._due = bool(self._path)
        self._wanted = False

    def in_metadata(self, metadata: CallMetadata) -> CallMetadata:
        """The metadata of the call, with the token."""
        return (*metadata, (MEMORY_METADATA, self._token)) if self._path else metadata

    def _dial(self) -> None:
        if not (self._due and self._wanted):
            return
        with self._lock:
            if not self._due:
                return
            self._due = False
            why = ""
            try:
                self.end = self._make_end(connect(self._path, self._token, _ANSWER_SECONDS))
                if isinstance(self.end, Reader):
                    self.end.wait_for_probe(_PROBE_SECONDS)  # then the next payload can be shared
            except OSError as error:
                why = f"{error.strerror or error}"
        if why:
            self.give_up(why)

    def is_large(self, size: int) -> bool:
        """Whether a payload is large enough for shared memory. Without one, nobody connects."""
        large = self._least is not None and size >= self._least
        self._wanted |= large
        return large

    def hear(self) -> None:
        """Connect, once; a reader also hears what it is offered. The server knows the token if it
        has sent a message.

        Raises:
            WireError: as `Reader.hear`.
        """
        self._dial()
        if isinstance(self.end, Reader):
            self.end.hear()
            if self.end.why_not:
                self.give_up(self.end.why_not)

    def lease(self, slot: int, size: int) -> memoryview:
        return _lease(self.end, slot, size)

    def take_frozen(self) -> Memory | None:
        """The memory that was leased last, to hand it on; None: it cannot be."""
        end = self.end
        if not isinstance(end, Reader):
            return None
        memory, end.frozen = end.frozen, None
        return memory

    def give_up(self, why: str) -> None:
        """Share nothing any more, and say so."""
        self.close()
        if self._inline is not None:
            self._inline(
                f"sends through sockets what could lie in shared memory: {self._path}: {why}"
            )
            self._inline = None

    def close(self) -> None:
        with self._lock:
            self._due = False
            end, self.end = self.end, None
        if end is not None:
            end.close()


def _lease(end: Reader | Writer | None, slot: int, size: int) -> memoryview:
    """As `Reader.lease`.

    Raises:
        WireError: there is no reader here.
    """
    if not isinstance(end, Reader):
        raise WireError("a payload in shared memory, which is not shared on this stream")
    return end.lease(slot, size)
