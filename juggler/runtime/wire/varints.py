"""Numbers as protobuf writes them (varints), for messages that are written and read by hand."""

from __future__ import annotations

from juggler.runtime.wire.errors import NotProtobuf

_SINGLE_BYTES = [bytes([number]) for number in range(128)]
_LAST_SHIFT = 63  # of the tenth byte, beyond which no number goes


def write_varint(number: int) -> bytes:
    """A number that is not negative."""
    if number < 128:
        return _SINGLE_BYTES[number]
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def read_varint(message: bytes, at: int) -> tuple[int, int]:
    """The number at a position, and the position after it.

    Raises:
        NotProtobuf: no number is there.
    """
    end, shift = at, 7
    try:
        byte = message[at]
        if byte < 128:
            return byte, at + 1
        number = byte & 127
        while shift <= _LAST_SHIFT:
            end += 1
            byte = message[end]
            number |= (byte & 127) << shift
            if byte < 128:
                return number & 0xFFFFFFFFFFFFFFFF, end + 1
            shift += 7
    except IndexError:
        pass
    raise NotProtobuf(f"the message is truncated or not protobuf: no number at byte {at}")
