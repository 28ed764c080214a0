"""Reports by grpc.health.v1 whether a process is alive and ready.

The service "" is the process itself: it serves as long as the process runs, regardless of other
processes. "readiness", and each of the process's services by name, serve while it can do its work.

Calls show no token. All methods are served as streams, because for others gRPC waits for the
request before this module can limit the number of waiting calls.
"""

from __future__ import annotations

import asyncio
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

_MOST_REFLECTING = 16  # calls at once, without a token


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
    kind: Any = reflection.aio if _is_of_asyncio(server) else reflection
    servicer = kind.ReflectionServicer(names)
    answers, strangers = servicer.ServerReflectionInfo, Strangers(_MOST_REFLECTING)
    servicer.ServerReflectionInfo = _limited(answers, strangers, server)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)


def _is_of_asyncio(server: Any) -> bool:
    return isinstance(server, grpc.aio.Server)


def _limited(answers: Any, strangers: Strangers, server: Any) -> Any:
    """Limit the calls of a handler, which show no token.

    Args:
        answers: the handler of a stream, for the kind of server.
        strangers: ends the oldest call if there are too many.
        server: that has the handler.
    """

    def limited(requests: Any, context: Any) -> Any:
        with strangers.visit(context.cancel):
            yield from answers(requests, context)

    async def limited_of_asyncio(requests: Any, context: Any) -> Any:
        call: Any = asyncio.current_task()
        try:
            with strangers.visit(call.cancel):
                async for answer in answers(requests, context):
                    yield answer
        except asyncio.CancelledError:  # gRPC would report it in vain
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            context.set_details("too many other calls without a token are open")

    return limited_of_asyncio if _is_of_asyncio(server) else limited


READINESS = "readiness"
#: Maximum number of calls at the same time.
MOST_ASKING = 64

_MOST_BYTES = 4096  # of a request, which is a name
#: Codes with which `Strangers` ends a call.
_CROWDED = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED
_PAUSE_SECONDS = 0.05  # before asking again
_LOOK_SECONDS = 0.2  # between two looks for a change, for a call that watches

_Status = health_pb2.HealthCheckResponse


class Health:
    """Reports whether a process is ready; it is not until `ready(True)`."""

    def __init__(self) -> None:
        self._services = {"", READINESS}
        self._ready = False
        self._strangers = Strangers(MOST_ASKING)
        self._server: grpc.Server | None = None

    def add_to(self, server: Any, *services: str) -> None:
        """Add the service to a server before the server starts.

        Args:
            server: of this process; threads or asyncio. Threads have to suffice for `MOST_ASKING`
                calls, and some more.
            services: their full names; all are ready at the same time.
        """
        self._services.update(services)
        answer = self._answer_of_asyncio if _is_of_asyncio(server) else self._answer
        handlers: dict[str, Any] = {
            name: grpc.stream_stream_rpc_method_handler(
                _limited(partial(answer, watches=name == "Watch"), self._strangers, server)
            )
            for name in ("Check", "Watch")
        }
        handler = grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)
        server.add_generic_rpc_handlers((handler,))

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
        """Set whether the process is ready; any thread may call it."""
        self._ready = is_ready

    def close(self) -> None:
        """End the separate server."""
        if self._server is not None:
            self._server.stop(grace=0)

    def _status(self, request: bytes) -> Any:
        """Return the status for a request."""
        try:
            service = health_pb2.HealthCheckRequest.FromString(request).service
        except DecodeError:
            return _Status.SERVICE_UNKNOWN
        if service not in self._services:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._ready or not service else _Status.NOT_SERVING

    def _answer(
        self, requests: Iterator[bytes], context: grpc.ServicerContext, watches: bool
    ) -> Iterator[bytes]:
        """Yield the status; to a watcher also each change."""
        request, sent = next(requests, None), None
        while request is not None and context.is_active():
            status = self._status(request)
            if not watches and status == _Status.SERVICE_UNKNOWN:
                context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
            if status != sent:
                yield _response(status)
            if not watches:
                return
            sent = status
            time.sleep(_LOOK_SECONDS)

    async def _answer_of_asyncio(self, _: Any, context: Any, watches: bool) -> Any:
        request, sent = await context.read(), None
        while request is not grpc.aio.EOF:  # until it is cancelled
            status = self._status(request)
            if not watches and status == _Status.SERVICE_UNKNOWN:
                context.set_code(grpc.StatusCode.NOT_FOUND)
                return
            if status != sent:
                yield _response(status)
            if not watches:
                return
            sent = status
            await asyncio.sleep(_LOOK_SECONDS)


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
