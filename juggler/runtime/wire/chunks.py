"""Chunks: the messages in which frames travel on a stream, written and read by hand.

Every kind of chunk has the same fields (`tensors.proto`), so the same functions serve all of them.
The classes that protobuf generates would copy the payload once or twice on each side.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import xxhash
from numpy.typing import NDArray

from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.varints import read_varint, write_varint

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
_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)
_MAX_DEPTH = 100  # nested groups, as in protobuf's own readers
_MOST_FIELDS = 1000  # of a chunk, which needs seven; each takes time, however few bytes it has

# Fields that fill up a number of bytes; one byte alone is too few for a field.
_PADDINGS = [
    _PADDING + bytes([size - 2]) + bytes(size - 2) if size else b""
    for size in (0, ALIGNMENT + 1, *range(2, ALIGNMENT))
]

#: Bytes in memory, in the order of their addresses.
Piece: TypeAlias = "memoryview | NDArray[Any]"


class Chunk(NamedTuple):
    """The fields of a chunk. Its share of the payload stays in the message."""

    header: bytes | None
    tree: bytes | None
    offset: int  # offset of the chunk's share in the payload
    digest: int | None
    start: int  # start of the share in the message
    size: int  # size of the share
    slot: int | None = None  # of the shared memory in which the payload lies


class Known(NamedTuple):
    """What the single chunks of frames with the same tree have in common."""

    tree: bytes  # serialized
    size: int  # of the payload
    tree_field: bytes
    payload_tag: bytes  # tag and length, which precede the payload

    @classmethod
    def of(cls, tree: bytes, size: int) -> Known:
        return cls(
            tree, size, _TREE + write_varint(len(tree)) + tree, _PAYLOAD + write_varint(size)
        )


def digest_of(share: Iterable[Piece]) -> int:
    """The 64-bit XXH3 digest of a chunk's payload. It finds damage, and proves no origin."""
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
    """A serialized chunk.

    Args:
        share: pieces of the payload, `size` bytes in all; they are copied once.
        offset: offset of the share in the payload.
        header: serialized header; only the first chunk of a frame has it, and `tree`.
        digest: whether the chunk carries the digest of its share.
        slot: of the shared memory in which the whole payload lies, if it is not in the chunk.
    """
    fields = b"" if header is None else _HEADER + write_varint(len(header)) + header
    if digest:  # before the tree, as `read_known` expects it
        fields += _DIGEST + struct.pack("<Q", digest_of(share))
    fields += b"" if tree is None else _TREE + write_varint(len(tree)) + tree
    fields += _OFFSET + write_varint(offset) if offset else b""
    if slot is not None:
        return fields + _SLOT + write_varint(slot)
    return _with_payload(fields, _PAYLOAD + write_varint(size), share)


def write_whole(header: bytes, known: Known, payload: Sequence[Piece], *, digest: bool) -> bytes:
    """The same as `write_chunk` for a frame with a single chunk, but faster."""
    fields = _HEADER + write_varint(len(header)) + header
    if digest:
        fields += _DIGEST + struct.pack("<Q", digest_of(payload))
    return _with_payload(fields + known.tree_field, known.payload_tag, payload)


def _with_payload(fields: bytes, payload_tag: bytes, payload: Sequence[Piece]) -> bytes:
    """A message with these fields, and the payload placed so that arrays can be views of it."""
    padding = _PADDINGS[-(len(fields) + len(payload_tag)) % ALIGNMENT]
    parts: list[Any] = [fields, padding, payload_tag, *payload]
    return b"".join(parts)


def with_digest(message: bytes) -> bytes:
    """A copy of the chunk with a digest of its payload."""
    chunk = read_chunk(message, len(message))
    share = memoryview(message)[chunk.start : chunk.start + chunk.size]
    return write_chunk(
        [share], chunk.size, offset=chunk.offset, header=chunk.header, tree=chunk.tree, digest=True
    )


