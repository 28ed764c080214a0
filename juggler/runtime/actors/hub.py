"""The driver's end of all attach streams."""

from __future__ import annotations

import asyncio
import itertools
import threading
from asyncio import new_event_loop
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message

from juggler.runtime.actors.credentials import (
    WITHOUT_TOKEN,
    Strangers,
    same_token,
    why_not_admitted,
)
from juggler.runtime.actors.endpoints import (
    PROTOCOL_VERSION,
    WATCHFUL_SERVER_OPTIONS,
    bind,
    must_fit,
)
from juggler.runtime.actors.resources import seconds_waited
from juggler.runtime.actors.tls import Tls
from juggler.runtime.wire.v1 import attach_pb2

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue that any thread fills and one loop empties."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._ready = threading.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._ready.set()

    def gather(self, timeout: float = 0.0) -> list[T]:
        """Return all current items, oldest first.

        Args:
            timeout: seconds to wait for a first item if there is none. 0 never waits. A wait may
                end early with an empty list.
        """
        if not self._items and timeout > 0:
            self._ready.wait(timeout)
        # Cleared before the items are taken: a `put` in between leaves the flag set, so no reader
        # misses an item.
        self._ready.clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def wake(self) -> None:
        """End a wait without adding an item."""
        self._ready.set()


class Service(Protocol):
    """A further service of an asyncio server."""

    def add_to(self, server: Any) -> None:
        """Add the service; called before the server starts."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """The state of an attached worker, according to its heartbeats.

    Attributes:
        held_up_by: description of the call that holds up its main loop; "": none, or unknown.
    """

    seconds_silent: float
    resident_bytes: int
    device_bytes: int
    cpu_seconds: float
    held_up_by: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """One incarnation of a worker.

    Two are equal only if they are the same object.
    """

    worker_id: str  # role and index; a replacement has the same
    incarnation: str
    role: str
    index: int
    host: str
    pid: int
    devices: tuple[str, ...]
    data_addresses: tuple[str, ...]
    local: bool


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    worker: Worker


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The worker's stream has ended.

    `farewell`: the worker announced it. Then its process ends by itself, and `unanswered` has the
    commands that it has begun but not answered. `stack`: where its main loop hung. `unresponsive`:
    its heartbeats were also missing.
    """

    worker: Worker
    reason: str
    failure: attach_pb2.Failure | None = None
    farewell: bool = False
    unanswered: frozenset[int] = frozenset()
    stack: str = ""
    unresponsive: bool = False


@dataclass(frozen=True, slots=True)
class WorkerReplied:
    worker: Worker
    reply: attach_pb2.Reply


@dataclass(frozen=True, slots=True)
class WorkerReported:
    worker: Worker
    body: any_pb2.Any


HubEvent = WorkerJoined | WorkerLeft | WorkerReplied | WorkerReported


_MOST_INDEX = 4095
_LONGEST_WORD = 64  # characters of a role or a run's id
_LONGEST_LINE = 1000  # characters


class ProtocolViolation(ValueError):
    """A worker broke the protocol.

    The message describes it, and may be sent to the worker.
    """


def read_message(raw: bytes) -> attach_pb2.FromWorker:
    """Read any message of a stream; its texts become single lines.

    Raises:
        ProtocolViolation: it is not a message.
    """
    try:
        message = attach_pb2.FromWorker.FromString(raw)
    except DecodeError:
        raise ProtocolViolation("sent bytes that are not a message of an attach stream") from None
    # A worker's texts become lines of the driver's log, and must not look like several.
    failures = [reply.failure for reply in message.replies if reply.HasField("failure")]
    if message.HasField("heartbeat"):
        message.heartbeat.held_up_by = one_line(message.heartbeat.held_up_by)
    if message.HasField("farewell"):
        message.farewell.reason = one_line(message.farewell.reason)
        if message.farewell.HasField("failure"):
            failures.append(message.farewell.failure)
    for failure in failures:
        failure.message = one_line(failure.message)
    return message


def one_line(text: str, longest: int = _LONGEST_LINE) -> str:
    """Join a worker's text for people into one line."""
    return " ".join(text[:longest].split())


