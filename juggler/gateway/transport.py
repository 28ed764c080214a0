"""The gateway's streams: bytes in, bytes out, in one thread for all of them.

It stands on gRPC's core, as the servers of grpcio do, and takes their place: `grpc.server` has a
thread for each stream, and `grpc.aio` passes every message through several wake-ups of an event
loop, which cost more than all that a gateway does with it. The core's names are not public; those
used here have been the same from grpcio 1.66 to 1.85, and this file and `core_streams` alone know
them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from grpc._cython import cygrpc  # type: ignore[attr-defined]

from juggler.runtime.actors.credentials import why_not_admitted
from juggler.runtime.actors.endpoints import SERVER_OPTIONS, bind
from juggler.runtime.actors.tls import Tls

SERVICE = "juggler.simulator.v1.Simulator"

#: The most that one message may take.
MESSAGE_BYTES = 64 << 20
#: Bytes of answers that a simulator does not read, which end its stream; a policy has to fit.
MOST_UNREAD = 4 * MESSAGE_BYTES
#: Events that come before what they bring about.
_MOST_AT_ONCE = 4096
#: Between a goodbye and the end of the server.
_GRACE_SECONDS = 0.5

_REPLACED = {
    # Simulators of one process may share a connection.
    "grpc.max_concurrent_streams": 1024,
    "grpc.max_receive_message_length": MESSAGE_BYTES,
    "grpc.max_send_message_length": MESSAGE_BYTES,
}
OPTIONS = [(k, v) for k, v in SERVER_OPTIONS if k not in _REPLACED] + list(_REPLACED.items())

_PLAIN = 0  # flags of an operation
_Status = cygrpc.StatusCode
_NOTHING_CAME = cygrpc.CompletionType.queue_timeout


class Listener(Protocol):
    """Acts on what streams say. Nothing is called but within `at_work`."""

    def at_work(self) -> AbstractContextManager[None]:
        """Others have to wait meanwhile."""

    def said(self, stream: GatewayStream, message: bytes) -> None:
        """A message came."""

    def gone(self, stream: GatewayStream) -> None:
        """Nothing more comes, nor goes. May be called twice."""

    def info(self) -> bytes:
        """What there is, for somebody who asks: an `Info` of simulator.proto."""

    def turn(self) -> None:
        """Whatever has come by now was told."""


class GatewayStream:
    """One stream of a simulator, to be used within `Listener.at_work`.

    Attributes:
        session: whoever uses it may keep here whose it is.
    """

    def __init__(self, call: Any, transport: Transport) -> None:
        self.session: Any = None
        self._call, self._transport = call, transport
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._sending = False
        self._closing = False  # when all is sent
        self._over = False

    def begin(self) -> None:
        self._start(self._ended, cygrpc.ReceiveCloseOnServerOperation(_PLAIN))
        self._start(_nothing, cygrpc.SendInitialMetadataOperation(None, _PLAIN))
        self._receive()

    def send(self, message: bytes) -> None:
        """Never waits."""
        if self._closing:
            return
        if self._sending:
            self._unsent.append(message)
            self._unsent_bytes += len(message)
            if self._unsent_bytes > MOST_UNREAD:
                text = f"{len(self._unsent)} answers were not read: read them"
                self._unsent.clear()
                self._end(_Status.resource_exhausted, text)
                self._transport.listener.gone(self)
            return
        self._sending = True
        self._start(self._sent, cygrpc.SendMessageOperation(message, _PLAIN))

    def close(self) -> None:
        """After what was sent."""
        self._closing = True
        if not self._sending:
            self._end(_Status.ok, "")

    def _receive(self) -> None:
        self._start(self._received, cygrpc.ReceiveMessageOperation(_PLAIN))

    def _received(self, event: Any) -> None:
        message = event.batch_operations[0].message()
        if message is None:  # the simulator says nothing more, or has vanished
            self._transport.listener.gone(self)
            self.close()
        elif not self._closing:
            self._transport.listener.said(self, message)
            self._receive()

    def _sent(self, _: Any) -> None:
        self._sending = False
        if self._over:
            return
        if self._unsent:
            self._sending = True
            message = self._unsent.popleft()
            self._unsent_bytes -= len(message)
            self._start(self._sent, cygrpc.SendMessageOperation(message, _PLAIN))
        elif self._closing:
            self._end(_Status.ok, "")

    def _end(self, code: Any, text: str) -> None:
        if not self._over:
            self._over = self._closing = True
            self._start(_nothing, _status(code, text))

    def _ended(self, _: Any) -> None:
        self._closing = self._over = True
        self._transport.listener.gone(self)

    def _start(self, then: Callable[[Any], None], operation: Any) -> None:
        self._transport.start_batch(self._call, then, operation)


class Transport:
    """A gRPC server, and the thread that it has.

    Args:
        token: that calls must show; "": none.

    Attributes:
        listener: of its streams.
    """

    def __init__(self, token: str) -> None:
        self.listener: Listener
        self._token = token
        self._queue: Any = None
        self._server: Any = None
        self._due = 0  # events
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    def start(self, listener: Listener, address: str, tls: Tls | None, insecure: bool) -> str:
        """Listen -> the address that was bound.

        Args:
            listener: gets what streams say, in the transport's thread.
            address: "host:port".
            tls: of this host; None: connections are plain.
            insecure: listen beyond loopback all the same.

        Raises:
            EndpointError: it cannot listen there.
        """
        self.listener = listener
        self._queue = cygrpc.CompletionQueue()
        server = cygrpc.Server(OPTIONS, False)
        server.register_completion_queue(self._queue)
        bound = bind(_Ports(server), address, token=self._token, tls=tls, insecure=insecure)
        server.start()
        self._server = server
        self._expect()
        self._thread.start()
        return bound

    def close(self) -> None:
        """Let what was sent arrive, for a moment, and end."""
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
        """Have the core do something -> its event is given to `then`.

        Raises:
            RuntimeError: it was not the time for that.
        """
        error = call.start_server_batch(operations, then)
        if error:
            raise RuntimeError(f"gRPC does not take {operations}: error {error}")
        self._due += 1

    def _run(self) -> None:
        while self._due:
            event = self._queue.poll()
            with self.listener.at_work():
                for _ in range(_MOST_AT_ONCE):
                    self._happens(event)
                    event = self._queue.poll(0)
                    if event.completion_type == _NOTHING_CAME:
                        break
                else:
                    self._happens(event)
                self.listener.turn()
            del event  # it holds on to its call

    def _happens(self, event: Any) -> None:
        self._due -= 1
        event.tag(event)

    def _expect(self) -> None:
        """The next call."""
        self._due += 1
        self._server.request_call(self._queue, self._queue, self._begins)

    def _begins(self, event: Any) -> None:
        if self._leaving or not event.success:
            return
        self._expect()
        method = event.call_details.method.decode("utf-8", "replace")
        if (refusal := why_not_admitted(event.invocation_metadata, self._token)) is not None:
            self._finish(event.call, _status(_Status.unauthenticated, refusal))
        elif method == f"/{SERVICE}/Session":
            GatewayStream(event.call, self).begin()
        elif method == f"/{SERVICE}/GetInfo":
            message = cygrpc.SendMessageOperation(self.listener.info(), _PLAIN)
            self._finish(event.call, message, _status(_Status.ok, ""))
        else:
            text = f"no method {method}: this is a gateway for simulators, {SERVICE}"
            self._finish(event.call, _status(_Status.unimplemented, text))

    def _finish(self, call: Any, *operations: Any) -> None:
        self.start_batch(call, _nothing, cygrpc.ReceiveCloseOnServerOperation(_PLAIN))
        metadata = cygrpc.SendInitialMetadataOperation(None, _PLAIN)
        self.start_batch(call, _nothing, metadata, *operations)


class _Ports:
    """The core's server, as `bind` knows servers."""

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


def _nothing(_: Any) -> None:
    """What comes of an operation that nothing follows."""
