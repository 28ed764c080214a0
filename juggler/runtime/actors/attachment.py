"""A worker's end of its attach stream."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Protocol, Self

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message

from juggler.runtime.actors.calls import CallEnd, ClientStream
from juggler.runtime.actors.credentials import bearer
from juggler.runtime.actors.endpoints import (
    PROTOCOL_VERSION,
    EndpointError,
    dial,
    must_fit,
    no_driver,
    wait_until_ready,
)
from juggler.runtime.actors.health import Health
from juggler.runtime.actors.hub import (
    ATTACH_METHOD,
    REASON_KEY,
    REPLACED,
    RUN_OVER,
    Mailbox,
    one_line,
)
from juggler.runtime.actors.logs import WorkerLog
from juggler.runtime.actors.resources import resident_bytes, thread_waited
from juggler.runtime.actors.tls import Tls
from juggler.runtime.user_tracebacks import place_of, traceback_of
from juggler.runtime.wire.v1 import attach_pb2


class BusyThreads:
    """Times threads that report when they are at work.

    Time in which the whole process was stopped, or a thread waited for a processor, does not
    count: a thread that cannot run does not hang.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # by thread, in time of `_awake`
        self._stood_still = 0.0  # seconds
        self._waited: dict[int, tuple[float, float]] = {}  # see `longest`

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark this thread as at work."""
        thread = threading.get_ident()
        self._since[thread] = self._awake()
        try:
            yield
        finally:
            del self._since[thread]

    def progresses(self) -> None:
        """Note progress of this thread's work.

        A thread that progresses does not hang, however long it takes.
        """
        self._since[threading.get_ident()] = self._awake()

    def add_suspension(self, seconds: float) -> None:
        """Note that the whole process was stopped for this long."""
        self._stood_still += seconds

    def longest(self) -> tuple[float, int]:
        """Return the busy thread that is longest without progress, and this time.

        Its waits for a processor are counted from the first call that finds it busy.
        """
        busy = self._since.copy()  # a consistent copy
        native = {thread.ident: thread.native_id or 0 for thread in threading.enumerate()}
        before, self._waited = self._waited, {}
        longest = (0.0, 0)
        for thread, since in busy.items():
            waited = thread_waited(os.getpid(), native.get(thread, 0))
            seen = before.get(thread, (since, waited))
            first = seen[1] if seen[0] == since else waited
            self._waited[thread] = (since, first)
            longest = max(longest, (self._awake() - since - (waited - first), thread))
        return longest

    def _awake(self) -> float:
        """Return seconds on a clock that stops while this process is stopped."""
        return time.monotonic() - self._stood_still


#: Prefix of a Detached's reason if the stream broke.
LOST_THE_DRIVER = "lost the driver"
#: Prefixes if the driver ended the stream: normally, or because of a fault of the worker.
ENDED, DISMISSED = "the driver ended the stream", "the driver dismissed this worker"
#: Time limit for a driver to welcome or refuse a connected worker. A driver may be stopped for a
#: while, as by SIGSTOP, and a local worker that gives up counts as lost.
WELCOME_SECONDS = 60.0

_LARGE_MESSAGE = 1 << 20  # bytes; one chunk of a frame may be added
_LONG_TEXT = 1 << 16  # characters of a failure, to fit into a message
# gRPC's core returns the last one if calls come faster than a server accepts them.
_BUSY = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
)


class AttachError(RuntimeError):
    """The driver refused or disconnected this worker; the message has the reason."""


class DriverBusy(AttachError):
    """The driver refused this worker for now.

    It has no room, is stopped, or has just ended. Another attempt may succeed.
    """


@dataclass(frozen=True, slots=True)
class ReceivedCommand:
    command_id: int
    body: any_pb2.Any


@dataclass(frozen=True, slots=True)
class Detached:
    """The stream to the driver ended, or all work must end.

    No more commands come.

    Attributes:
        reason: for people.
        failure: the exception behind it, in any thread, if there is one.
    """

    reason: str
    failure: BaseException | None = None

    @classmethod
    def by(cls, failure: BaseException) -> Self:
        return cls(str(failure), failure)


def explains_itself(error: BaseException) -> bool:
    """Return whether an exception is clear without its traceback.

    This holds for a ValueError that Juggler itself raised about its input, and for an exception
    that represents another one and has its text as `traceback`.
    """
    if isinstance(error, ValueError):
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("juggler.")
    return isinstance(getattr(error, "traceback", None), str)


def describe(error: BaseException) -> attach_pb2.Failure:
    """Turn an exception into a message for the driver."""
    line, _, rest = str(error).strip().partition("\n")
    if not explains_itself(error):
        rest = traceback_of(error)
        line = f"{type(error).__name__}: {line}{place_of(error)}"
    rest = getattr(error, "traceback", "") or rest
    lasting = getattr(error, "lasting", False) is True
    return attach_pb2.Failure(
        message=one_line(_fitting(line)), traceback=_fitting(rest), lasting=lasting
    )


def _fitting(text: str) -> str:
    if len(text) > _LONG_TEXT:
        text = f"{text[: _LONG_TEXT // 2]} [...] {text[-_LONG_TEXT // 2 :]}"
    # The name of a file, for example, may have characters that UTF-8 cannot encode.
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class Contact:
    """A worker's way to reach its driver.

    Attributes:
        address: of the driver, "host:port" or "unix:path".
        index: of the worker in its role; -1 lets the driver choose.
        token: the token that it shows on all of its streams, and expects.
        tls: of its host, for everything it dials or listens to over TCP; None: no TLS.
        local: the worker shares the driver's file system; its Unix sockets are in `socket_dir`.
        health: health of its process, if probes have their own server.
        reattach_seconds: how long to wait for a driver that is lost, or has no room; 0: no wait.
        predecessor: this process's incarnation before it lost the driver, or "".
        log: log of the process; None: a new one.
    """

    address: str
    index: int = -1
    token: str = field(default="", repr=False)
    tls: Tls | None = None
    run_id: str = ""
    local: bool = False
    socket_dir: str = ""
    timeout: float = 20.0
    health: Health | None = None
    reattach_seconds: float = 0.0
    predecessor: str = ""
    log: WorkerLog | None = None


class WorkerStream(Protocol):
    """The worker's end of its stream."""

    def wake(self) -> None:
        """Check for messages to send; any thread may call it."""

    def close(self) -> None:
        """End the stream. Idempotent."""


