"""Checks messages on an attach stream before anything uses them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from juggler.runtime.actors.credentials import WITHOUT_TOKEN, same_token
from juggler.runtime.actors.endpoints import PROTOCOL_VERSION
from juggler.runtime.wire.entries import check_entries
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.v1 import attach_pb2

_MOST_HELLO_BYTES = 1 << 16
_MOST_INDEX = 4095
_LONGEST_WORD = 64  # bytes of an incarnation
_LONGEST_NAME = 255  # bytes of a host's name, of an address or a device
_MOST_NAMES = 64  # number of devices or addresses
_LONGEST_LINE = 1000  # characters
_LONGEST_TEXT = 1 << 17  # characters of a traceback
_MOST_UNANSWERED = 1 << 16  # the most that a worker is ever asked at once
#: Replies and reports of one worker, or entries of its reports. A healthy one has some hundreds.
MOST_EVENTS_PER_SECOND = 20_000


class Refused(ValueError):
    """A worker broke the protocol. The message says how, and is fit for the worker."""


def read_message(raw: bytes) -> attach_pb2.FromWorker:
    """Reads any message but the first. Its texts for people are on one line afterwards.

    Raises:
        Refused: it is not a message, or holds more than it may.
    """
    message = _parsed(raw)
    if message.HasField("hello"):
        raise Refused("sent a second hello")
    for reply in message.replies:
        if reply.HasField("failure"):
            _check_failure(reply.failure)
    if message.HasField("heartbeat"):
        heartbeat = message.heartbeat
        _check_length("stack", heartbeat.stack, _LONGEST_TEXT)
        heartbeat.held_up_by = one_line(heartbeat.held_up_by)
    if message.HasField("farewell"):
        farewell = message.farewell
        farewell.reason = one_line(farewell.reason)
        if farewell.HasField("failure"):
            _check_failure(farewell.failure)
        if len(farewell.unanswered) > _MOST_UNANSWERED:
            raise Refused(f"sent a farewell with over {_MOST_UNANSWERED} commands")
    return message


def one_line(text: str, longest: int = _LONGEST_LINE) -> str:
    """A worker's text for people on one line, so that it cannot imitate other messages."""
    return " ".join(text[:longest].split())


def _check_failure(failure: attach_pb2.Failure) -> None:
    failure.message = one_line(failure.message)
    _check_length("traceback", failure.traceback, _LONGEST_TEXT)


def _check_length(what: str, text: str, longest: int) -> None:
    if len(text) > longest:
        raise Refused(f"sent a {what} of {len(text)} characters: at most {longest}")


def read_hello(raw: bytes, token: str, run_id: str, roles: Sequence[str]) -> attach_pb2.Hello:
    """Reads the first message of a stream.

    Args:
        raw: serialized message.
        token: of the run; empty admits everybody.
        run_id: of the run.
        roles: that workers may have.

    Raises:
        Refused: the sender must not be admitted.
    """
    if len(raw) > _MOST_HELLO_BYTES:
        raise Refused(f"a hello of {len(raw)} bytes: at most {_MOST_HELLO_BYTES}")
    first = _parsed(raw)
    hello = first.hello
    if not first.HasField("hello") or not hello.incarnation:
        raise Refused("the first message must be a hello with an incarnation")
    if not same_token(hello.token, token):
        raise Refused(WITHOUT_TOKEN)
    if hello.protocol_version != PROTOCOL_VERSION:
        raise Refused(
            f"this driver speaks protocol version {PROTOCOL_VERSION}, the worker "
            f"{hello.protocol_version}: install the same version of Juggler on both"
        )
    if hello.run_id and hello.run_id != run_id:
        raise Refused(f"this is run {run_id}, not {one_line(hello.run_id, _LONGEST_WORD)}")
    if hello.role not in roles:
        role = one_line(hello.role, _LONGEST_WORD)
        raise Refused(f"unknown role {role!r}: expected one of {', '.join(roles)}")
    if hello.index > _MOST_INDEX:
        raise Refused(f"index {hello.index}: at most {_MOST_INDEX}")
    _check_names("incarnation", [hello.incarnation, hello.predecessor], 2, _LONGEST_WORD)
    _check_names("host", [hello.host], 1)
    _check_names("device", hello.devices)
    _check_names("address", hello.data_addresses)
    _check_names("address", hello.episode_addresses)
    return hello


def _check_names(
    what: str, names: Sequence[str], most: int = _MOST_NAMES, longest: int = _LONGEST_NAME
) -> None:
    if len(names) > most:
        raise Refused(f"a hello with {len(names)} of {what}: at most {most}")
    if any(len(name.encode()) > longest or not name.isprintable() for name in names):
        raise Refused(f"{what}: must be at most {longest} bytes that can be printed")


def _parsed(raw: bytes) -> attach_pb2.FromWorker:
    try:
        check_entries(raw, MOST_EVENTS_PER_SECOND)
        return attach_pb2.FromWorker.FromString(raw)
    except WireError as error:
        raise Refused(f"sent {error}") from None
    except DecodeError:
        raise Refused("sent bytes that are not a message of an attach stream") from None


class Rate:
    """Limits a worker's messages: a second with too many ends its stream."""

    def __init__(self) -> None:
        self._second = 0
        self._events = 0

    def count(self, events: int) -> None:
        """
        Raises:
            Refused: there were too many in this second.
        """
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._events = second, 0
        self._events += events
        if self._events > MOST_EVENTS_PER_SECOND:
            raise Refused(
                f"sent over {MOST_EVENTS_PER_SECOND} replies and reports in a second, or entries "
                "of them"
            )