def read_hello(raw: bytes, token: str, run_id: str, roles: Sequence[str]) -> attach_pb2.Hello:
    """Read the first message of a stream.

    Args:
        raw: serialized message.
        token: of the run; "" admits all workers.
        run_id: of the run.
        roles: roles that workers may have.

    Raises:
        ProtocolViolation: the sender must not be admitted.
    """
    first = read_message(raw)
    hello = first.hello
    if not first.HasField("hello") or not hello.incarnation:
        raise ProtocolViolation("the first message must be a hello with an incarnation")
    if not same_token(hello.token, token):
        raise ProtocolViolation(WITHOUT_TOKEN)
    # A sender with the token may learn about this run, to correct its configuration.
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolViolation(
            f"this driver speaks protocol version {PROTOCOL_VERSION}, the worker "
            f"{hello.protocol_version}: install the same version of Juggler on both"
        )
    if hello.run_id and hello.run_id != run_id:
        raise ProtocolViolation(
            f"this is run {run_id!r}, not {one_line(hello.run_id, _LONGEST_WORD)!r}"
        )
    if hello.role not in roles:
        role = one_line(hello.role, _LONGEST_WORD)
        raise ProtocolViolation(f"unknown role {role!r}: expected one of {', '.join(roles)}")
    if hello.index > _MOST_INDEX:
        raise ProtocolViolation(f"index {hello.index}: at most {_MOST_INDEX}")
    return hello


_SILENCE_BEGINS = 3.0  # seconds
_MOST_PATIENCE = 0.9  # of a silence: in the end, even a worker that never runs is lost


@dataclass(eq=False, slots=True)
class WorkerConnection:
    """The hub's view of a worker's attach stream."""

    worker: Worker
    wake: asyncio.Event
    cancel: Callable[[], bool]  # ends the stream
    last_seen: float  # seconds of the loop's clock
    outbox: deque[attach_pb2.Command] = field(default_factory=deque)  # any thread appends
    waited: float | None = None  # seconds that it had waited for a processor when it became silent
    heartbeat: attach_pb2.Heartbeat = field(default_factory=attach_pb2.Heartbeat)
    over: str = ""  # if set, the stream ends for this reason
    unresponsive: bool = False  # the reason is silence; the worker may be alive

    def silent(self, now: float) -> float:
        """Return how many seconds a worker has been silent.

        Seconds in which a worker on this host waited for a processor do not count.
        """
        silent = now - self.last_seen
        if silent < _SILENCE_BEGINS or not self.worker.local:
            self.waited = None
            return silent
        waited = seconds_waited(self.worker.pid)
        if self.waited is None:
            self.waited = waited
        return silent - min(waited - self.waited, _MOST_PATIENCE * silent)


ATTACH_METHOD = "/juggler.v1.Driver/Attach"

#: Key of the trailing metadata with the reason for the stream's end.
REASON_KEY = "juggler-reason-bin"
#: Reasons that are not the worker's fault.
RUN_OVER, REPLACED = "the run is over", "replaced by a new process"
_LONGEST_REASON = 1000  # characters
_FIRST_MESSAGE_SECONDS = 5.0  # for the first message of a stream
_MOST_STRANGERS = 1024  # streams at once without a token or a hello


@dataclass(frozen=True, slots=True)
class HubSettings:
    run_id: str
    roles: tuple[str, ...]
    token: str = field(default="", repr=False)
    tls: Tls | None = None  # of this host; the Unix socket never has TLS
    heartbeat_seconds: float = 1.0
    silence_seconds: float = 10.0  # without any message, then a worker is lost
    hang_seconds: float = 120.0  # without progress of the main loop, then a worker is lost
    max_workers: int = 4096
    most_of: Mapping[str, int] = field(default_factory=dict)  # workers by role; no entry: no limit
    services: tuple[Service, ...] = ()  # further services of its server


