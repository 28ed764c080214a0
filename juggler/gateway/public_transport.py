"""The gateway's server on grpcio's public API: two threads for each stream.

The thread that reads a stream acts on its messages, one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc

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
from juggler.runtime.actors.public_calls import ServerStream
from juggler.runtime.actors.tls import Tls

#: Streams and other calls at the same time; each holds a thread.
_MOST_CALLS = 4352
#: Messages that are taken before the listener has its turn.
_MOST_AT_ONCE = 64
#: How long a client that is told to read has for it.
_TOLD_SECONDS = 10.0


class PublicTransport:
    """A gRPC server, as `transport.Transport`.

    Args:
        token: that calls must show; "": none.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._listener: Listener
        self._server: grpc.Server | None = None
        self._waiting = self._taken = 0  # messages: that wait to be told, and told since a turn
        self._lock = threading.Lock()  # for the former

    def start(self, listener: Listener, address: str, tls: Tls | None, insecure: bool) -> str:
        """As `transport.Transport`."""
        self._listener = listener
        self._threads = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="gateway")
        server = grpc.server(
            self._threads,
            options=gateway_stream.OPTIONS,
            maximum_concurrent_rpcs=_MOST_CALLS,
        )
        server.add_generic_rpc_handlers((_Handlers(self._serve),))
        bound = bind(server, address, token=self._token, tls=tls, insecure=insecure)
        server.start()
        self._server = server
        return bound

    def close(self) -> None:
        """As `transport.Transport`."""
        if self._server is not None:
            self._server.stop(GRACE_SECONDS).wait()
            self._threads.shutdown(wait=False)

    def tell(self, stream: _Stream, message: bytes) -> None:
        """Act on a message, and on all that came meanwhile with the last of them."""
        with self._lock:
            self._waiting += 1
        with self._listener.at_work():
            with self._lock:
                self._waiting -= 1
                last = not self._waiting
            self._taken += 1
            stream.hear(message)
            if last or self._taken >= _MOST_AT_ONCE:
                self._taken = 0
                self._listener.turn()

    def _serve(
        self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        refusal = why_not_admitted(context.invocation_metadata(), self._token)
        if refusal is not None:
            with self._listener.at_work():
                self._listener.refused(context.peer(), refusal)
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        if method == f"/{SERVICE}/Session":
            yield from _Stream(self, self._listener, requests, context).messages()
        elif method == f"/{SERVICE}/GetInfo":
            info = b""
            with self._listener.at_work():
                info = self._listener.info()
            yield info
        else:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, no_method(method))


class _Stream(GatewayStream):
    def __init__(
        self,
        transport: PublicTransport,
        listener: Listener,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> None:
        super().__init__(listener, context.peer())
        self._transport, self._context = transport, context
        self._lock = threading.RLock()  # for what is unsent, which threads of grpcio take
        self._call = ServerStream(requests, context, self._take)
        self._refusal = ""

    def messages(self) -> Iterator[bytes]:
        """For the handler to yield."""
        with self._listener.at_work():
            self._listener.came(self)
        yield from self._call.listen(partial(self._transport.tell, self), self._gone)
        if self._refusal:
            self._context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self._refusal)

    def hear(self, message: bytes) -> None:
        """Tell the listener a message, unless the stream is to end."""
        if not self._closing:
            self._listener.said(self, message)

    def send(self, message: bytes) -> None:
        with self._lock:
            super().send(message)

    def _take(self) -> bytes | None:
        with self._lock:
            message = self._next()
            if message is None and self._closing:
                self._call.close()
            return message

    def _wake(self) -> None:
        self._call.wake()

    def _refuse(self, text: str) -> None:
        self._refusal = text
        self._call.close()
        # Its thread hears of that once the client has read the message under way.
        cut_off = threading.Timer(_TOLD_SECONDS, self._context.cancel)
        cut_off.daemon = True
        cut_off.start()

    def _gone(self) -> None:
        with self._listener.at_work():
            self._listener.gone(self)


class _Handlers(grpc.GenericRpcHandler):
    """Takes calls of every method as streams: the token is looked at before a message is read."""

    def __init__(
        self, serve: Callable[[str, Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]
    ) -> None:
        self._serve = serve

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        handler: grpc.RpcMethodHandler[bytes, bytes]
        handler = grpc.stream_stream_rpc_method_handler(
            partial(self._serve, handler_call_details.method)
        )
        return handler
