"""The life of a worker: attach, carry out commands, report the end."""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import msgspec
import numpy as np
from google.protobuf.message import Message

from juggler.runtime.actors.attachment import (
    DISMISSED,
    LOST_THE_DRIVER,
    WELCOME_SECONDS,
    AttachError,
    Attachment,
    Contact,
    Detached,
    DriverBusy,
    ReceivedCommand,
    describe,
)
from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.actors.logs import WorkerLog
from juggler.runtime.actors.processes import must_end, set_title
from juggler.runtime.actors.stop_signals import ProcessHandler
from juggler.runtime.wire.v1 import attach_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")


def to_json(setup: DataclassInstance) -> str:
    """Encode as JSON; raise TypeError or ValueError if impossible."""
    return json.dumps(asdict(setup))


def from_json(text: str, kind: type[S]) -> S:
    """Decode JSON; raise ValueError for a missing or wrong field."""
    try:
        return msgspec.convert(json.loads(text), kind)  # msgspec's own JSON has no infinity
    except msgspec.ValidationError as error:
        raise ValueError(f"the driver sent an invalid {kind.__name__}: {error}") from None


def worker_seed(run_seed: int, role: str, index: int, life: int = 1, update: int = 0) -> int:
    """Return the seed of a worker: equal arguments give equal seeds.

    Args:
        run_seed: of the whole run, at least 0.
        role: of the worker, such as "envrunner".
        index: of the worker within its role, at least 0.
        life: counts the processes with this worker id: a replacement must not repeat its
            predecessor's episodes.
        update: the update at which the worker began: a resumed run must not repeat its own first
            episodes.

    Returns:
        64 random bits.
    """
    key = (zlib.crc32(role.encode()), index, life, update)
    sequence = np.random.SeedSequence(run_seed, spawn_key=key)
    return int(sequence.generate_state(1, np.uint64)[0])


_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 15.0


def attempts(patience: float) -> Iterator[float]:
    """Yield the seconds left, once per attempt, until `patience` seconds have passed.

    The first attempt is made at once. The pauses before the others grow and are random, so that not
    all processes try at the same time.
    """
    yield patience
    end = time.monotonic() + patience
    delay = _FIRST_DELAY_SECONDS
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, delay * random.uniform(0.5, 1.0)))
        delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
        yield max(0.0, end - time.monotonic())


M = TypeVar("M", bound=Message)


class DriverLost(SystemExit):
    """The connection to the driver broke.

    The driver may come back, or have a successor.

    Attributes:
        incarnation: of the worker that lost the driver.
    """

    def __init__(self, incarnation: str) -> None:
        super().__init__(1)
        self.incarnation = incarnation


class _GivenUp(BaseException):
    """A signal ended this worker before it was attached."""


_SIGNALS = {
    signal.SIGTERM: "terminated",
    signal.SIGINT: "interrupted",
    signal.SIGHUP: "terminated",  # the terminal or connection was closed
}
_LEAVE_SECONDS = 30.0

Inbox = Mailbox[ReceivedCommand | Detached]


class _LeavingInbox(Inbox):
    """The inbox of a worker that would outlive its run.

    `_LEAVE_SECONDS` after its last item the process prints its stack and ends with status 1, even
    if its main loop hangs.

    Args:
        watched: whether the process has to end itself, since no other process would.
    """

    def __init__(self, watched: bool) -> None:
        super().__init__()
        self._watched = watched and sys.stderr is not None

    def put(self, item: ReceivedCommand | Detached) -> None:
        if isinstance(item, Detached) and self._watched:
            # This needs only a thread, because code that hangs may hold the interpreter's lock.
            try:
                faulthandler.dump_traceback_later(_LEAVE_SECONDS, exit=True)
            except RuntimeError:  # out of threads
                must_end()
        super().put(item)

    def has_left(self) -> None:
        """Cancel the end of the process, which does something else now."""
        self._watched = False
        faulthandler.cancel_dump_traceback_later()
        must_end(0)


class FailedOnRequest(RuntimeError):
    """The driver stops this worker because of a failure.

    Attributes:
        traceback: always "", since the message names the failure.
    """

    traceback = ""


class WorkerBody(Protocol):
    """The work of a worker, once it is attached."""

    def run(self) -> str:
        """Work until asked to stop, and return the reason for the end."""

    def close(self) -> None:
        """Release everything."""


def attach_and_run(
    contact: Contact,
    role: str,
    make: Callable[[Attachment, Inbox], WorkerBody],
    *,
    devices: Sequence[str] = (),
    data_addresses: Sequence[str] = (),
) -> None:
    """Run a worker from its first attempt to attach until its end.

    After a failure, the process logs the reason and exits with status 1.

    Raises:
        DriverLost: the connection to the driver broke.
    """
    if sys.stderr is not None:
        faulthandler.enable()  # user code may crash, or hang and be aborted
    # A local worker is stopped by its driver, which also logs its end; a remote one by a signal.
    remote, log = not contact.local, contact.log or WorkerLog(role)
    inbox = _LeavingInbox(watched=remote)
    try:
        if remote:
            _on_signals(_give_up)
            log.info(f"dials the driver at {contact.address}")
        # Each attempt says hello again, with the same arguments.
        attach = partial(Attachment, contact, role, inbox, report=log.info)
        attach = partial(attach, devices=devices, data_addresses=data_addresses)
        attachment = _attach(attach, contact, log)
    except (AttachError, EndpointError, _GivenUp) as error:
        if remote:
            for number in _SIGNALS:  # the worker is already leaving
                signal.signal(number, signal.SIG_IGN)
        log.error(str(error))
        raise SystemExit(1) from error
    # The driver notices hangs from now on.
    must_end(0)
    log.identify(attachment.run_id, attachment.worker_id, attachment.incarnation)
    if remote:
        # In a thread, because a handler may interrupt the main thread while it holds the inbox's
        # lock.
        _on_signals(lambda why: threading.Thread(target=inbox.put, args=(Detached(why),)).start())
        log.info(f"attached to the driver at {contact.address}")
    set_title(attachment.worker_id.replace("-", " "))
    reason, failure = _work(attachment, make, inbox, log)
    inbox.has_left()
    failed = failure is not None or (remote and reason.startswith(DISMISSED))
    if remote:
        (log.error if failed else log.info)(reason)
    if failed:
        sys.exit(1)
    if reason.startswith(LOST_THE_DRIVER):
        raise DriverLost(attachment.incarnation)


