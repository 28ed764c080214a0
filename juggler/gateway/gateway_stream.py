"""A stream of a simulator: what whoever answers it may do, whichever API of grpcio carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Protocol

from juggler.runtime.actors.endpoints import SERVER_OPTIONS

SERVICE = "juggler.simulator.v1.Simulator"

#: The size limit of one message.
MESSAGE_BYTES = 64 << 20
#: Bytes of unread answers that end a stream; a policy has to fit.
MOST_UNREAD = 4 * MESSAGE_BYTES
#: Between a goodbye and the end of the server.
GRACE_SECONDS = 0.5

_REPLACED = {
    # Simulators of one process may share a connection.
    "grpc.max_concurrent_streams": 1024,
    "grpc.max_receive_message_length": MESSAGE_BYTES,
    "grpc.max_send_message_length": MESSAGE_BYTES,
}
OPTIONS = [(k, v) for k, v in SERVER_OPTIONS if k not in _REPLACED] + list(_REPLACED.items())


class Listener(Protocol):
    """Acts on what simulators say. Its methods are called within `at_work` alone."""

    def at_work(self) -> AbstractContextManager[None]:
        """Other threads have to wait meanwhile."""

    def came(self, stream: GatewayStream) -> None:
        """A stream was let in."""

    def said(self, stream: GatewayStream, message: bytes) -> None:
        """A message came."""

    def gone(self, stream: GatewayStream) -> None:
        """Nothing more comes or goes on a stream. May be called twice."""

    def refused(self, peer: str, why: str) -> None:
        """A call was not let in, from an address as gRPC has it."""

    def info(self) -> bytes:
        """An `Info` of simulator.proto, for whoever asks."""

    def turn(self) -> None:
        """All messages that have come by now were told."""


class GatewayStream(ABC):
    """One stream of a simulator, to be used within `Listener.at_work`.

    Args:
        listener: of the stream.
        peer: the address of the other end, as gRPC has it.

    Attributes:
        peer: as given.
        session: whoever uses the stream may keep its session here.
    """

    def __init__(self, listener: Listener, peer: str) -> None:
        self.peer = peer
        self.session: Any = None
        self._listener = listener
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._closing = False  # once everything is sent

    def send(self, message: bytes) -> None:
        """Never waits."""
        if self._closing:
            return
        self._unsent.append(message)
        self._unsent_bytes += len(message)
        self._wake()
        if self._unsent_bytes > MOST_UNREAD:
            text = f"{len(self._unsent)} answers were not read: read them"
            self._unsent.clear()
            self._closing = True
            self._refuse(text)
            self._listener.gone(self)

    def close(self) -> None:
        """End the stream once everything is sent."""
        self._closing = True
        self._wake()

    def _next(self) -> bytes | None:
        """Take the next message to send, if there is one."""
        if not self._unsent:
            return None
        message = self._unsent.popleft()
        self._unsent_bytes -= len(message)
        return message

    @abstractmethod
    def _wake(self) -> None:
        """Send the next message if none is under way; end the stream if it is closing."""

    @abstractmethod
    def _refuse(self, text: str) -> None:
        """End the stream as one whose client does not read."""


def no_method(name: str) -> str:
    """For whoever calls a method that a gateway does not have."""
    return f"no method {name}: this is a gateway for simulators, {SERVICE}"
