"""Reports by grpc.health.v1 whether a process is alive and ready.

The service "" is the process itself: it serves as long as the process runs, regardless of other
processes. "readiness", and each of the process's services by name, serve while it can do its work.

Calls show no token. All methods are served as streams, because for others gRPC waits for the
request before this module can limit the number of waiting calls.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from juggler.runtime.actors.credentials import Strangers
from juggler.runtime.actors.endpoints import (
    SERVER_OPTIONS,
    EndpointError,
    bind,
    dial,
    why_not_secure,
)
from juggler.runtime.actors.tls import Tls
from juggler.runtime.install_commands import installing

_MOST_ASKING = 16  # calls at once, without a token


def add_reflection(server: Any, services: Sequence[str]) -> None:
    """Add reflection to a server.

    Args:
        server: a server that has not started yet.
        services: their full names.

    Raises:
        EndpointError: the library is not installed.
    """
    try:
        from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
    except ImportError:
        raise EndpointError(
            f"--reflection needs a library that is not installed: {installing('reflection')}"
        ) from None
    # A driver's server is on asyncio, a learner's has threads.
    names = [*services, reflection.SERVICE_NAME]
    of_asyncio = isinstance(server, grpc.aio.Server)
    servicer: Any = (reflection.aio if of_asyncio else reflection).ReflectionServicer(names)
    answers, strangers = servicer.ServerReflectionInfo, Strangers(_MOST_ASKING)

    # Calls show no token, so only a few may be open at once.
    def bounded(requests: Any, context: Any) -> Any:
        with strangers.visit(context.cancel):
            yield from answers(requests, context)

    async def bounded_of_asyncio(requests: Any, context: Any) -> Any:
        call: Any = asyncio.current_task()
        try:
            with strangers.visit(call.cancel):
                async for answer in answers(requests, context):
                    yield answer
        except asyncio.CancelledError:  # gRPC would report it in vain
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)

    servicer.ServerReflectionInfo = bounded_of_asyncio if of_asyncio else bounded
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)


READINESS = "readiness"
#: Maximum number of calls at the same time.
MOST_ASKING = 64

_MOST_BYTES = 4096  # of a request, which is a name
#: Codes with which `Strangers` ends a call.
_CROWDED = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED
_PAUSE_SECONDS = 0.05  # before asking again

_Status = health_pb2.HealthCheckResponse
_CROWDED_OUT = f"over {MOST_ASKING} other calls ask for health"


class _Statuses:
    """The status of each service."""

    def __init__(self, services: tuple[str, ...] = ()) -> None:
        self._services = {"", READINESS, *services}
        self._ready = False

    def _status(self, request: bytes) -> Any:
        """Return the status for a request."""
        try:
            service = health_pb2.HealthCheckRequest.FromString(request).service
        except DecodeError:
            return _Status.SERVICE_UNKNOWN
        if service not in self._services:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._ready or not service else _Status.NOT_SERVING


class Health(_Statuses):
    """Health for servers with threads. It is not ready until `ready(True)`."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._strangers = Strangers(MOST_ASKING)
        self._server: grpc.Server | None = None

    def add_to(self, server: grpc.Server, *services: str) -> None:
        """Add the service to a server before the server starts.

        The server needs threads for `MOST_ASKING` calls, and some more.

        Args:
            server: of this process.
            services: their full names; all are ready at the same time.
        """
        self._services.update(services)
        check, watch = (partial(self._answer, watches=each) for each in (False, True))
        server.add_generic_rpc_handlers((_handlers(check, watch),))

    def serve(self, address: str) -> None:
        """Serve on a separate server, for probes without TLS.

        It only reports whether a process is alive and ready, and accepts nothing else, so it may
        listen anywhere.

        Raises:
            EndpointError: the address cannot be listened on.
        """
        options = {**dict(SERVER_OPTIONS), "grpc.max_receive_message_length": _MOST_BYTES}
        pool = futures.ThreadPoolExecutor(2 * MOST_ASKING, thread_name_prefix="health")
        self._server = grpc.server(pool, options=[*options.items()])
        bind(self._server, address, insecure=True)
        self.add_to(self._server)
        self._server.start()

    def ready(self, is_ready: bool) -> None:
        with self._changed:
            self._ready = is_ready
            self._changed.notify_all()

    def close(self) -> None:
        """End the separate server."""
        if self._server is not None:
            self._server.stop(grace=0)

    def _answer(
        self, requests: Iterator[bytes], context: grpc.ServicerContext, watches: bool
    ) -> Iterator[bytes]:
        """Answer with the status; to a watcher also with each change."""
        with self._strangers.visit(context.cancel):
            for request in requests:
                context.add_callback(self._wake)
                sent = None
                while context.is_active():
                    with self._changed:
                        while (status := self._status(request)) == sent and context.is_active():
                            self._changed.wait()
                    if not watches and status == _Status.SERVICE_UNKNOWN:
                        context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
                    sent = status
                    yield _response(status)
                    if not watches:
                        return
                return

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class AsyncHealth(_Statuses):
    """Health for an asyncio server.

    `ready` may be called in any thread.
    """

    def __init__(self, *services: str) -> None:
        super().__init__(services)
        self._strangers = Strangers(MOST_ASKING)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def add_to(self, server: Any) -> None:
        """Add the service; called before the server starts, in its loop."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # replaced after each change
        server.add_generic_rpc_handlers((_handlers(self._check, self._watch),))

    def ready(self, is_ready: bool) -> None:
        """Set whether the services are ready, after `add_to`."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._turn, is_ready)

    def _turn(self, is_ready: bool) -> None:
        self._ready = is_ready
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, _: Any, context: Any) -> None:
        await self._answer(context, watches=False)

    async def _watch(self, _: Any, context: Any) -> None:
        await self._answer(context, watches=True)

    async def _answer(self, context: Any, watches: bool) -> None:
        call: Any = asyncio.current_task()
        try:
            with self._strangers.visit(call.cancel):
                request, sent = await context.read(), None
                while request is not grpc.aio.EOF:
                    # Taken first, so that a change during the write is not missed.
                    changed, status = self._changed, self._status(request)
                    if not watches and status == _Status.SERVICE_UNKNOWN:
                        context.set_code(grpc.StatusCode.NOT_FOUND)
                        return
                    if status != sent:
                        await context.write(_response(status))
                    if not watches:
                        return
                    sent = status
                    await changed.wait()
        except asyncio.CancelledError:  # gRPC would report it in vain
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            context.set_details(_CROWDED_OUT)


