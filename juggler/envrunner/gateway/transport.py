"""The gateway's streams: bytes in, bytes out, one task for each direction of each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from juggler.runtime.actors.credentials import why_not_admitted
from juggler.runtime.actors.endpoints import SERVER_OPTIONS, bind
from juggler.runtime.actors.tls import Tls
from juggler.runtime.wire.v1 import simulator_pb2 as pb

SERVICE = "juggler.simulator.v1.Simulator"

#: The most that one message may take.
MESSAGE_BYTES = 64 << 20
#: Of answers that a simulator does not read, which end its stream, or of its own messages, which
#: have to wait then.
_MOST_UNREAD = 64
_LOOK_SECONDS = 0.01
#: Between a goodbye and the end of the server.
_GRACE_SECONDS = 0.5

_REPLACED = {
    # Simulators of one process may share a connection.
    "grpc.max_concurrent_streams": 1024,
    "grpc.max_receive_message_length": MESSAGE_BYTES,
    "grpc.max_send_message_length": MESSAGE_BYTES,
}
_OPTIONS = [(k, v) for k, v in SERVER_OPTIONS if k not in _REPLACED] + list(_REPLACED.items())


@dataclass(slots=True, eq=False)
class Closed:
    """A stream is gone."""

    stream: GatewayStream


@dataclass(slots=True, eq=False)
class Asked:
    """Somebody wants to know what there is."""

    answer: asyncio.Future[pb.Info]


#: What a stream says: an event, or a message and whose it is.
Event = Closed | Asked | tuple["GatewayStream", bytes]


class GatewayStream:
    """One stream of a simulator, for who acts in the transport's loop.

    Attributes:
        session: whoever uses it may keep here whose it is.
        unread: messages that it has brought and nobody has looked at.
    """

    def __init__(self) -> None:
        self.session: Any = None
        self.unread = 0
        self.outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, message: bytes) -> None:
        self.outgoing.put_nowait(message)

    def close(self) -> None:
        self.outgoing.put_nowait(None)


class Transport:
    """A gRPC server, and the thread that its loop has.

    Args:
        token: that calls must show; "": none.

    Attributes:
        loop: of asyncio.
    """

    def __init__(self, token: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._token = token
        self._events: Callable[[Event], None]
        self._server: Any = None
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    def start(
        self, events: Callable[[Event], None], address: str, tls: Tls | None, insecure: bool
    ) -> str:
        """Listen -> the address that was bound.

        Args:
            events: gets what streams say, in the loop.
            address: "host:port".
            tls: of this host; None: connections are plain.
            insecure: listen beyond loopback all the same.

        Raises:
            EndpointError: it cannot listen there.
        """
        self._events = events
        self._thread.start()
        bound: str = self._call(self._serve(address, tls, insecure))
        return bound

    def call(self, what: Callable[[], None]) -> None:
        """Have it done in the loop, and wait for that."""

        async def done() -> None:
            what()

        self._call(done())

    def close(self) -> None:
        if self._server is not None:
            self._call(self._stop())
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def _call(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result()

    async def _stop(self) -> None:
        await self._server.stop(_GRACE_SECONDS)

    async def _serve(self, address: str, tls: Tls | None, insecure: bool) -> str:
        server = grpc.aio.server(options=_OPTIONS)
        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "GetInfo": grpc.unary_unary_rpc_method_handler(
                self._info,
                request_deserializer=pb.InfoRequest.FromString,
                response_serializer=pb.Info.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        bound = bind(server, address, token=self._token, tls=tls, insecure=insecure)
        await server.start()
        self._server = server
        return bound

    async def _admit(self, context: Any) -> None:
        metadata = context.invocation_metadata() or ()
        if (refusal := why_not_admitted(metadata, self._token)) is not None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

    async def _info(self, _: pb.InfoRequest, context: Any) -> pb.Info:
        await self._admit(context)
        asked = Asked(self.loop.create_future())
        self._events(asked)
        return await asked.answer

    async def _session(self, _: Any, context: Any) -> None:
        await self._admit(context)
        stream = GatewayStream()
        reader = asyncio.create_task(self._read(stream, context))
        try:
            while (message := await stream.outgoing.get()) is not None:
                if stream.outgoing.qsize() > _MOST_UNREAD:
                    await context.abort(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"{stream.outgoing.qsize()} answers were not read: read them",
                    )
                await context.write(message)
        finally:
            reader.cancel()
            self._events(Closed(stream))

    async def _read(self, stream: GatewayStream, context: Any) -> None:
        put = self._events
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                stream.unread += 1
                put((stream, message))
                while stream.unread > _MOST_UNREAD:  # as far as the network's own limits go then
                    await asyncio.sleep(_LOOK_SECONDS)
        finally:
            stream.outgoing.put_nowait(None)