class AttachStream:
    """The driver's end of a worker's stream.

    Attributes:
        local: it uses a Unix socket.
        known: it showed the run's token when it opened, or is local.
    """

    def __init__(self, context: Any, token: str) -> None:
        self.local = context.peer().startswith("unix:")
        metadata = context.invocation_metadata() or ()
        shown = bool(token) and why_not_admitted(metadata, token) is None
        self.known = self.local or shown
        self._context = context

    async def receive(self) -> bytes | None:
        """Return the next message; None: the worker has ended its side."""
        message = await self._context.read()
        return None if message is grpc.aio.EOF else message

    async def send(self, message: attach_pb2.ToWorker) -> None:
        """Send a message after the earlier ones."""
        await self._context.write(message)

    def end(self, why: str, reason: str = "", code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        """Set the status with which the stream ends.

        Args:
            why: for gRPC.
            reason: for the worker; "": it already knows it.
            code: of the stream's status.
        """
        if reason:
            self._context.set_trailing_metadata(((REASON_KEY, reason.encode()),))
        if code is not grpc.StatusCode.OK:
            self._context.set_code(code)
            self._context.set_details(why)


class Hub:
    """Accepts workers, and carries commands, replies and reports.

    It runs a gRPC server in a thread.

    One asyncio loop serves all streams, so thousands of idle workers cost no threads. It is also
    the clock. All events go into `events`; nothing here blocks the driver's loop.
    """

    def __init__(
        self,
        settings: HubSettings,
        events: Mailbox[Any],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._settings = settings
        self._events = events
        self._connections: dict[str, WorkerConnection] = {}  # by worker id
        self._silence_of: dict[str, float] = {}  # by role, where it is not that of all
        self._strangers = Strangers(_MOST_STRANGERS)
        self._to_wake: deque[WorkerConnection] = deque()
        self._waking = False
        self._loop = loop or new_event_loop()
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
        """Queue a command for a worker.

        Returns False if this incarnation has left, which a Left event reports.

        Raises:
            EndpointError: the command is too large for a message.
        """
        connection = self._connections.get(worker.worker_id)
        if connection is None or connection.worker is not worker:
            return False
        command = attach_pb2.Command(id=command_id)
        command.body.Pack(body)
        must_fit(command, f"a command to {worker.worker_id}")
        connection.outbox.append(command)
        self._wake(connection)
        return True

    def dismiss(self, worker: Worker, reason: str) -> None:
        """End a worker's stream; its Left event has the reason."""
        connection = self._connections.get(worker.worker_id)
        if connection is not None and connection.worker is worker:
            connection.over = reason
            # Not through the writer, which may be stuck in a write without a reader.
            self._loop.call_soon_threadsafe(connection.cancel)

    def lose_after(self, role: str, silence: float) -> None:
        """Lose workers of a role that are silent for this many seconds."""
        self._silence_of[role] = silence

    def vitals(self) -> dict[str, Vitals]:
        """Return the vitals of attached workers, by worker id."""
        found = {}
        for worker_id, connection in list(self._connections.items()):
            silent, beat = self._loop.time() - connection.last_seen, connection.heartbeat
            found[worker_id] = Vitals(
                max(0.0, silent),
                beat.resident_bytes,
                beat.device_bytes,
                beat.cpu_seconds,
                beat.held_up_by,
            )
        return found

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

    def _wake(self, connection: WorkerConnection) -> None:
        self._to_wake.append(connection)
        # Waking the loop is a system call, so one wake-up serves all commands until the loop runs.
        if not self._waking:
            self._waking = True
            self._loop.call_soon_threadsafe(self._wake_writers)

    # -- on the hub's loop ----------------------------------------------------------------------

    def _wake_writers(self) -> None:
        self._waking = False  # cleared first, so that a later wake-up is not lost
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
        # Services are complete before an address is bound: no call may come too early.
        for each in self._settings.services:
            each.add_to(self._server)
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
        await self.serve(AttachStream(context, self._settings.token))

    async def serve(self, stream: AttachStream) -> None:
        """Admit a worker, and carry its messages until its stream ends."""
        handler: Any = asyncio.current_task()
        try:
            with nullcontext() if stream.known else self._strangers.visit(handler.cancel):
                worker = await self._accept(stream)
        except asyncio.CancelledError:  # by a later stranger; the client tries again
            crowded = f"over {_MOST_STRANGERS} other streams opened before the hello"
            stream.end(crowded, code=grpc.StatusCode.RESOURCE_EXHAUSTED)
            return
        if worker is None:
            return
        # Registered before the event, because the driver may send commands at once.
        connection = WorkerConnection(worker, asyncio.Event(), handler.cancel, self._loop.time())
        self._connections[worker.worker_id] = connection
        welcome = attach_pb2.Welcome(
            worker_id=worker.worker_id,
            run_id=self._settings.run_id,
            heartbeat_seconds=self._settings.heartbeat_seconds,
        )
        writer: asyncio.Task[None] | None = None
        left = WorkerLeft(worker, "the connection broke")
        try:
            self._events.put(WorkerJoined(worker))
            # Finish this write even if the stream should end: if the very first write is
            # abandoned, the stream never ends for its client.
            await _whole(stream.send(attach_pb2.ToWorker(welcome=welcome)))
            writer = asyncio.get_running_loop().create_task(self._write(connection, stream))
            left = await self._read(connection, stream)
        except ProtocolViolation as refused:
            left = WorkerLeft(worker, str(refused))
        except asyncio.CancelledError:
            left = WorkerLeft(
                worker, connection.over or left.reason, unresponsive=connection.unresponsive
            )
        finally:
            if writer is not None:
                writer.cancel()
            self._leave(connection, left)
            # A silent worker gets the status of a failed network, so that it comes back.
            code = grpc.StatusCode.UNAVAILABLE if connection.unresponsive else grpc.StatusCode.OK
            stream.end(left.reason, left.reason[:_LONGEST_REASON], code)

    async def _accept(self, stream: AttachStream) -> Worker | None:
        """Read a worker's hello; None: it sent none or was refused."""
        silence = self._settings.silence_seconds
        try:
            # Before the hello is read, which may have 8 MiB.
            if self._settings.token and not stream.known:
                raise ProtocolViolation(WITHOUT_TOKEN)
            # Outside the refusal, so that a large hello is freed before the refusal is written.
            first = await asyncio.wait_for(stream.receive(), silence)
            return None if first is None else self._admit(first, stream.local)
        except (ProtocolViolation, TimeoutError) as error:
            reason = str(error) or f"no hello within {silence:.0f} s"
            first = None
        refusal = attach_pb2.ToWorker(refusal=attach_pb2.Refusal(reason=reason))
        with suppress(TimeoutError):  # the client does not read
            await asyncio.wait_for(stream.send(refusal), _FIRST_MESSAGE_SECONDS)
        return None

    def _admit(self, first: bytes, local: bool) -> Worker:
        settings = self._settings
        hello = read_hello(first, settings.token, settings.run_id, settings.roles)
        if len(self._connections) >= settings.max_workers:
            raise ProtocolViolation(f"this driver admits at most {settings.max_workers} workers")
        # A worker that lost this driver gets its index back, and does not count as one more.
        index = self._index_for(hello)
        worker_id = f"{hello.role}-{index}"
        before = self._connections.get(worker_id)
        most = settings.most_of.get(hello.role, settings.max_workers)
        if before is None and len(self._of_role(hello.role)) >= most:
            raise ProtocolViolation(
                f"this run already has its {most} {hello.role}, and admits no more"
            )
        if before is not None:
            before.over = REPLACED
            before.cancel()
            self._leave(before, WorkerLeft(before.worker, before.over))  # before the new one joins
        # A worker may call itself local, but only a Unix socket proves it.
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
        )

    def _leave(self, connection: WorkerConnection, left: WorkerLeft) -> None:
        worker_id = connection.worker.worker_id
        if self._connections.get(worker_id) is connection:
            del self._connections[worker_id]
            self._events.put(left)

    def _index_for(self, hello: attach_pb2.Hello) -> int:
        if hello.index >= 0:
            return hello.index
        there = self._of_role(hello.role)
        # It may have lost this driver, which has not noticed it yet.
        lost = [each.index for each in there if each.incarnation == hello.predecessor]
        taken = {each.index for each in there}
        return lost[0] if lost else next(n for n in itertools.count() if n not in taken)

    def _of_role(self, role: str) -> list[Worker]:
        workers = (connection.worker for connection in self._connections.values())
        return [each for each in workers if each.role == role]

    async def _write(self, connection: WorkerConnection, stream: AttachStream) -> None:
        while True:
            await connection.wake.wait()
            connection.wake.clear()
            commands = [connection.outbox.popleft() for _ in range(len(connection.outbox))]
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

    async def _read(self, connection: WorkerConnection, stream: AttachStream) -> WorkerLeft:
        worker, events = connection.worker, self._events
        while True:
            raw = await stream.receive()
            if raw is None:
                return WorkerLeft(worker, "the connection ended without a farewell")
            message = read_message(raw)
            connection.last_seen = self._loop.time()
            for reply in message.replies:
                events.put(WorkerReplied(worker, reply))
            for report in message.reports:
                events.put(WorkerReported(worker, report))
            # A worker measures its own progress, since it knows when its work began.
            if message.HasField("heartbeat"):
                connection.heartbeat.CopyFrom(message.heartbeat)
                stuck = message.heartbeat.seconds_since_progress
                if stuck > self._settings.hang_seconds:
                    by = message.heartbeat.held_up_by
                    reason = f"hung{by and ' in '}{by}: no progress for {stuck:.0f} s"
                    return WorkerLeft(worker, reason, stack=message.heartbeat.stack)
            # Nothing follows a farewell: the process ends by itself.
            if message.HasField("farewell"):
                farewell = message.farewell
                failure = farewell.failure if farewell.HasField("failure") else None
                unanswered = frozenset(farewell.unanswered)
                return WorkerLeft(worker, farewell.reason, failure, True, unanswered)

    async def watch(self) -> None:
        """Lose workers that are silent for too long, until cancelled."""
        interval = self._settings.heartbeat_seconds
        looked = self._loop.time()
        while True:
            await asyncio.sleep(interval)
            now = self._loop.time()
            # If this process itself was stopped (by Ctrl-Z, say), no worker was silent: messages
            # from that time are still unread.
            late, looked = now - looked - interval, now
            for connection in list(self._connections.values()):
                connection.last_seen = min(now, connection.last_seen + late)
                role = connection.worker.role
                silence = self._silence_of.get(role, self._settings.silence_seconds)
                if connection.silent(now) > silence and not connection.over:
                    connection.over = f"no heartbeat for {silence:.0f} s"
                    connection.unresponsive = True
                    connection.cancel()


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Finish the work, and then raise a cancellation that came during it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_FIRST_MESSAGE_SECONDS)
        raise
