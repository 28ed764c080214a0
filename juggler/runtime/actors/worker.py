"""What every worker does: attach, carry out commands one after the other, and say how it ended."""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from juggler.runtime.actors.attachment import (
    LOST_THE_DRIVER,
    AttachError,
    Attachment,
    Command,
    Detached,
    describe,
    new_incarnation,
)
from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.processes import set_title
from juggler.runtime.wire.v1 import attach_pb2

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Contact:
    """How a worker finds its driver.

    Attributes:
        address: of the driver, "host:port" or "unix:path".
        index: of the worker in its role; -1 lets the driver choose.
        local: the worker shares the driver's file system; its Unix sockets are in `socket_dir`.
    """

    address: str
    index: int = -1
    token: str = ""
    run_id: str = ""
    local: bool = False
    socket_dir: str = ""
    timeout: float = 20.0


_STOP = attach_pb2.Stop.DESCRIPTOR.full_name

Inbox = Mailbox[Command | Detached]


class WorkerBody(Protocol):
    """What a worker is, once it is attached."""

    def run(self) -> str:
        """Work until told to stop. Returns why it ended."""

    def close(self) -> None:
        """Let go of everything."""


def attach_and_run(
    contact: Contact,
    role: str,
    make: Callable[[Attachment, Inbox], WorkerBody],
    *,
    devices: Sequence[str] = (),
    data_addresses: Sequence[str] = (),
) -> None:
    """A worker's whole life. Exits with status 1, and says why, where something failed."""
    inbox: Inbox = Mailbox()
    if not contact.local:
        # A local worker is stopped by its driver; one on its own by whoever sends it a signal.
        for number, reason in ((signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")):
            _stop_on(number, reason, inbox)
    try:
        attachment = Attachment(
            contact.address,
            role,
            contact.index,
            new_incarnation(),
            inbox,
            token=contact.token,
            run_id=contact.run_id,
            devices=devices,
            data_addresses=data_addresses,
            local=contact.local,
            timeout=contact.timeout,
        )
    except (AttachError, EndpointError) as error:
        print(f"juggler {role}: {error}", file=sys.stderr)
        sys.exit(1)
    set_title(attachment.worker_id.replace("-", " "))
    body = make(attachment, inbox)
    try:
        reason, failure = body.run(), None
    except BaseException as error:  # code of others runs in here, and may call sys.exit
        reason, failure = describe(error).message, error
    attachment.farewell(reason, failure)
    try:
        body.close()
    except Exception as error:
        line = describe(error).message
        print(f"juggler {attachment.worker_id}: while it left: {line}", file=sys.stderr)
    if not contact.local:
        print(f"juggler {attachment.worker_id}: {reason}", file=sys.stderr)
    if failure is not None or reason.startswith(LOST_THE_DRIVER):
        sys.exit(1)


def _stop_on(number: signal.Signals, reason: str, inbox: Inbox) -> None:
    def handle(*_: object) -> None:
        # In a thread: a handler may interrupt the main thread while it holds the inbox's lock.
        threading.Thread(target=inbox.put, args=(Detached(reason),)).start()

    signal.signal(number, handle)


class CommandLoop:
    """Commands in order of arrival, except that a Stop goes before all others.

    A handler gets (command id, message) and returns the reply, or None where the reply comes
    later through `attachment.reply`. An exception of a handler is the command's answer, and ends
    the loop.
    """

    def __init__(self, attachment: Attachment, inbox: Inbox) -> None:
        self._attachment = attachment
        self._inbox = inbox
        self._waiting: deque[Command | Detached] = deque()
        self._handlers: dict[str, tuple[type[Message], Callable[[int, Any], Message | None]]] = {}

    def on(self, kind: type[M], handler: Callable[[int, M], Message | None]) -> None:
        self._handlers[kind.DESCRIPTOR.full_name] = (kind, handler)

    def over(self) -> str:
        """Why the loop should end now, or "". To be asked within long waits."""
        self._waiting.extend(self._inbox.gather())
        for item in self._waiting:
            if isinstance(item, Detached):
                return item.reason
            if item.body.TypeName() == _STOP:
                return "stopped by the driver"
        return ""

    def waits(self, kind: type[Message]) -> bool:
        """Whether a later command of this kind waits for its turn, or the loop should end now."""
        if self.over():
            return True
        name = kind.DESCRIPTOR.full_name
        return any(isinstance(x, Command) and x.body.TypeName() == name for x in self._waiting)

    def run(self) -> str:
        """Returns the reason why it ended."""
        while True:
            if not self._waiting:
                self._waiting.extend(self._inbox.gather(timeout=3600.0))
            if reason := self.over():
                return reason
            while self._waiting:
                command = self._waiting.popleft()
                assert isinstance(command, Command)
                self._carry_out(command)
                if reason := self.over():
                    return reason

    def _carry_out(self, command: Command) -> None:
        name = command.body.TypeName()
        if name not in self._handlers:
            # A newer driver may ask for what this worker does not know; it must hear about it.
            unknown = NotImplementedError(f"this worker knows no command {name!r}")
            return self._attachment.fail(command.command_id, unknown)
        kind, handler = self._handlers[name]
        message = kind()
        command.body.Unpack(message)
        try:
            with self._attachment.busy():
                reply = handler(command.command_id, message)
        except Exception as error:
            self._attachment.fail(command.command_id, error)
            raise
        if reply is not None:
            self._attachment.reply(command.command_id, reply)
