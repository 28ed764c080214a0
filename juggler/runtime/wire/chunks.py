"""Chunks: the messages that carry frames on a stream.

`tensors.proto` describes their bytes. They are not protobuf: the classes that protobuf generates
would copy the payload once or twice on each side.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import xxhash
from numpy.typing import NDArray

from juggler.runtime.wire.errors import WireError

#: The payload begins at a multiple of this within its message. CPython also aligns the data of a
#: bytes object like this, so arrays can be views of the message.
ALIGNMENT = 16

# Sizes of header, tree information and share; slot, whether there is a digest, digest, and offset.
_FIELDS = struct.Struct("<IIQi?QQ")
_NO_SLOT = -1
_PADDING = bytes(ALIGNMENT)

#: Bytes in memory, in the order of their addresses.
Piece: TypeAlias = "memoryview | NDArray[Any]"


class Chunk(NamedTuple):
    """The fields of a chunk."""

    header: bytes
    tree: bytes  # tree information; b"": not the first chunk of a frame
    offset: int  # offset of the chunk's share in the payload
    digest: int | None
    start: int  # start of the share in the message
    size: int  # size of the share
    slot: int | None  # of the shared memory with the payload


def digest_of(share: Iterable[Piece]) -> int:
    """The 64-bit XXH3 digest of a chunk's payload."""
    digest = xxhash.xxh3_64()
    piece: Any
    for piece in share:
        digest.update(piece)
    return digest.intdigest()


def write_chunk(
    share: Sequence[Piece] = (),
    *,
    offset: int = 0,
    header: bytes = b"",
    tree: bytes = b"",
    digest: bool = False,
    slot: int = _NO_SLOT,
) -> bytes:
    """Serialize a chunk.

    Args:
        share: pieces of the payload; they are copied once.
        offset: offset of the share in the payload.
        header: serialized header; only the first chunk of a frame has it, and `tree`.
        digest: whether the chunk carries the digest of its share.
        slot: of the shared memory with the whole payload, if it is not in the chunk.
    """
    size = sum(piece.nbytes for piece in share)
    of_share = digest_of(share) if digest else 0
    fields = _FIELDS.pack(len(header), len(tree), size, slot, digest, of_share, offset)
    padding = _PADDING[: -(len(fields) + len(header) + len(tree)) % ALIGNMENT]
    parts: list[Any] = [fields, header, tree, padding, *share]
    return b"".join(parts)


def read_chunk(message: bytes) -> Chunk:
    """Find the fields of a chunk.

    Raises:
        WireError: the message is truncated, or not a chunk.
    """
    try:
        header, tree, size, slot, has_digest, digest, offset = _FIELDS.unpack_from(message)
    except struct.error as error:
        raise WireError(f"a chunk of {len(message)} bytes is truncated") from error
    tree_at = _FIELDS.size + header
    end = tree_at + tree
    start = end + -end % ALIGNMENT
    if start + size != len(message):
        raise WireError(f"a chunk has {len(message)} bytes instead of {start + size}")
    # The payload is only located: it may be large, and must not be copied.
    return Chunk(
        message[_FIELDS.size : tree_at],
        message[tree_at:end],
        offset,
        digest if has_digest else None,
        start,
        size,
        None if slot == _NO_SLOT else slot,
    )
