"""Chunks: the messages that carry frames on a stream.

Every kind of chunk has the same fields (`tensors.proto`), so the same functions serve all of them.
The classes that protobuf generates would copy the payload once or twice on each side.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import xxhash
from numpy.typing import NDArray

from juggler.runtime.wire.errors import WireError

_SINGLE_BYTES = [bytes([number]) for number in range(128)]
_LAST_SHIFT = 63  # of the tenth byte, the last of any number


def write_varint(number: int) -> bytes:
    """Encode a non-negative number."""
    if number < 128:
        return _SINGLE_BYTES[number]
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Read the number at a position; also return the position after it.

    Raises:
        WireError: no number is there.
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
            # Ten bytes hold 70 bits, of which a number has 64.
            if byte < 128:
                return number & 0xFFFFFFFFFFFFFFFF, end + 1
            shift += 7
    except IndexError:
        pass
    raise WireError(f"the message is truncated or not protobuf: no number at byte {at}")


#: The payload begins at a multiple of this within its message. CPython also aligns the data of a
#: bytes object like this, so arrays can be views of the message.
ALIGNMENT = 16

# The bytes before a field: field number << 3 | wire type.
_HEADER = b"\x0a"
_TREE = b"\x12"
_OFFSET = b"\x18"
_DIGEST = b"\x21"
_SLOT = b"\x28"
_PADDING = b"\x72"
_PAYLOAD = b"\x7a"

# Wire types of protobuf.
_VARINT, _FIXED64, _BYTES, _, _, _FIXED32 = range(6)  # without groups

# Padding fields by size; a single byte is too small for a field.
_PADDINGS = [
    _PADDING + bytes([size - 2]) + bytes(size - 2) if size else b""
    for size in (0, ALIGNMENT + 1, *range(2, ALIGNMENT))
]

#: Bytes in memory, in the order of their addresses.
Piece: TypeAlias = "memoryview | NDArray[Any]"


class Chunk(NamedTuple):
    """The fields of a chunk."""

    header: bytes | None
    tree: bytes | None
    offset: int  # offset of the chunk's share in the payload
    digest: int | None
    start: int  # start of the share in the message
    size: int  # size of the share
    slot: int | None = None  # of the shared memory with the payload


def digest_of(share: Iterable[Piece]) -> int:
    """The 64-bit XXH3 digest of a chunk's payload."""
    digest = xxhash.xxh3_64()
    piece: Any
    for piece in share:
        digest.update(piece)
    return digest.intdigest()


def write_chunk(
    share: Sequence[Piece],
    size: int,
    *,
    offset: int = 0,
    header: bytes | None = None,
    tree: bytes | None = None,
    digest: bool = False,
    slot: int | None = None,
) -> bytes:
    """Serialize a chunk.

    Args:
        share: pieces of the payload, `size` bytes in total; they are copied once.
        offset: offset of the share in the payload.
        header: serialized header; only the first chunk of a frame has it, and `tree`.
        digest: whether the chunk carries the digest of its share.
        slot: of the shared memory with the whole payload, if it is not in the chunk.
    """
    fields = b"" if header is None else _HEADER + write_varint(len(header)) + header
    if digest:
        fields += _DIGEST + struct.pack("<Q", digest_of(share))
    fields += b"" if tree is None else _TREE + write_varint(len(tree)) + tree
    fields += _OFFSET + write_varint(offset) if offset else b""
    if slot is not None:
        return fields + _SLOT + write_varint(slot)
    tag = _PAYLOAD + write_varint(size)
    padding = _PADDINGS[-(len(fields) + len(tag)) % ALIGNMENT]
    parts: list[Any] = [fields, padding, tag, *share]
    return b"".join(parts)


def read_chunk(message: bytes) -> Chunk:
    """Find the fields of a chunk in any order; skip unknown ones.

    As always in protobuf, pieces of an embedded message are joined, and of repeated numbers or
    `bytes` the last one counts.

    Raises:
        WireError: the message is not protobuf, or has groups.
    """
    embedded: dict[int, bytes] = {}
    offset = start = size = at = 0
    digest: int | None = None
    slot: int | None = None
    while at < len(message):
        key, at = read_varint(message, at)
        number, wire_type = key >> 3, key & 7
        # The payload is only located: it may be large, and must not be copied.
        if wire_type == _BYTES:
            length, begin = read_varint(message, at)
            at = begin + length
            if number == 15:
                start, size = begin, length
            elif 0 < number <= 2:
                embedded[number] = embedded.get(number, b"") + message[begin:at]
        # Fields of later versions are skipped by their wire type.
        elif wire_type == _VARINT:
            value, at = read_varint(message, at)
            if number == 3:
                offset = value
            elif number == 5:
                slot = value
        elif wire_type in (_FIXED32, _FIXED64):
            begin, at = at, at + (4 if wire_type == _FIXED32 else 8)
            if number == 4 and wire_type == _FIXED64:
                digest = int.from_bytes(message[begin:at], "little")
        else:
            raise WireError(f"the chunk is not protobuf: it has a field with the key {key}")
    # Slices beyond the end were short, without an error.
    if at > len(message):
        raise WireError(f"the chunk is truncated: a field goes beyond its {len(message)} bytes")
    return Chunk(embedded.get(1), embedded.get(2), offset, digest, start, size, slot)
