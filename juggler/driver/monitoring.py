"""Serves a driver's status, metrics, health and reflection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health

from juggler.runtime.actors.credentials import bearer, why_not_admitted
from juggler.runtime.actors.health import Health, add_reflection
from juggler.runtime.actors.hub import ATTACH_METHOD, Service
from juggler.runtime.actors.tls import Tls
from juggler.runtime.wire.v1 import status_pb2

STATUS_METHOD = "/juggler.v1.Run/Status"
SCALE_METHOD = "/juggler.v1.Run/Scale"
MOST_WORKERS = 4096  # maximum number of workers of a role that can be requested

ANSWER_SECONDS = 5.0  # time limit for the driver's loop to answer

_ATTACH_SERVICE = ATTACH_METHOD.split("/")[1]
_STATUS_SERVICE = STATUS_METHOD.split("/")[1]


@dataclass(frozen=True, slots=True)
class MonitoringOptions:
    """Services for monitoring in addition to the status."""

    metrics_bind: str = ""  # "host:port" of /metrics; "": not served
    health_bind: str = ""  # "host:port" of health for probes without TLS; "": not served
    reflection: bool = False  # whether tools may list the services of the driver's server
    insecure: bool = False  # whether other machines may read /metrics without TLS and a token
    token: str = field(default="", repr=False)  # the token that /metrics requires; "": none
    tls: Tls | None = None  # the driver's TLS files, which /metrics uses; None: plain HTTP


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """A request for the run's status, which the driver's loop answers."""

    answer: Future[status_pb2.RunStatus]


@dataclass(frozen=True, slots=True)
class ScaleAsked:
    """A request for other numbers of local workers; 0: unchanged."""

    env_runners: int
    learners: int
    answer: Future[tuple[int, int]]  # the numbers before, or a ValueError


class MonitoringServices:
    """Serves a run's status, which the driver's loop answers."""

    def __init__(
        self,
        options: MonitoringOptions,
        token: str,
        ask: Callable[[StatusAsked | ScaleAsked], None],
    ) -> None:
        self._options = options
        self._ask = ask
        self._health, self._health_beside = Health(), Health()
        self._open = ExitStack()
        self._token = token
        self.services: tuple[Service, ...] = (self,)

    def question(self) -> Future[status_pb2.RunStatus]:
        asked = StatusAsked(Future())
        self._ask(asked)
        return asked.answer

    def start(self) -> None:
        """Bind the addresses of metrics and health checks.

        Raises:
            EndpointError: one of the addresses cannot be bound.
        """
        if self._options.metrics_bind:
            # Imported here because it imports prometheus_client.
            from juggler.driver.reporting.prometheus import serve_metrics

            served = serve_metrics(
                self._options.metrics_bind,
                lambda: plain_status(self.question().result(ANSWER_SECONDS)),
                token=self._options.token,
                tls=self._options.tls,
                insecure=self._options.insecure,
            )
            self._open.enter_context(served)
        if self._options.health_bind:
            self._health_beside.serve(self._options.health_bind)
            self._open.callback(self._health_beside.close)

    def ready(self, is_ready: bool) -> None:
        """Set whether health probes report that the driver accepts workers."""
        self._health.ready(is_ready)
        self._health_beside.ready(is_ready)

    def close(self) -> None:
        self._open.close()

    def add_to(self, server: Any) -> None:
        """Add `juggler.v1.Run` and health to the hub's server."""
        self._health.add_to(server, _ATTACH_SERVICE, _STATUS_SERVICE)
        # Streams, because gRPC would read a unary request before the token is checked.
        status: Any = grpc.stream_stream_rpc_method_handler(
            self._status, response_serializer=status_pb2.RunStatus.SerializeToString
        )
        scale: Any = grpc.stream_stream_rpc_method_handler(
            self._scale, response_serializer=status_pb2.ScaleReply.SerializeToString
        )
        service, status_name = STATUS_METHOD.strip("/").split("/")
        methods = {status_name: status, SCALE_METHOD.rpartition("/")[2]: scale}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        if self._options.reflection:
            add_reflection(server, (_ATTACH_SERVICE, _STATUS_SERVICE, health.SERVICE_NAME))

    async def _status(self, _: Any, context: Any) -> None:
        # Only the driver's own user can open its Unix socket.
        if not context.peer().startswith("unix:"):
            metadata = context.invocation_metadata() or ()
            if (refusal := why_not_admitted(metadata, self._token)) is not None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        await context.write(await _answered(self.question(), context))

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
            reason = f"{numbers}: must be from 1 to {MOST_WORKERS}, or 0 to keep it"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        # Only the driver's loop knows which numbers its workers allow.
        try:
            asked = ScaleAsked(wanted.env_runners, wanted.learners, Future())
            self._ask(asked)
            env_runners, learners = await _answered(asked.answer, context)
        except ValueError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        else:
            reply = status_pb2.ScaleReply(before=env_runners, learners_before=learners)
            await context.write(reply)


async def _answered(future: Future[Any], context: Any) -> Any:
    """Return the driver's answer, or end the call if it hangs."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_SECONDS)
    except TimeoutError:
        reason = f"the driver's loop has not answered for {ANSWER_SECONDS:.0f} s"
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, reason)


def ask_status(channel: grpc.Channel, seconds: float, token: str = "") -> dict[str, Any]:
    """Ask a driver for its run's status; see `plain_status`."""
    method: Any = channel.unary_unary(STATUS_METHOD)
    answer: bytes = method(b"", timeout=seconds, metadata=bearer(token))
    return plain_status(status_pb2.RunStatus.FromString(answer))


def plain_status(status: status_pb2.RunStatus) -> dict[str, Any]:
    """Convert a status, with its line of metrics, to JSON data."""
    return {**_to_plain(status), "metrics": json.loads(status.metrics or "{}")}


def _to_plain(message: Any) -> dict[str, Any]:
    """Convert a message to plain JSON data by field names."""
    plain: dict[str, Any] = {}
    for part in message.DESCRIPTOR.fields:
        value = getattr(message, part.name)
        if part.has_presence and not message.HasField(part.name):
            plain[part.name] = None
        elif part.message_type is None:
            plain[part.name] = list(value) if part.is_repeated else value
        elif part.message_type.GetOptions().map_entry:
            plain[part.name] = dict(value)
        elif part.is_repeated:
            plain[part.name] = [_to_plain(each) for each in value]
        else:
            plain[part.name] = _to_plain(value)
    return plain
