"""The gateway's server on gRPC's core: one thread for all streams.

`grpc.server` has a thread for each stream, and `grpc.aio` passes every message through several
wake-ups of an event loop, which cost more than everything else that a gateway does with it. The
core's names are not public; those used here have been the same from grpcio 1.66 to 1.85.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from grpc._cython import cygrpc  # type: ignore[attr-defined]

from juggler.gateway import gateway_stream
from juggler.gateway.gateway_stream import (
    GRACE_SECONDS,
    SERVICE,
    GatewayStream,
    Listener,
    no_method,
)
from juggler.runtime.actors.credentials import why_not_admitted
from juggler.runtime.actors.endpoints import bind
from juggler.runtime.actors.tls import Tls

#: Events that are taken before the listener has its turn.
_MOST_AT_ONCE = 4096

_PLAIN = 0  # flags of an operation
_Status = cygrpc.StatusCode
_NOTHING_CAME = cygrpc.CompletionType.queue_timeout


class _Stream(GatewayStream):
    def __init__(self, call: Any, transport: CoreTransport) -> None:
        super().__init__(transport.listener, _peer(call))
        self._call, self._transport = call, transport
        self._sending = False
        self._over = False

    def begin(self) -> None:
        self._start(self._ended, cygrpc.ReceiveCloseOnServerOperation(_PLAIN))
        self._start(_nothing, cygrpc.SendInitialMetadataOperation(None, _PLAIN))
        self._receive()

    def _receive(self) -> None:
        self._start(self._received, cygrpc.ReceiveMessageOperation(_PLAIN))

    def _received(self, event: Any) -> None:
        message = event.batch_operations[0].message()
        if message is None:  # the simulator says nothing more, or has vanished
            self._listener.gone(self)
            self.close()
        elif not self._closing:
            self._listener.said(self, message)
            self._receive()

    def _wake(self) -> None:
        if self._sending or self._over:
            return
        message = self._next()
        if message is not None:
            self._sending = True
            self._start(self._sent, cygrpc.SendMessageOperation(message, _PLAIN))
        elif self._closing:
            self._end(_Status.ok, "")

    def _sent(self, _: Any) -> None:
        self._sending = False
        self._wake()

    def _refuse(self, text: str) -> None:
        if not self._over:
            self._end(_Status.resource_exhausted, text)

    def _end(self, code: Any, text: str) -> None:
        self._over = True
        self._start(_nothing, _status(code, text))

    def _ended(self, _: Any) -> None:
        self._closing = self._over = True
        self._listener.gone(self)

    def _start(self, then: Callable[[Any], None], operation: Any) -> None:
        self._transport.start_batch(self._call, then, operation)


class CoreTransport:
    """A gRPC server and its thread, as `transport.Transport`.

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
        """As `transport.Transport`."""
        self.listener = listener
        self._queue = cygrpc.CompletionQueue()
        server = cygrpc.Server(gateway_stream.OPTIONS, False)
        server.register_completion_queue(self._queue)
        bound = bind(_Ports(server), address, token=self._token, tls=tls, insecure=insecure)
        server.start()
        self._server = server
        self._expect()
        self._thread.start()
        return bound

    def close(self) -> None:
        """As `transport.Transport`."""
        if self._server is None:
            return
        with self.listener.at_work():
            self._leaving = True
            self._due += 1
            self._server.shutdown(self._queue, _nothing)
        self._thread.join(GRACE_SECONDS)
        if self._thread.is_alive():
            self._server.cancel_all_calls()
            self._thread.join()
        self._server.destroy()

    def start_batch(self, call: Any, then: Callable[[Any], None], *operations: Any) -> None:
        """Start operations, whose event is given to `then`.

        Raises:
            RuntimeError: the core does not take them now.
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
        """Ask for the next call."""
        self._due += 1
        self._server.request_call(self._queue, self._queue, self._begins)

    def _begins(self, event: Any) -> None:
        if self._leaving or not event.success:
            return
        self._expect()
        method = event.call_details.method.decode("utf-8", "replace")
        if (refusal := why_not_admitted(event.invocation_metadata, self._token)) is not None:
            self.listener.refused(_peer(event.call), refusal)
            self._finish(event.call, _status(_Status.unauthenticated, refusal))
        elif method == f"/{SERVICE}/Session":
            stream = _Stream(event.call, self)
            stream.begin()
            self.listener.came(stream)
        elif method == f"/{SERVICE}/GetInfo":
            message = cygrpc.SendMessageOperation(self.listener.info(), _PLAIN)
            self._finish(event.call, message, _status(_Status.ok, ""))
        else:
            self._finish(event.call, _status(_Status.unimplemented, no_method(method)))

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