def _work(
    attachment: Attachment,
    make: Callable[[Attachment, Inbox], WorkerBody],
    inbox: Inbox,
    log: WorkerLog,
) -> tuple[str, BaseException | None]:
    """Do a worker's work; return why it leaves, and the failure."""
    body: WorkerBody | None = None
    try:
        body = make(attachment, inbox)
        reason, failure = body.run(), None
    except BaseException as error:  # user code runs here, and may call sys.exit
        reason, failure = describe(error).message, error
        must_end(_LEAVE_SECONDS)
    # Sent before anything is closed, because user code may hang there.
    attachment.farewell(reason, failure)
    try:
        if body is not None:
            body.close()
    except Exception as error:
        log.error(f"while it left: {describe(error).message}")
    return reason, failure


def _attach(attach: Callable[[], Attachment], contact: Contact, log: WorkerLog) -> Attachment:
    """Attach, and try again while the driver is busy.

    The process ends if an attempt hangs.

    Raises:
        EndpointError, AttachError: as for an Attachment.
    """
    for left in attempts(contact.reattach_seconds):
        # If no threads are left, gRPC may hang.
        must_end(contact.timeout + WELCOME_SECONDS + _LEAVE_SECONDS)
        try:
            return attach()
        except DriverBusy as error:
            busy = error
            if left:
                log.info(f"{error}. Trying for another {left:.0f} s")
    raise busy


def handled_signals() -> dict[signal.Signals, str]:
    """Return the signals that end this worker; under nohup without SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return {each: why for each, why in _SIGNALS.items() if each != signal.SIGHUP or not ignored}


def _give_up(reason: str) -> NoReturn:
    raise _GivenUp(f"{reason} before a driver had answered")


def _on_signals(act: Callable[[str], object]) -> None:
    """Have signals call `act` with the reason that they give."""
    handled = handled_signals()
    for number in handled:
        signal.signal(number, ProcessHandler(lambda number: act(handled[signal.Signals(number)])))


class CommandLoop:
    """Carries out commands in order of arrival.

    A Stop goes first.

    A handler gets (command id, message) and returns the reply, or None if the reply comes later
    through `attachment.reply`. An exception in a handler answers the command, and ends the loop.
    """

    def __init__(self, attachment: Attachment, inbox: Inbox) -> None:
        self._attachment = attachment
        self._inbox = inbox
        self._waiting: deque[ReceivedCommand | Detached] = deque()
        self._handlers: dict[str, tuple[type[Message], Callable[[int, Any], Message | None]]] = {}

    def on(self, kind: type[M], handler: Callable[[int, M], Message | None]) -> None:
        self._handlers[kind.DESCRIPTOR.full_name] = (kind, handler)

    def over(self) -> str:
        """The reason why the loop should end now, or "".

        Check this during long waits.

        Raises:
            FailedOnRequest: the driver stops this worker because of a failure.
            BaseException: a thread that the worker needs has failed.
        """
        self._waiting.extend(self._inbox.gather())
        stop = attach_pb2.Stop()
        for item in self._waiting:
            if isinstance(item, Detached):
                if item.failure is not None:
                    raise item.failure
                return item.reason
            if item.body.Unpack(stop):
                if stop.failure:
                    raise FailedOnRequest(stop.failure)
                return "stopped by the driver"
        return ""

    def waits(self, kind: type[M], which: Callable[[M], bool] = lambda _: True) -> bool:
        """Return whether a later command of this kind is waiting.

        Also true if the loop should end now.
        """
        if self.over():
            return True
        message = kind()
        commands = (item for item in self._waiting if isinstance(item, ReceivedCommand))
        return any(each.body.Unpack(message) and which(message) for each in commands)

    def coming(self, kind: type[M]) -> M | None:
        """Return the next command, if of this kind, and leave it queued."""
        if self.over() or not self._waiting:
            return None
        command = self._waiting[0]
        message = kind()
        assert isinstance(command, ReceivedCommand)
        return message if command.body.Unpack(message) else None

    def run(self) -> str:
        """Carry out commands, and return the reason why the loop ended."""
        while True:
            if not self._waiting:
                self._waiting.extend(self._inbox.gather(timeout=3600.0))
            if reason := self.over():
                return reason
            while self._waiting:
                command = self._waiting.popleft()
                assert isinstance(command, ReceivedCommand)
                self._carry_out(command)
                if reason := self.over():
                    return reason

    def _carry_out(self, command: ReceivedCommand) -> None:
        name = command.body.TypeName()
        if name not in self._handlers:
            # A newer driver may send an unknown command; the failure reports it to the driver.
            unknown = NotImplementedError(f"this worker knows no command {name!r}")
            return self._attachment.fail(command.command_id, unknown)
        kind, handler = self._handlers[name]
        message = kind()
        command.body.Unpack(message)
        self._attachment.begins(command.command_id)
        try:
            with self._attachment.busy():
                reply = handler(command.command_id, message)
        except Exception as error:
            self._attachment.fail(command.command_id, error)
            raise
        if reply is not None:
            self._attachment.reply(command.command_id, reply)
