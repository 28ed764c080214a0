"""How many things a serialized message holds, counted before any of them is made."""

from __future__ import annotations

from contextlib import suppress

from juggler.runtime.wire.errors import WireError

_SKIPPED = {0: 0, 1: 8, 2: 0, 5: 4}  # bytes behind a key, by protobuf's wire type


def check_entries(message: bytes, most: int) -> None:
    """How many fields a message has outermost: one for each value of a repeated field and for each
    entry of a map, but one alone for numbers that are packed. Whatever is no message of protobuf is
    counted up to where that shows, and left to its reader.

    Raises:
        WireError: it has more than `most`, or groups, of which no message here has any.
    """
    if len(message) <= 2 * most:  # none takes less than two bytes
        return
    at = count = 0
    with suppress(IndexError, KeyError):  # it is no message
        while at < len(message):
            count += 1
            if count > most:
                raise WireError(f"a message of over {most} entries")
            key, at = _number(message, at)
            wire_type = key & 7
            if wire_type in (3, 4):
                raise WireError("a message with groups")
            at += _SKIPPED[wire_type]
            if wire_type in (0, 2):
                number, at = _number(message, at)
                at += number if wire_type == 2 else 0


def _number(message: bytes, at: int) -> tuple[int, int]:
    """The number that starts at a position, and the position after it."""
    byte = message[at]
    if byte < 128:
        return byte, at + 1
    number, shift = byte & 127, 7
    while byte > 127:
        at += 1
        byte = message[at]
        number |= (byte & 127) << shift
        shift += 7
        if shift > 70:
            raise IndexError
    return number, at + 1
