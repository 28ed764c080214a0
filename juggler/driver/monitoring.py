"""Serves a driver's status, metrics, health and reflection."""

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
SCALE_METHOD = "/juggler.v1.Run/Scale"
#: Workers of a role that can be asked for.
MOST_WORKERS = 4096

#: Time limit for the driver's loop to answer.
ANSWER_SECONDS = 5.0

_ATTACH_SERVICE = ATTACH_METHOD.split("/")[1]
_STATUS_SERVICE = STATUS_METHOD.split("/")[1]


@dataclass(frozen=True, slots=True)
class MonitoringOptions:
    """Which services a driver offers, besides its status, so that it can be monitored.

    Attributes:
        metrics_bind: "host:port" of /metrics; "": not served.
        health_bind: "host:port" of health for probes without TLS; "": not served.
        reflection: whether tools may list the services of the driver's server.
        insecure: whether other machines may read /metrics without TLS and a token.
        token: the token that /metrics requires; "": none.
        tls: the driver's TLS files, which /metrics uses; None: plain HTTP.
    """

    metrics_bind: str = ""
    health_bind: str = ""
    reflection: bool = False
    insecure: bool = False
    token: str = field(default="", repr=False)
    tls: Tls | None = None


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """A request for the run's status, which the driver's loop answers."""

    answer: Future[status_pb2.RunStatus]


@dataclass(frozen=True, slots=True)
class ScaleAsked:
    """A request for another number of workers on this host; 0: as many as there are. The driver's
    loop answers with the numbers so far of those that were asked for, EnvRunners and learners, or
    with a ValueError where it cannot have so many."""

    env_runners: int
    learners: int
    answer: Future[tuple[int, int]]


class MonitoringServices:
    """Serves a run's status, and what the options list. The driver's loop answers requests.

    Attributes:
        services: services for the driver's hub.
    """

    def __init__(
        self,
        options: MonitoringOptions,
        token: str,
        ask: Callable[[StatusAsked | ScaleAsked], None],
    ) -> None:
        self._options = options
        self._ask = ask
        self._health, self._health_beside = AsyncHealth(_ATTACH_SERVICE, _STATUS_SERVICE), Health()
        self._open = ExitStack()
        reflection = (_Reflection(),) if options.reflection else ()
        status = _RunService(self.question, self._scale, token)
        self.services: tuple[Service, ...] = (self._health, status, *reflection)

    def question(self) -> Future[status_pb2.RunStatus]:
        asked = StatusAsked(Future())
        self._ask(asked)
        return asked.answer

    def _scale(self, env_runners: int, learners: int) -> Future[tuple[int, int]]:
        asked = ScaleAsked(env_runners, learners, Future())
        self._ask(asked)
        return asked.answer

    def start(self) -> None:
        """Bind the addresses of metrics and health checks.

        Raises:
            EndpointError: one of the addresses cannot be bound.
        """
        with ExitStack() as opened:
            if self._options.metrics_bind:
                # Imported here because it imports prometheus_client.
                from juggler.driver.record.prometheus import serve_metrics

                close = serve_metrics(
                    self._options.metrics_bind,
                    lambda: self.question().result(ANSWER_SECONDS),
                    token=self._options.token,
                    tls=self._options.tls,
                    insecure=self._options.insecure,
                )
                opened.callback(close)
            if self._options.health_bind:
                self._health_beside.serve(self._options.health_bind)
                opened.callback(self._health_beside.close)
            self._open = opened.pop_all()

    def ready(self, is_ready: bool) -> None:
        """Tell health probes whether the driver takes workers."""
        self._health.ready(is_ready)
        self._health_beside.ready(is_ready)

    def close(self) -> None:
        self._open.close()


class _RunService:
    """`juggler.v1.Run` on the hub's server."""

    def __init__(
        self,
        question: Callable[[], Future[status_pb2.RunStatus]],
        scale: Callable[[int, int], Future[tuple[int, int]]],
        token: str,
    ) -> None:
        self._question, self._ask_for = question, scale
        self._token = token

    async def add_to(self, server: Any) -> None:
        # A stream, because gRPC would read a unary request before the token is checked.
        status: Any = grpc.stream_stream_rpc_method_handler(
            self._status, response_serializer=status_pb2.RunStatus.SerializeToString
        )
        scale: Any = grpc.stream_stream_rpc_method_handler(
            self._scale, response_serializer=status_pb2.ScaleReply.SerializeToString
        )
        service, status_name = STATUS_METHOD.strip("/").split("/")
        methods = {status_name: status, SCALE_METHOD.rpartition("/")[2]: scale}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))

    async def _status(self, _: Any, context: Any) -> None:
        # Only the driver's own user can open its Unix socket.
        if not context.peer().startswith("unix:"):
            metadata = context.invocation_metadata() or ()
            if (refusal := why_not_admitted(metadata, self._token)) is not None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        await context.write(await _answered(self._question(), context))

    async def _scale(self, requests: Any, context: Any) -> None:
        if not context.peer().startswith("unix:"):
            reason = "a run is scaled from the driver's own host"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        wanted = status_pb2.ScaleRequest()
        async for content in requests:
            wanted.MergeFromString(content)
            break
        if not 1 <= max(wanted.env_runners, wanted.learners) <= MOST_WORKERS:
            numbers = f"{wanted.env_runners} EnvRunners and {wanted.learners} learners"
            reason = f"{numbers}: must be from 1 to {MOST_WORKERS}, or 0 for one of them"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        try:
            asked = self._ask_for(wanted.env_runners, wanted.learners)
            env_runners, learners = await _answered(asked, context)
        except ValueError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        else:
            reply = status_pb2.ScaleReply(before=env_runners, learners_before=learners)
            await context.write(reply)


async def _answered(future: Future[Any], context: Any) -> Any:
    """What the driver's loop answers; a loop that hangs ends the call."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_SECONDS)
    except TimeoutError:
        reason = f"the driver's loop has not answered for {ANSWER_SECONDS:.0f} s"
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, reason)


class _Reflection:
    async def add_to(self, server: Any) -> None:
        add_reflection(server, (_ATTACH_SERVICE, _STATUS_SERVICE, health.SERVICE_NAME))