def read_known(message: bytes, trees: Mapping[bytes, Known], header_bytes: int) -> Chunk | None:
    """Reads the single chunk of a frame, if it was written here and has one of these trees.

    Most frames of a stream differ from those before only in header, digest and payload. Reading
    them like this takes a third of the time of `read_chunk`.

    Args:
        trees: what the frames of a tree have in common, by the serialized tree.
        header_bytes: as for `read_chunk`.

    Returns:
        The same as `read_chunk`, or None for any other chunk.
    """
    if message[:1] != _HEADER or len(message) < 2 or message[1] > min(header_bytes, 127):
        return None
    at = 2 + message[1]
    header, digest = message[2:at], None
    if message[at : at + 1] == _DIGEST:
        digest = int.from_bytes(message[at + 1 : at + 9], "little")
        at += 9
    if message[at : at + 1] != _TREE:
        return None
    length, at = read_varint(message, at + 1)
    if length > header_bytes or (known := trees.get(message[at : at + length])) is None:
        return None
    at += length
    if len(message) == at + 2 and message[at : at + 1] == _SLOT and message[at + 1] < 128:
        return Chunk(header, known.tree, 0, digest, 0, 0, message[at + 1])
    last = _PADDINGS[-(at + len(known.payload_tag)) % ALIGNMENT] + known.payload_tag
    if not message.startswith(last, at) or len(message) != at + len(last) + known.size:
        return None
    return Chunk(header, known.tree, 0, digest, at + len(last), known.size)


def read_chunk(message: bytes, header_bytes: int) -> Chunk:
    """Finds the fields of a chunk in any order, and skips unknown ones.

    As everywhere in protobuf, an embedded message that comes in pieces is joined, and of a number
    or `bytes` that comes twice the last one counts.

    Args:
        header_bytes: the largest header, and likewise the largest tree information.

    Raises:
        WireError: the message is not protobuf, or exceeds a limit.
    """
    embedded: dict[int, bytearray] = {}
    offset = start = size = at = 0
    digest: int | None = None
    slot: int | None = None
    groups: list[int] = []  # numbers of open groups, innermost last; none is known
    fields = 0
    while at < len(message):
        fields += 1
        if fields > _MOST_FIELDS:
            raise WireError(f"the chunk has over {_MOST_FIELDS} fields")
        key, at = read_varint(message, at)
        number, wire_type = key >> 3, key & 7
        known = not groups
        if number == 0 or wire_type > _FIXED32:
            raise WireError(f"the chunk is not protobuf: it has a field with the key {key}")
        if wire_type == _BYTES:
            length, begin = read_varint(message, at)
            at = begin + length
            if known and number == 15:
                start, size = begin, length
            elif known and number <= 2:
                content = embedded.setdefault(number, bytearray())
                content += message[begin:at]
                if len(content) > header_bytes:
                    raise WireError(f"header or tree information is over {header_bytes} bytes")
        elif wire_type == _VARINT:
            value, at = read_varint(message, at)
            if known and number == 3:
                offset = value
            elif known and number == 5:
                slot = value
        elif wire_type == _GROUP and len(groups) < _MAX_DEPTH:
            groups.append(number)
        elif wire_type == _END_GROUP and groups and groups[-1] == number:
            groups.pop()
        elif wire_type in (_FIXED32, _FIXED64):
            begin, at = at, at + (4 if wire_type == _FIXED32 else 8)
            if known and number == 4 and wire_type == _FIXED64:
                digest = int.from_bytes(message[begin:at], "little")
        else:
            raise WireError("the chunk is not protobuf: its groups are not closed in order")
    if at > len(message) or groups:
        raise WireError(f"the chunk is truncated: a field goes beyond its {len(message)} bytes")
    header, tree = (bytes(embedded[n]) if n in embedded else None for n in (1, 2))
    return Chunk(header, tree, offset, digest, start, size, slot)
