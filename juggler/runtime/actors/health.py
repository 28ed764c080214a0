"""grpc.health.v1: whether a process lives, and whether it is ready for work.

The service "" stands for the process: it serves as long as the process runs, whatever becomes of
others. "readiness", and each of the process's services by its name, serve while it can do its work.
"""

from __future__ import annotations

import asyncio
from concurrent import futures
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from juggler.runtime.actors.endpoints import SERVER_OPTIONS, bind, dial
from juggler.runtime.actors.tls import Tls

READINESS = "readiness"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """On servers that have threads. Not ready before somebody says so."""

    def __init__(self) -> None:
        self._services = [READINESS]
        self._servicer = health.HealthServicer()
        self._server: grpc.Server | None = None
        self.ready(False)

    def add_to(self, server: grpc.Server, *services: str) -> None:
        """Before the server starts.

        Args:
            server: of this process.
            services: their full names; all are ready at the same time.
        """
        self._services += services
        self.ready(False)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def serve(self, address: str) -> None:
        """On a server of its own, for probes that know no TLS. It says no more than whether a
        process lives and is ready, and takes nothing, so that it may listen anywhere.

        Raises:
            EndpointError: it cannot listen there.
        """
        pool = futures.ThreadPoolExecutor(4, thread_name_prefix="health")
        self._server = grpc.server(pool, options=SERVER_OPTIONS, maximum_concurrent_rpcs=64)
        bind(self._server, address, insecure=True)
        self.add_to(self._server)
        self._server.start()

    def ready(self, is_ready: bool) -> None:
        for service in self._services:
            self._servicer.set(service, _SERVING if is_ready else _NOT_SERVING)

    def close(self) -> None:
        """End its own server."""
        if self._server is not None:
            self._server.stop(grace=0)


class AsyncHealth:
    """The same on a server of asyncio; `ready` may be called in any thread."""

    def __init__(self, *services: str) -> None:
        self._services = (READINESS, *services)
        self._servicer = health.aio.HealthServicer()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def add_to(self, server: Any) -> None:
        """Before the server starts, in its loop."""
        self._loop = asyncio.get_running_loop()
        await self._set(_NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def ready(self, is_ready: bool) -> None:
        """Once it has a server."""
        assert self._loop is not None
        status = _SERVING if is_ready else _NOT_SERVING
        asyncio.run_coroutine_threadsafe(self._set(status), self._loop)

    async def _set(self, status: Any) -> None:
        for service in self._services:
            await self._servicer.set(service, status)


def check_health(address: str, service: str, tls: Tls | None, timeout: float) -> str:
    """What a process says of one of its services.

    Args:
        address: "host:port" or "unix:path".
        service: its name; "" for the process.
        tls: of this host; None: without.
        timeout: seconds.

    Returns:
        "" where it serves, else why that is not so, for people.
    """
    with dial(address, tls) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            return _why_no_answer(error, service, timeout)
    return "" if answer.status == _SERVING else "it is not ready"


def _why_no_answer(error: Any, service: str, timeout: float) -> str:
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return f"it has no service {service!r}"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer within {timeout:g} s"
        case _:
            return f"no answer: {error.details()}"