def _handlers(check: Any, watch: Any) -> grpc.GenericRpcHandler:
    handlers: dict[str, Any] = {
        "Check": grpc.stream_stream_rpc_method_handler(check),
        "Watch": grpc.stream_stream_rpc_method_handler(watch),
    }
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)


def _response(status: Any) -> bytes:
    message: bytes = _Status(status=status).SerializeToString()
    return message


def check_health(address: str, service: str, tls: Tls | None, timeout: float) -> str:
    """Ask for the health of one service of a process.

    A call that other calls crowd out is repeated.

    Args:
        address: "host:port" or "unix:path".
        service: its name; "" for the process.
        tls: of this host; None: no TLS.
        timeout: seconds.

    Returns:
        "" if it serves, otherwise the reason, for people.
    """
    deadline = time.monotonic() + timeout
    with dial(address, tls) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        ask = health_pb2_grpc.HealthStub(channel).Check
        while True:
            # Other calls without a token may have crowded out the last one.
            left = max(deadline - time.monotonic(), 0.0)
            try:
                answer = ask(request, timeout=left)
            except grpc.RpcError as error:
                gone = error.code() is grpc.StatusCode.UNAVAILABLE
                if gone and (why := why_not_secure(address, "process", tls)):
                    return f"no answer: {why}"
                if error.code() not in _CROWDED or left <= _PAUSE_SECONDS:
                    return _why_no_answer(error, service, timeout)
            else:
                return "" if answer.status == _Status.SERVING else "it is not ready"
            time.sleep(_PAUSE_SECONDS)


def _why_no_answer(error: Any, service: str, timeout: float) -> str:
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return f"it has no service {service!r}"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer within {timeout:g} s"
        case _:
            return f"no answer: {error.details()}"
