"""Counts the entries of a serialized message before any of them is created."""

from __future__ import annotations

from contextlib import suppress

from juggler.runtime.wire.errors import NotProtobuf, WireError
from juggler.runtime.wire.varints import read_varint

_SKIPPED = {0: 0, 1: 8, 2: 0, 5: 4}  # bytes after a key, by protobuf's wire type


def check_entries(message: bytes, most: int) -> None:
    """Check how many outermost fields a message has: one for each value of a repeated field and
    each entry of a map, but only one for packed numbers. Bytes that are not protobuf are counted up
    to the first error, and left to their reader.

    Raises:
        WireError: there are more than `most`, or there are groups, which no message here has.
    """
    if len(message) <= 2 * most:  # every field takes at least two bytes
        return
    at = count = 0
    with suppress(NotProtobuf, KeyError):  # which its reader finds
        while at < len(message):
            count += 1
            if count > most:
                raise WireError(f"a message of over {most} entries")
            key, at = read_varint(message, at)
            wire_type = key & 7
            if wire_type in (3, 4):
                raise WireError("a message with groups")
            at += _SKIPPED[wire_type]
            if wire_type in (0, 2):
                number, at = read_varint(message, at)
                at += number if wire_type == 2 else 0
