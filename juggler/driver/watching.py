"""The doors through which others watch a driver: its status, metrics, health, reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health

from juggler.runtime.actors.credentials import why_not_admitted
from juggler.runtime.actors.health import AsyncHealth, Health
from juggler.runtime.actors.hub import ATTACH_METHOD
from juggler.runtime.actors.reflection import add_reflection
from juggler.runtime.actors.tls import Tls
from juggler.runtime.actors.vitals import Service
from juggler.runtime.wire.v1 import status_pb2

STATUS_METHOD = "/juggler.v1.Run/Status"

#: For the driver's loop to come round.
ANSWER_SECONDS = 5.0

_ATTACH_SERVICE = ATTACH_METHOD.split("/")[1]
_STATUS_SERVICE = STATUS_METHOD.split("/")[1]


@dataclass(frozen=True, slots=True)
class Doors:
    """Which of them are open.

    Attributes:
        metrics_bind: where /metrics is served, "host:port"; "": nowhere.
        health_bind: where health is served to probes that know no TLS, "host:port"; "": nowhere.
        reflection: tools may list what the driver's server has.
        insecure: /metrics may be read from other machines, without encryption.
        token: that /metrics wants to be shown; "": none.
        tls: that /metrics is served with; None: plain.
    """

    metrics_bind: str = ""
    health_bind: str = ""
    reflection: bool = False
    insecure: bool = False
    token: str = field(default="", repr=False)
    tls: Tls | None = None


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """Somebody wants to know how the run is doing."""

    answer: Future[status_pb2.RunStatus]


class Watching:
    """Serves what `doors` says; whatever is asked is answered by the driver's loop.

    Attributes:
        services: for the driver's hub.
    """

    def __init__(self, doors: Doors, token: str, ask: Callable[[StatusAsked], None]) -> None:
        self._doors = doors
        self._ask = ask
        self._health, self._health_beside = AsyncHealth(_ATTACH_SERVICE, _STATUS_SERVICE), Health()
        self._open = ExitStack()
        reflection = (_Reflection(),) if doors.reflection else ()
        status = _RunService(self.question, token)
        self.services: tuple[Service, ...] = (self._health, status, *reflection)

    def question(self) -> Future[status_pb2.RunStatus]:
        asked = StatusAsked(Future())
        self._ask(asked)
        return asked.answer

    def start(self) -> None:
        """
        Raises:
            EndpointError: one of the addresses cannot be bound.
        """
        with ExitStack() as opened:
            if self._doors.metrics_bind:
                # Here, for those who asked for it.
                from juggler.driver.record.prometheus import serve_metrics

                close = serve_metrics(
                    self._doors.metrics_bind,
                    lambda: self.question().result(ANSWER_SECONDS),
                    token=self._doors.token,
                    tls=self._doors.tls,
                    insecure=self._doors.insecure,
                )
                opened.callback(close)
            if self._doors.health_bind:
                self._health_beside.serve(self._doors.health_bind)
                opened.callback(self._health_beside.close)
            self._open = opened.pop_all()

    def ready(self, is_ready: bool) -> None:
        """Whether workers should come, as probes see it."""
        self._health.ready(is_ready)
        self._health_beside.ready(is_ready)

    def close(self) -> None:
        self._open.close()


class _RunService:
    """`juggler.v1.Run` on the hub's server."""

    def __init__(self, question: Callable[[], Future[status_pb2.RunStatus]], token: str) -> None:
        self._question = question
        self._token = token

    async def add_to(self, server: Any) -> None:
        # As a stream, because gRPC would wait for the request of any other before the token is
        # looked at.
        handler: Any = grpc.stream_stream_rpc_method_handler(
            self._status, response_serializer=status_pb2.RunStatus.SerializeToString
        )
        service, method = STATUS_METHOD.strip("/").split("/")
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )

    async def _status(self, _: Any, context: Any) -> None:
        # Whoever can open the Unix socket is the driver's own user.
        if not context.peer().startswith("unix:"):
            metadata = context.invocation_metadata() or ()
            if (refusal := why_not_admitted(metadata, self._token)) is not None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        try:
            # The request says nothing, so that nobody waits for it.
            status = await asyncio.wait_for(asyncio.wrap_future(self._question()), ANSWER_SECONDS)
        except TimeoutError:
            reason = f"the driver's loop has not come round for {ANSWER_SECONDS:.0f} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, reason)
        else:
            await context.write(status)


class _Reflection:
    async def add_to(self, server: Any) -> None:
        add_reflection(server, (_ATTACH_SERVICE, _STATUS_SERVICE, health.SERVICE_NAME))