#: Opens a stream, given a source of messages to send, and callbacks for received messages and for
#: the end of the stream. These are called in the stream's own threads. Raises EndpointError if
#: nothing answers at the driver's address.
Connect = Callable[
    [Callable[[], bytes | None], Callable[[bytes], None], Callable[[CallEnd], None]], WorkerStream
]


def _dialed(
    contact: Contact,
    report: Callable[[str], None],
    next_message: Callable[[], bytes | None],
    received: Callable[[bytes], None],
    ended: Callable[[CallEnd], None],
) -> WorkerStream:
    """Dial the driver and open a stream; raise EndpointError if nothing answers."""
    channel = dial(contact.address, contact.tls)
    try:
        wait_until_ready(channel, contact.address, "driver", contact.timeout, contact.tls, report)
    except EndpointError:
        channel.close()
        raise
    metadata = bearer(contact.token) if contact.token else ()
    return ClientStream(
        channel, ATTACH_METHOD, metadata, next_message, received, ended, "attach-receive"
    )


class Attachment:
    """Dial the driver and exchange commands and replies until one side leaves.

    Commands arrive in `inbox`; its last item is a Detached. Replies and reports may be sent from
    any thread; replies sent in quick succession share one message.

    Attributes:
        device_bytes: returns this process's memory on its device, for heartbeats.
        held_up_by: describes whose code a thread's frame is in; called for a thread without
            progress.
    """

    def __init__(
        self,
        contact: Contact,
        role: str,
        inbox: Mailbox[ReceivedCommand | Detached],
        *,
        incarnation: str = "",
        devices: Sequence[str] = (),
        data_addresses: Sequence[str] = (),
        report: Callable[[str], None] = lambda _: None,
        connect: Connect | None = None,
    ) -> None:
        """Dial the driver and attach.

        Args:
            contact: of this worker.
            role: of this worker.
            inbox: gets the commands.
            incarnation: of this worker; "": a new one.
            devices: names of its devices.
            data_addresses: addresses at which it listens for other workers.
            report: called with a line every few seconds without an answer.
            connect: opens the stream; None: the driver is dialed.

        Raises:
            EndpointError: no server answers at the driver's address.
            DriverBusy: the driver has no room for this worker now, or does not answer.
            AttachError: the driver refused this worker.
        """
        self.incarnation = incarnation or secrets.token_hex(8)
        self.device_bytes: Callable[[], int] = int
        self.held_up_by: Callable[[FrameType], str] = lambda _: ""
        # Set before the stream opens, because its threads use them at once.
        self._inbox = inbox
        self._over = threading.Event()
        self._first: SimpleQueue[attach_pb2.ToWorker | CallEnd] = SimpleQueue()
        self._greeted = False
        self._greeting = threading.Lock()
        self._threads = BusyThreads()
        self._begun: set[int] = set()  # commands whose last answer is still due
        # The driver refuses other versions, and replaces an older incarnation with this index.
        hello = attach_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            role=role,
            index=contact.index,
            incarnation=self.incarnation,
            run_id=contact.run_id,
            predecessor=contact.predecessor,
            token=contact.token,
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=devices,
            data_addresses=data_addresses,
            local=contact.local,
        )
        # Queued before the stream opens, because a hello has to be the first message.
        self._outbox = deque([attach_pb2.FromWorker(hello=hello)])
        connect = connect or partial(_dialed, contact, report)
        self._stream = connect(self._next_message, self._received, self._ended)
        try:
            self._stream.wake()
            self.welcome = self._handshake(contact.address)
            threading.Thread(target=self._beat, name="attach-heartbeat", daemon=True).start()
        except AttachError:
            self.close()
            raise  # after other errors, such as a lack of threads, closing might hang

    @property
    def worker_id(self) -> str:
        return self.welcome.worker_id

    @property
    def run_id(self) -> str:
        return self.welcome.run_id

    def reply(self, command_id: int, body: Message, *, last: bool = True) -> None:
        packed = any_pb2.Any()
        packed.Pack(body)
        self.reply_packed(command_id, packed, last=last)

    def reply_packed(self, command_id: int, body: any_pb2.Any, *, last: bool = True) -> None:
        """Send a reply whose message is already serialized."""
        reply = attach_pb2.Reply(id=command_id, last=last, body=body)
        self._send(attach_pb2.FromWorker(replies=[reply]))
        if last:
            self._begun.discard(command_id)

    def fail(self, command_id: int, error: BaseException) -> None:
        """Answer a command with a failure that has the traceback."""
        reply = attach_pb2.Reply(id=command_id, last=True, failure=describe(error))
        self._send(attach_pb2.FromWorker(replies=[reply]))
        self._begun.discard(command_id)

    def report(self, body: Message) -> None:
        packed = any_pb2.Any()
        packed.Pack(body)
        self._send(attach_pb2.FromWorker(reports=[packed]))

    def farewell(self, reason: str, error: BaseException | None = None) -> None:
        """Report why this worker leaves.

        Waits up to 2 s until the driver has received it.
        """
        message = attach_pb2.Farewell(reason=reason, unanswered=sorted(self._begun))
        if error is not None:
            message.failure.CopyFrom(describe(error))
        self._send(attach_pb2.FromWorker(farewell=message))
        self._over.wait(timeout=2.0)
        self.close()

    def begins(self, command_id: int) -> None:
        """Note that this worker begins a command, which it has to answer."""
        self._begun.add(command_id)

    def busy(self) -> AbstractContextManager[None]:
        """Mark this thread as busy, so that heartbeats reveal a hang."""
        return self._threads.busy()

    def progresses(self) -> None:
        """Note progress of this thread's work."""
        self._threads.progresses()

    def close(self) -> None:
        self._over.set()
        self._stream.close()

    def _send(self, message: attach_pb2.FromWorker) -> None:
        must_fit(message, "a message to the driver")
        self._outbox.append(message)
        self._stream.wake()

    def _next_message(self) -> bytes | None:
        if not self._outbox:
            return None
        message = self._outbox.popleft()
        # Waiting messages travel together, as long as the result stays small.
        size = message.ByteSize()
        while self._outbox and size < _LARGE_MESSAGE:
            more = self._outbox.popleft()
            size += more.ByteSize()
            message.MergeFrom(more)
        return message.SerializeToString()

    def _handshake(self, address: str) -> attach_pb2.Welcome:
        try:
            first = self._first.get(timeout=WELCOME_SECONDS)
        except Empty:
            with self._greeting:
                if self._first.empty():
                    # Late messages are not for the next attempt, which has the same inbox.
                    self._inbox = Mailbox()
                    raise DriverBusy(
                        f"the driver at {address} accepted the connection, and then sent nothing "
                        f"for {WELCOME_SECONDS:.0f} s: it is stopped, or is not a driver"
                    ) from None
            first = self._first.get()
        # Only a driver that is busy, or has just ended, is worth another attempt.
        if isinstance(first, CallEnd):
            if first.code is grpc.StatusCode.OK:
                raise AttachError(f"the driver at {address} closed the stream without a word")
            if first.code is grpc.StatusCode.UNIMPLEMENTED:
                raise AttachError(no_driver(address))
            kind = DriverBusy if first.code in _BUSY else AttachError
            raise kind(f"the driver at {address} broke off: {first.why}")
        if first.HasField("refusal"):
            raise AttachError(f"the driver at {address} refused: {first.refusal.reason}")
        if not first.HasField("welcome"):
            raise AttachError(f"the driver at {address} did not greet this worker: is it a driver?")
        return first.welcome

    def _received(self, message: bytes) -> None:
        message_to_worker = attach_pb2.ToWorker.FromString(message)
        if not self._greeted:
            with self._greeting:
                self._greeted = message_to_worker.HasField("welcome")
                self._first.put(message_to_worker)
        for command in message_to_worker.commands:
            self._inbox.put(ReceivedCommand(command.id, command.body))

    def _ended(self, end: CallEnd) -> None:
        closed = self._over.is_set()  # by close(), in another thread
        self._over.set()
        if not self._greeted:
            return self._first.put(end)
        reason = ENDED
        why = dict(end.metadata).get(REASON_KEY)
        if closed:
            reason = "the channel was closed"
        elif end.code is not grpc.StatusCode.OK:
            reason = f"{LOST_THE_DRIVER}: {end.why}"
        elif isinstance(why, bytes):
            in_order = why.decode() in (RUN_OVER, REPLACED)
            reason = f"{ENDED if in_order else DISMISSED}: {why.decode()}"
        self._inbox.put(Detached(reason))

    def _beat(self) -> None:
        """Send heartbeats until the end; an error ends this worker."""
        interval = self.welcome.heartbeat_seconds or 1.0
        due = time.monotonic()
        try:
            while not self._over.is_set():
                now = time.monotonic()
                self._threads.add_suspension(max(0.0, now - due))  # if the heartbeat is late
                due = now + interval
                self.beat(2 * interval)
                self._over.wait(interval)
        except BaseException as error:
            self._inbox.put(Detached.by(error))

    def beat(self, patience: float) -> None:
        """Send a heartbeat.

        It says where a thread is that made no progress for more than `patience` seconds.
        """
        # The limit is a setting of the driver, so a worker only reports how long it is stuck.
        stuck, thread = self._threads.longest()
        heartbeat = attach_pb2.Heartbeat(
            seconds_since_progress=stuck,
            resident_bytes=resident_bytes(),
            device_bytes=self.device_bytes(),
            cpu_seconds=time.process_time(),
        )
        if stuck > patience and (frame := sys._current_frames().get(thread)) is not None:
            heartbeat.held_up_by = self.held_up_by(frame)
            heartbeat.stack = _fitting("".join(traceback.format_stack(frame)))
        self._send(attach_pb2.FromWorker(heartbeat=heartbeat))
