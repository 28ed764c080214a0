"""The driver's end of all attach streams."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from juggler.runtime.actors.connection import Connection
from juggler.runtime.actors.credentials import WITHOUT_TOKEN, why_not_admitted
from juggler.runtime.actors.endpoints import WATCHFUL_SERVER_OPTIONS, bind
from juggler.runtime.actors.hello import Rate, Refused, read_hello, read_message
from juggler.runtime.actors.hub_events import Joined, Left, Replied, Reported, Worker
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.strangers import Strangers
from juggler.runtime.actors.tls import Tls
from juggler.runtime.actors.vitals import Service, Vitals
from juggler.runtime.wire.v1 import attach_pb2

ATTACH_METHOD = "/juggler.v1.Driver/Attach"

#: Key of the trailing metadata that say why the stream ended.
REASON_KEY = "juggler-reason-bin"
#: Reasons that are not the worker's fault.
RUN_OVER, REPLACED = "the run is over", "replaced by a new process"
_LONGEST_REASON = 1000  # characters
_FIRST_MESSAGE_SECONDS = 5.0  # for whoever comes to take its first message
_MOST_STRANGERS = 1024  # streams at once without a token or a hello


@dataclass(frozen=True, slots=True)
class HubSettings:
    run_id: str
    roles: tuple[str, ...]
    token: str = field(default="", repr=False)
    tls: Tls | None = None  # of this host; the Unix socket never has TLS
    heartbeat_seconds: float = 1.0
    silence_seconds: float = 10.0  # without any message: the worker is lost
    silence_of: Mapping[str, float] = field(default_factory=dict)  # overrides for some roles
    hang_seconds: float = 120.0  # without progress of the main loop: the worker is lost
    max_workers: int = 4096
    most_of: Mapping[str, int] = field(default_factory=dict)  # workers by role; no entry: no limit
    services: tuple[Service, ...] = ()  # further services of its server


class AttachStream(Protocol):
    """The driver's end of a worker's stream.

    Attributes:
        local: it comes over a Unix socket.
        known: it showed the run's token when it opened, or is local.
    """

    local: bool
    known: bool

    async def receive(self) -> bytes | None:
        """The next message; None: the worker has ended its side."""

    async def send(self, message: attach_pb2.ToWorker) -> None:
        """Send a message once those before have left."""

    def end(self, why: str, reason: str = "", code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        """Say how the stream ends when it has been served.

        Args:
            why: for gRPC.
            reason: for the worker; "": it has heard it already.
            code: of the stream's status.
        """


class Hub:
    """Accepts workers and carries commands, replies and reports. Runs a gRPC server in a thread.

    One asyncio loop serves all streams, so thousands of idle workers cost no threads. Everything
    that happens goes into `events`; nothing here blocks the driver's loop.
    """

    def __init__(
        self,
        settings: HubSettings,
        events: Mailbox[Any],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._settings = settings
        self._events = events
        self._connections: dict[str, Connection] = {}  # by worker id
        self._silence_of = dict(settings.silence_of)
        self._strangers = Strangers(_MOST_STRANGERS)
        self._to_wake: deque[Connection] = deque()
        self._waking = False
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hub", daemon=True)
        self._server: grpc.aio.Server | None = None
        self._watchdog: asyncio.Task[None] | None = None

    def start(self, addresses: Sequence[str], *, insecure: bool = False) -> list[str]:
        """Listen, and return the bound addresses; see `endpoints.bind` for errors."""
        self._thread.start()
        try:
            return list(self._run(self._start(addresses, insecure)))
        except BaseException:
            self.close()
            raise

    def send(self, worker: Worker, command_id: int, body: Message) -> bool:
        """Queue a command. False if this incarnation has left; a Left event says so then."""
        connection = self._connections.get(worker.worker_id)
        if connection is None or connection.worker is not worker:
            return False
        command = attach_pb2.Command(id=command_id)
        command.body.Pack(body)
        connection.outbox.append(command)
        self._wake(connection)
        return True

    def dismiss(self, worker: Worker, reason: str) -> None:
        """End a worker's stream from this side; its Left event has the reason."""
        connection = self._connections.get(worker.worker_id)
        if connection is not None and connection.worker is worker:
            connection.over = reason
            # Not through the writer, which may be stuck in a write that nobody reads.
            self._loop.call_soon_threadsafe(connection.cancel)

    def lose_after(self, role: str, silence: float) -> None:
        """From now on, workers of a role are lost that say nothing for so many seconds."""
        self._silence_of[role] = silence

    def vitals(self) -> dict[str, Vitals]:
        """The vitals of attached workers, by worker id."""
        now = list(self._connections.items())
        return {worker_id: Vitals.of(each.last_seen, each.heartbeat) for worker_id, each in now}

    def close(self) -> None:
        """End all streams and the server. Idempotent."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._run(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
        if not self._loop.is_running():
            self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    def _wake(self, connection: Connection) -> None:
        if connection.wake_pending:
            return
        connection.wake_pending = True
        self._to_wake.append(connection)
        # Waking the loop is a system call, so one wake-up serves all commands until the loop runs.
        if not self._waking:
            self._waking = True
            self._loop.call_soon_threadsafe(self._wake_writers)

    # -- on the hub's loop ----------------------------------------------------------------------

    def _wake_writers(self) -> None:
        self._waking = False  # cleared first, so that a later one is never left behind
        while self._to_wake:
            self._to_wake.popleft().wake.set()

    async def _start(self, addresses: Sequence[str], insecure: bool) -> list[str]:
        # There is no limit on all calls, because calls without a token would use it up.
        self._server = grpc.aio.server(options=WATCHFUL_SERVER_OPTIONS)
        handler: Any = grpc.stream_stream_rpc_method_handler(
            self._attach,
            request_deserializer=None,  # gRPC must not handle bytes that are not a message
            response_serializer=attach_pb2.ToWorker.SerializeToString,
        )
        service, method = ATTACH_METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        for each in self._settings.services:
            await each.add_to(self._server)
        token, tls = self._settings.token, self._settings.tls
        bound = [
            bind(self._server, address, token=token, tls=tls, insecure=insecure)
            for address in addresses
        ]
        await self._server.start()
        self._watchdog = asyncio.get_running_loop().create_task(self.watch())
        return bound

    async def _stop(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        for connection in self._connections.values():
            connection.over = connection.over or RUN_OVER
            connection.wake.set()
        if self._server is not None:
            await self._server.stop(grace=0.5)

    async def _attach(self, _: Any, context: Any) -> None:
        await self.serve(_Call(context, self._settings.token))

    async def serve(self, stream: AttachStream) -> None:
        """Let a worker in, and carry what it says until its stream ends."""
        handler: Any = asyncio.current_task()
        try:
            with nullcontext() if stream.known else self._strangers.visit(handler.cancel):
                worker = await self._let_in(stream)
        except asyncio.CancelledError:  # by a later stranger; the client tries again
            crowded = f"over {_MOST_STRANGERS} others came in before the hello"
            stream.end(crowded, code=grpc.StatusCode.RESOURCE_EXHAUSTED)
            return
        if worker is None:
            return
        connection = Connection(worker, asyncio.Event(), handler.cancel)
        self._connections[worker.worker_id] = connection
        welcome = attach_pb2.Welcome(
            worker_id=worker.worker_id,
            run_id=self._settings.run_id,
            heartbeat_seconds=self._settings.heartbeat_seconds,
        )
        writer: asyncio.Task[None] | None = None
        left = Left(worker, "the connection broke")
        try:
            self._events.put(Joined(worker))
            # Finish this write even if the stream shall end: if the very first write is abandoned,
            # the stream never ends for its client.
            await _whole(stream.send(attach_pb2.ToWorker(welcome=welcome)))
            writer = asyncio.get_running_loop().create_task(self._write(connection, stream))
            left = await self._read(connection, stream)
        except Refused as refused:
            left = Left(worker, str(refused))
        except asyncio.CancelledError:
            left = Left(worker, connection.over or left.reason, unheard=connection.unheard)
        finally:
            if writer is not None:
                writer.cancel()
            self._leave(connection, left)
            # As for a failed network if it was not heard, so that the worker comes back.
            code = grpc.StatusCode.UNAVAILABLE if connection.unheard else grpc.StatusCode.OK
            stream.end(left.reason, left.reason[:_LONGEST_REASON], code)

    async def _let_in(self, stream: AttachStream) -> Worker | None:
        """The worker that says hello; None: it said none, or was refused with the reason."""
        silence = self._settings.silence_seconds
        try:
            # Before the hello is taken, which may have 8 MiB.
            if self._settings.token and not stream.known:
                raise Refused(WITHOUT_TOKEN)
            # Apart from the refusal, so that a large hello is freed before that is written.
            first = await asyncio.wait_for(stream.receive(), silence)
            return None if first is None else self._admit(first, stream.local)
        except (Refused, TimeoutError) as error:
            reason = str(error) or f"no hello within {silence:.0f} s"
            first = None
        refusal = attach_pb2.ToWorker(refusal=attach_pb2.Refusal(reason=reason))
        with suppress(TimeoutError):  # it does not read
            await asyncio.wait_for(stream.send(refusal), _FIRST_MESSAGE_SECONDS)
        return None

    def _admit(self, first: bytes, local: bool) -> Worker:
        settings = self._settings
        hello = read_hello(first, settings.token, settings.run_id, settings.roles)
        if len(self._connections) >= settings.max_workers:
            raise Refused(f"this driver takes at most {settings.max_workers} workers")
        index = self._index_for(hello)
        worker_id = f"{hello.role}-{index}"
        before = self._connections.get(worker_id)
        most = settings.most_of.get(hello.role, settings.max_workers)
        if before is None and self._count(hello.role) >= most:
            raise Refused(f"this run has its {most} {hello.role} already, and takes no more")
        if before is not None:
            before.over = REPLACED
            before.cancel()
            self._leave(before, Left(before.worker, before.over))  # before the new one joins
        return Worker(
            worker_id=worker_id,
            incarnation=hello.incarnation,
            role=hello.role,
            index=index,
            host=hello.host,
            pid=hello.pid,
            devices=tuple(hello.devices),
            data_addresses=tuple(hello.data_addresses),
            local=hello.local and local,
            episode_addresses=tuple(hello.episode_addresses),
        )

    def _leave(self, connection: Connection, left: Left) -> None:
        worker_id = connection.worker.worker_id
        if self._connections.get(worker_id) is connection:
            del self._connections[worker_id]
        if not connection.has_left:
            connection.has_left = True
            self._events.put(left)

    def _index_for(self, hello: attach_pb2.Hello) -> int:
        if hello.index >= 0:
            return hello.index
        for worker in (connection.worker for connection in self._connections.values()):
            # The worker has lost this driver, which has not noticed yet.
            if worker.incarnation == hello.predecessor and worker.role == hello.role:
                return worker.index
        return self._free_index(hello.role)

    def _count(self, role: str) -> int:
        return sum(connection.worker.role == role for connection in self._connections.values())

    def _free_index(self, role: str) -> int:
        return next(n for n in itertools.count() if f"{role}-{n}" not in self._connections)

    async def _write(self, connection: Connection, stream: AttachStream) -> None:
        while True:
            await connection.wake.wait()
            connection.wake.clear()
            connection.wake_pending = False
            commands, connection.outbox = connection.outbox, []
            # Several commands per message, but none near the message limit.
            size, start = 0, 0
            for end, command in enumerate(commands, start=1):
                size += command.ByteSize()
                if end == len(commands) or size > 1 << 20:
                    await stream.send(attach_pb2.ToWorker(commands=commands[start:end]))
                    size, start = 0, end
            if connection.over:
                connection.cancel()
                return

    async def _read(self, connection: Connection, stream: AttachStream) -> Left:
        worker, events, rate = connection.worker, self._events, Rate()
        while True:
            raw = await stream.receive()
            if raw is None:
                return Left(worker, "the connection ended without a farewell")
            message = read_message(raw)
            connection.last_seen = time.monotonic()
            rate.count(max(1, len(message.replies) + len(message.reports)))
            for reply in message.replies:
                events.put(Replied(worker, reply))
            for report in message.reports:
                events.put(Reported(worker, report))
            if message.HasField("heartbeat"):
                connection.heartbeat.CopyFrom(message.heartbeat)
                stuck = message.heartbeat.seconds_since_progress
                if stuck > self._settings.hang_seconds:
                    by = message.heartbeat.held_up_by
                    reason = f"hung{by and ' in '}{by}: no progress for {stuck:.0f} s"
                    return Left(worker, reason, stack=message.heartbeat.stack)
            if message.HasField("farewell"):
                farewell = message.farewell
                failure = farewell.failure if farewell.HasField("failure") else None
                unanswered = frozenset(farewell.unanswered)
                return Left(worker, farewell.reason, failure, True, unanswered)

    async def watch(self) -> None:
        """Lose workers that are silent for too long, until it is cancelled."""
        interval = self._settings.heartbeat_seconds
        looked = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            # If this process itself stood still (after Ctrl-Z, say), nobody was silent: messages
            # from that time are still to be read.
            late, looked = now - looked - interval, now
            for connection in list(self._connections.values()):
                connection.last_seen = min(now, connection.last_seen + late)
                role = connection.worker.role
                silence = self._silence_of.get(role, self._settings.silence_seconds)
                if connection.silent(now) > silence and not connection.over:
                    connection.over = f"no heartbeat for {silence:.0f} s"
                    connection.unheard = True
                    connection.cancel()


class _Call:
    """The stream of a call of gRPC."""

    def __init__(self, context: Any, token: str) -> None:
        self.local = context.peer().startswith("unix:")
        metadata = context.invocation_metadata() or ()
        shown = bool(token) and why_not_admitted(metadata, token) is None
        self.known = self.local or shown
        self._context = context

    async def receive(self) -> bytes | None:
        message = await self._context.read()
        return None if message is grpc.aio.EOF else message

    async def send(self, message: attach_pb2.ToWorker) -> None:
        await self._context.write(message)

    def end(self, why: str, reason: str = "", code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        if reason:
            self._context.set_trailing_metadata(((REASON_KEY, reason.encode()),))
        if code is not grpc.StatusCode.OK:
            self._context.set_code(code)
            self._context.set_details(why)


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Finish the work, and only then raise a cancellation that came meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_FIRST_MESSAGE_SECONDS)
        raise
