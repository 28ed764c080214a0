"""What comes up on an attach stream, held against what may, before anybody believes it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from juggler.runtime.actors.credentials import same_token
from juggler.runtime.actors.endpoints import PROTOCOL_VERSION
from juggler.runtime.wire.v1 import attach_pb2

_MOST_HELLO_BYTES = 1 << 16
_MOST_INDEX = 1 << 20
#: Replies and reports of one worker. A healthy one has some hundreds.
MOST_EVENTS_PER_SECOND = 20_000


class Refused(ValueError):
    """A worker said what it must not. The message says what, fit for the worker."""


def read_message(raw: bytes) -> attach_pb2.FromWorker:
    """Any message but the first.

    Raises:
        Refused: it is none.
    """
    message = _parsed(raw)
    if message.HasField("hello"):
        raise Refused("sent a second hello")
    return message


def read_hello(raw: bytes, token: str, run_id: str, roles: Sequence[str]) -> attach_pb2.Hello:
    """The first message of a stream.

    Args:
        raw: serialized.
        token: of the run; empty admits everybody.
        run_id: of the run.
        roles: that workers may have.

    Raises:
        Refused: whoever sent it is not to be let in.
    """
    if len(raw) > _MOST_HELLO_BYTES:
        raise Refused(f"a hello of {len(raw)} bytes: at most {_MOST_HELLO_BYTES}")
    first = _parsed(raw)
    hello = first.hello
    if not first.HasField("hello") or not hello.incarnation:
        raise Refused("the first message must be a hello with an incarnation")
    if not same_token(hello.token, token):
        raise Refused("the token is missing or wrong")
    if hello.protocol_version != PROTOCOL_VERSION:
        raise Refused(
            f"this driver speaks protocol version {PROTOCOL_VERSION}, the worker "
            f"{hello.protocol_version}: install the same version of Juggler on both"
        )
    if hello.run_id and hello.run_id != run_id:
        raise Refused(f"this is run {run_id}, not {hello.run_id}")
    if hello.role not in roles:
        raise Refused(f"unknown role {hello.role!r}: expected one of {', '.join(roles)}")
    if hello.index > _MOST_INDEX:
        raise Refused(f"index {hello.index}: at most {_MOST_INDEX}")
    return hello


def _parsed(raw: bytes) -> attach_pb2.FromWorker:
    try:
        return attach_pb2.FromWorker.FromString(raw)
    except DecodeError:
        raise Refused("sent bytes that are no message of an attach stream") from None


class Rate:
    """How much a worker says; a second that has too much of it ends its stream."""

    def __init__(self) -> None:
        self._second = 0
        self._events = 0

    def count(self, events: int) -> None:
        """
        Raises:
            Refused: that was too many.
        """
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._events = second, 0
        self._events += events
        if self._events > MOST_EVENTS_PER_SECOND:
            raise Refused(f"sent over {MOST_EVENTS_PER_SECOND} replies and reports in a second")
