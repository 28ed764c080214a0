"""The gateway's server on gRPC's core, with a single thread.

`grpc.server` has a thread for each stream, and `grpc.aio` passes every message through several
wake-ups of an event loop. With either one, a gateway of 64 simulators processes a quarter to
two thirds fewer steps per second. The core's names are not public, but the names used here have
been the same from grpcio 1.66 to 1.85.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from juggler.runtime.actors.credentials import why_not_admitted
from juggler.runtime.actors.endpoints import SERVER_OPTIONS, EndpointError, bind
from juggler.runtime.actors.tls import Tls

SERVICE = "juggler.simulator.v1.Simulator"

#: The size limit of one message.
MESSAGE_BYTES = 64 << 20
#: Maximum bytes of unread answers; more end the stream. A policy must fit.
MOST_UNREAD = 4 * MESSAGE_BYTES

# Between the last messages and the end of the server: a simulator on a busy machine reads late.
_GRACE_SECONDS = 3.0
_MOST_AT_ONCE = 4096  # maximum events per turn of the listener

_REPLACED = {
    # Simulators of one process may share a connection.
    "grpc.max_concurrent_streams": 1024,
    "grpc.max_receive_message_length": MESSAGE_BYTES,
    "grpc.max_send_message_length": MESSAGE_BYTES,
}
OPTIONS = [(k, v) for k, v in SERVER_OPTIONS if k not in _REPLACED] + list(_REPLACED.items())

_PLAIN = 0  # flags of an operation
_NAMES = (
    "CompletionQueue",
    "CompletionType",
    "ReceiveCloseOnServerOperation",
    "ReceiveMessageOperation",
    "SendInitialMetadataOperation",
    "SendMessageOperation",
    "SendStatusFromServerOperation",
    "Server",
    "StatusCode",
)


class Listener(Protocol):
    """Handles events of streams. All methods are called within `at_work`."""

    def at_work(self) -> AbstractContextManager[None]:
        """Return a context that only one thread enters at a time."""

    def connected(self, stream: GatewayStream) -> None:
        """Handle a new stream."""

    def received(self, stream: GatewayStream, message: bytes) -> None:
        """Handle a message."""

    def disconnected(self, stream: GatewayStream) -> None:
        """Handle the end of a stream. May be called twice."""

    def refused(self, peer: str, why: str) -> None:
        """Handle a refused call from this peer."""

    def info(self) -> bytes:
        """Return an `Info` of simulator.proto, for any caller."""

    def turn(self) -> None:
        """Process all messages received so far."""


class GatewayStream:
    """A stream of a simulator, used within `Listener.at_work`.

    Args:
        dialed: address that the other end dialed, as reported by it.

    Attributes:
        peer: address of the other end, in gRPC's format.
        session: the stream's session, set by the listener.
    """

    def __init__(self, call: Any, transport: Transport, dialed: str) -> None:
        self.peer, self.dialed = _peer(call), dialed
        self.session: Any = None
        self._call, self._transport = call, transport
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._sending = False
        self._closing = False  # once everything is sent
        self._over = False

    def send(self, message: bytes) -> None:
        """Queue a message, without waiting."""
        if self._closing:
            return
        self._unsent.append(message)
        self._unsent_bytes += len(message)
        self._wake()
        if self._unsent_bytes > MOST_UNREAD:
            text = f"{len(self._unsent)} answers were not read: read them"
            self.cut(cygrpc.StatusCode.resource_exhausted, text)
            self._transport.listener.disconnected(self)

    def cut(self, code: Any = cygrpc.StatusCode.unavailable, text: str = "cut, as a check") -> None:
        """End the stream at once, as a broken network does."""
        self._unsent.clear()
        self._closing = True
        if not self._over:
            self._end(code, text)

    def close(self) -> None:
        """End the stream once everything is sent."""
        self._closing = True
        self._wake()

    def begin(self) -> None:
        """Start to receive messages."""
        self._start(self._ended, cygrpc.ReceiveCloseOnServerOperation(_PLAIN))
        self._start(_nothing, cygrpc.SendInitialMetadataOperation(None, _PLAIN))
        self._receive()

    def _receive(self) -> None:
        self._start(self._received, cygrpc.ReceiveMessageOperation(_PLAIN))

    def _received(self, event: Any) -> None:
        message = event.batch_operations[0].message()
        if message is None:  # the simulator has finished or vanished
            self._transport.listener.disconnected(self)
            self.close()
        elif not self._closing:
            self._transport.listener.received(self, message)
            self._receive()

    def _wake(self) -> None:
        """Send the next message, or end the stream if it is closing."""
        if self._sending or self._over:
            return
        if self._unsent:
            message = self._unsent.popleft()
            self._unsent_bytes -= len(message)
            self._sending = True
            self._start(self._sent, cygrpc.SendMessageOperation(message, _PLAIN))
        elif self._closing:
            self._end(cygrpc.StatusCode.ok, "")

    def _sent(self, _: Any) -> None:
        self._sending = False
        self._wake()

    def _end(self, code: Any, text: str) -> None:
        self._over = True
        self._start(_nothing, _status(code, text))

    def _ended(self, _: Any) -> None:
        self._closing = self._over = True
        self._transport.listener.disconnected(self)

    def _start(self, then: Callable[[Any], None], operation: Any) -> None:
        self._transport.start_batch(self._call, then, operation)


class Transport:
    """A gRPC server for streams of simulators, and its thread.

    Args:
        token: token that calls must send; "": no token.
        loopbacks: number of further addresses, for processes of this host.
    """

    def __init__(self, token: str, loopbacks: int = 0) -> None:
        self.listener: Listener  # handles events of its streams
        # These addresses after the start. They have no TLS.
        self.loopbacks = ["127.0.0.1:0"] * loopbacks
        self._token = token
        self._queue: Any = None
        self._server: Any = None
        self._due = 0  # number of expected events
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    def start(self, listener: Listener, address: str, tls: Tls | None, insecure: bool) -> str:
        """Listen, and return the bound address.

        Args:
            tls: files of this host; None: connections are plain.
            insecure: listen beyond loopback even without TLS or without a token.

        Raises:
            EndpointError: the address cannot be used, or this grpcio has other names.
        """
        if missing := [name for name in _NAMES if not hasattr(cygrpc, name)]:
            raise EndpointError(
                f"gateways do not work with grpcio {grpc.__version__}, which has no "
                f"{', '.join(missing)}: install grpcio 1.85"
            )
        self.listener = listener
        self._queue = cygrpc.CompletionQueue()
        server = cygrpc.Server(OPTIONS, False)
        server.register_completion_queue(self._queue)
        ports = _Ports(server)
        bound = bind(ports, address, token=self._token, tls=tls, insecure=insecure)
        self.loopbacks = [bind(ports, each, token=self._token) for each in self.loopbacks]
        # All addresses are bound, so the first call finds everything ready.
        server.start()
        self._server = server
        self._expect()
        self._thread.start()
        return bound

    def close(self) -> None:
        """Give sent messages a moment to arrive, and stop."""
        if self._server is None:
            return
        with self.listener.at_work():
            self._leaving = True
            self._due += 1
            self._server.shutdown(self._queue, _nothing)
        self._thread.join(_GRACE_SECONDS)
        if self._thread.is_alive():
            self._server.cancel_all_calls()
            self._thread.join()
        self._server.destroy()

    def start_batch(self, call: Any, then: Callable[[Any], None], *operations: Any) -> None:
        """Start operations; their event is passed to `then`.

        Raises:
            RuntimeError: the core refuses them.
        """
        error = call.start_server_batch(operations, then)
        if error:
            raise RuntimeError(f"gRPC does not take {operations}: error {error}")
        self._due += 1

    def _run(self) -> None:
        try:
            self._take_events()
        except BaseException:
            with self.listener.at_work():  # ends the gateway with the reason
                raise

    def _take_events(self) -> None:
        nothing_came = cygrpc.CompletionType.queue_timeout
        while self._due:
            event = self._queue.poll()
            with self.listener.at_work():
                for _ in range(_MOST_AT_ONCE):
                    self._happens(event)
                    event = self._queue.poll(0)
                    if event.completion_type == nothing_came:
                        break
                else:
                    self._happens(event)
                self.listener.turn()
            del event  # releases its call

    def _happens(self, event: Any) -> None:
        self._due -= 1
        event.tag(event)

    def _expect(self) -> None:
        """Request the next call."""
        self._due += 1
        self._server.request_call(self._queue, self._queue, self._begins)

    def _begins(self, event: Any) -> None:
        if self._leaving or not event.success:
            return
        self._expect()
        method = event.call_details.method.decode("utf-8", "replace")
        # The token is checked before any message of the call is read.
        if (refusal := why_not_admitted(event.invocation_metadata, self._token)) is not None:
            self.listener.refused(_peer(event.call), refusal)
            self._finish(event.call, _status(cygrpc.StatusCode.unauthenticated, refusal))
        elif method == f"/{SERVICE}/Session":
            host = event.call_details.host.decode("utf-8", "replace")
            stream = GatewayStream(event.call, self, host)
            stream.begin()
            self.listener.connected(stream)
        elif method == f"/{SERVICE}/GetInfo":
            message = cygrpc.SendMessageOperation(self.listener.info(), _PLAIN)
            self._finish(event.call, message, _status(cygrpc.StatusCode.ok, ""))
        else:
            text = f"no method {method}: this is a gateway for simulators, {SERVICE}"
            self._finish(event.call, _status(cygrpc.StatusCode.unimplemented, text))

    def _finish(self, call: Any, *operations: Any) -> None:
        self.start_batch(call, _nothing, cygrpc.ReceiveCloseOnServerOperation(_PLAIN))
        metadata = cygrpc.SendInitialMetadataOperation(None, _PLAIN)
        self.start_batch(call, _nothing, metadata, *operations)


class _Ports:
    """The core's server, with the methods of a `grpc.Server` that `bind` calls."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_insecure_port(self, address: str) -> int:
        port: int = self._server.add_http2_port(address.encode())
        return port

    def add_secure_port(self, address: str, credentials: Any) -> int:
        port: int = self._server.add_http2_port(address.encode(), credentials._credentials)
        return port


def _status(code: Any, text: str) -> Any:
    return cygrpc.SendStatusFromServerOperation(None, code, text.encode(), _PLAIN)


def _peer(call: Any) -> str:
    peer: bytes = call.peer()
    return peer.decode("utf-8", "replace")


def _nothing(_: Any) -> None:
    """Do nothing when an operation is done."""
