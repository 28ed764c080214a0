"""Frames: a header and a tree of arrays, as chunks and back.

`tensors.proto` defines the terms. An array is copied once into a chunk. Arrays of a frame with a
single chunk are read without a copy. Between processes of one host, a payload may be in shared
memory, and the chunk only refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from juggler.runtime.wire.chunks import (
    ALIGNMENT,
    Chunk,
    Piece,
    digest_of,
    read_chunk,
    write_chunk,
)
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.layouts import MOST_PAYLOAD_BYTES, TreeLayout, layout_of, read_tree
from juggler.runtime.wire.trees import Path, Tree, dtype_from_number, dtype_to_number, leaves
from juggler.runtime.wire.v1.tensors_pb2 import TreeInfo

_ZEROS = memoryview(bytes(ALIGNMENT))
# A relay of weights lays out trees from a network, which may be larger than any model's.
_MOST_FORMS, _LARGEST_KEPT = 512, 64 << 10  # forms; bytes of the tree information of one
_forms: dict[tuple[Any, ...], TreeForm] = {}  # by what they depend on


class TreeForm(NamedTuple):
    """The common paths, dtypes, shapes and orders of trees."""

    tree: bytes  # serialized tree information
    size: int  # of the payload
    gaps: list[memoryview]  # zeros before each array
    converted: list[np.dtype[Any] | None]  # dtype to convert an array to, if any
    plain: list[bool]  # whether an array's memory can be read directly
    whole: bool  # whether the payload is just the arrays, unchanged


def lay_out(tree: Tree) -> tuple[TreeForm, list[Piece]]:
    """Return the form of a tree, and its payload in pieces.

    Raises:
        WireError: the tree has a value that cannot be sent.
    """
    found = leaves(tree)
    arrays = [array for _, array in found if array is not None]
    # Everything that the form depends on; hashing dtypes and shapes is cheaper than the form.
    marks = [None if a is None else (a.dtype, a.shape, a.flags.c_contiguous) for _, a in found]
    key = (*[path for path, _ in found], *marks)
    form = _forms.get(key)
    if form is None:
        form = _form(found)
        if len(form.tree) <= _LARGEST_KEPT:
            if len(_forms) >= _MOST_FORMS:
                _forms.clear()
            _forms[key] = form
    # Most trees have aligned, contiguous arrays, which are sent as they are.
    if form.whole:
        return form, [*arrays]
    pieces: list[Piece] = []
    for array, gap, little, plain in zip(
        arrays, form.gaps, form.converted, form.plain, strict=True
    ):
        if gap:
            pieces.append(gap)
        if little is not None:
            array = array.astype(little)
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        pieces.append(array if plain else bytes_of(array))
    return form, pieces


def bytes_of(piece: Piece) -> memoryview:
    """Return a contiguous array as bytes, without a copy."""
    array = np.asarray(piece)
    return array.reshape(-1).view(np.uint8).data


def _form(found: Sequence[tuple[Path, NDArray[Any] | None]]) -> TreeForm:
    info = TreeInfo()
    gaps: list[memoryview] = []
    converted: list[np.dtype[Any] | None] = []
    plain: list[bool] = []
    size, contiguous = 0, True
    for path, array in found:
        if array is None:
            info.empty_branches.add(keys=path)
            continue
        gaps.append(_ZEROS[: -size % ALIGNMENT])
        size += len(gaps[-1])
        number = dtype_to_number(array.dtype)
        info.arrays.add(path=path, dtype=number, shape=array.shape, offset=size)
        # Arrays are little-endian on the wire.
        little = dtype_from_number(number)
        converted.append(None if little == array.dtype else little)
        plain.append(little.kind in "biuf")  # not bfloat16, which Python does not know
        contiguous &= array.flags.c_contiguous
        size += array.nbytes
    info.payload_size = size
    whole = contiguous and all(plain) and not any(gaps) and all(to is None for to in converted)
    return TreeForm(info.SerializeToString(), size, gaps, converted, plain, whole)


#: Payload bytes in one chunk: many enough for a small cost per message, few enough for small
#: messages in memory.
DEFAULT_CHUNK_BYTES = 4 << 20

#: The limit on a gRPC message: a chunk of 4 MiB with its header and tree information fits.
MAX_MESSAGE_BYTES = 8 << 20

#: Copies a payload of this size into shared memory, and returns its slot; None: it is sent inline.
Place = Callable[[Sequence[Piece], int], int | None]
#: Returns the first bytes of the shared memory in a slot, read-only, valid while something refers
#: to them. Raises a WireError if there are none.
Lease = Callable[[int, int], memoryview]

H = TypeVar("H", bound=Message)


@dataclass(frozen=True, slots=True)
class Frame(Generic[H]):
    """A header and its tree. The arrays are read-only."""

    header: H
    tree: Tree


def encode_frame(
    header: Message,
    tree: Tree,
    *,
    digest: bool = False,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    place: Place | None = None,
) -> Iterator[bytes]:
    """Yield the serialized chunks of a frame, in the order of sending.

    The arrays are read during iteration, so do not change them before its end.

    Args:
        header: a message of the type of the chunk's field 1.
        digest: whether every chunk carries a digest.
        chunk_bytes: payload bytes in each chunk except the last.
        place: puts the payload into shared memory, if possible; called at once.

    Raises:
        WireError: the tree has a value that cannot be sent, or its information does not fit into a
            message.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
    form, pieces = lay_out(tree)
    encoded = header.SerializeToString()
    fields = len(encoded) + len(form.tree) + 64  # including sizes and padding
    if fields + min(chunk_bytes, form.size) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"{fields} bytes of header and tree information and a chunk of {chunk_bytes} bytes "
            f"do not fit into a message, whose limit is {MAX_MESSAGE_BYTES} bytes"
        )
    slot = None if place is None else place(pieces, form.size)
    if slot is not None:
        return iter((write_chunk(header=encoded, tree=form.tree, slot=slot),))
    return _chunks(encoded, form, pieces, chunk_bytes, digest)


def _chunks(
    header: bytes, form: TreeForm, pieces: list[Piece], chunk_bytes: int, digest: bool
) -> Iterator[bytes]:
    size = form.size
    fields: Mapping[str, Any] = {"header": header, "tree": form.tree}
    if size <= chunk_bytes:
        yield write_chunk(pieces, digest=digest, **fields)
        return
    # Chunks are full except the last one, across the borders of arrays.
    share: list[Piece] = []
    sent, room = 0, chunk_bytes
    for piece in map(bytes_of, pieces):
        while len(piece) > room:
            share.append(piece[:room])
            piece = piece[room:]
            yield write_chunk(share, offset=sent, digest=digest, **fields)
            fields, share = {}, []
            sent, room = sent + chunk_bytes, chunk_bytes
        share.append(piece)
        room -= len(piece)
    yield write_chunk(share, offset=sent, digest=digest, **fields)


class FrameReader(Generic[H]):
    """Joins the chunks of a stream to frames.

    Args:
        header_type: the type of field 1 of the chunks.
        most_bytes: payload bytes of the largest frame to accept.
        digests: whether a chunk without a digest is an error, unless its payload is in shared
            memory. Existing digests are always checked.
        lease: returns shared memory; None: no memory is shared with the sender.
    """

    def __init__(
        self,
        header_type: type[H],
        most_bytes: int = MOST_PAYLOAD_BYTES,
        *,
        digests: bool = False,
        lease: Lease | None = None,
    ) -> None:
        self._header_type = header_type
        self._most_bytes = most_bytes
        self._digests = digests
        self._lease = lease
        self._partial: _Partial[H] | None = None

    @property
    def unfinished_bytes(self) -> int:
        """Payload bytes of an incomplete frame that have arrived.

        0: no incomplete frame.
        """
        return 0 if self._partial is None else self._partial.received

    def feed(self, message: bytes) -> Frame[H] | None:
        """Return the frame that this chunk completes; None: more chunks must follow.

        The arrays of a frame with one chunk are views of `message`.

        Raises:
            WireError: the chunk is not the expected one, or its frame is over a limit. The frame
                is dropped; the next chunk must be the first of a new frame.
        """
        partial, self._partial = self._partial, None
        chunk = read_chunk(message)
        self._check_digest(chunk, message)
        if partial is None:
            header, layout = self._begin(chunk)
            if chunk.slot is not None:
                return Frame(header, self._read_shared(chunk.slot, chunk, layout))
            if chunk.offset == 0 and chunk.size == layout.payload_size:
                payload = memoryview(message)[chunk.start : chunk.start + chunk.size]
                return Frame(header, read_tree(layout, payload))
            partial = _Partial(header, layout)
        # Frames of one stream do not overlap.
        elif chunk.tree or chunk.slot is not None:
            raise WireError(f"a new frame began before the last one ended, {partial}")
        elif not chunk.size:
            raise WireError(f"a chunk without payload arrived in mid-frame, {partial}")
        if not partial.add(message, chunk):
            self._partial = partial
            return None
        payload = partial.payload.data.toreadonly()
        return Frame(partial.header, read_tree(partial.layout, payload))

    def _read_shared(self, slot: int, chunk: Chunk, layout: TreeLayout) -> Tree:
        if self._lease is None or chunk.size or chunk.offset:
            raise WireError("a payload in shared memory, which this stream does not share")
        return read_tree(layout, self._lease(slot, layout.payload_size))

    def _begin(self, chunk: Chunk) -> tuple[H, TreeLayout]:
        if not chunk.tree:
            raise WireError("the first chunk of a frame must have tree information")
        try:
            header = self._header_type.FromString(chunk.header)
        except DecodeError as error:
            name = self._header_type.DESCRIPTOR.name
            raise WireError(f"the header is not a {name} message: {error}") from error
        return header, layout_of(chunk.tree, self._most_bytes)

    def _check_digest(self, chunk: Chunk, message: bytes) -> None:
        if chunk.digest is None:
            if self._digests and chunk.slot is None:
                raise WireError("a chunk arrived without its digest")
            return
        share = memoryview(message)[chunk.start : chunk.start + chunk.size]
        if chunk.digest != digest_of([share]):
            raise WireError(
                "a chunk's payload does not match its digest: it was damaged in transit"
            )


class _Partial(Generic[H]):
    """A frame whose first chunks have arrived."""

    def __init__(self, header: H, layout: TreeLayout) -> None:
        self.header = header
        self.layout = layout
        self.received = 0
        try:
            self.payload = np.empty(layout.payload_size, np.uint8)
        except MemoryError as error:
            raise WireError(
                f"too little memory for a payload of {layout.payload_size} bytes"
            ) from error

    def add(self, message: bytes, chunk: Chunk) -> bool:
        """Copy the chunk's payload; return whether it was the last one."""
        end = chunk.offset + chunk.size
        if chunk.offset != self.received:
            raise WireError(f"a chunk has the wrong offset {chunk.offset}, {self}")
        if end > self.layout.payload_size:
            raise WireError(f"a chunk of {chunk.size} bytes is too large, {self}")
        share = np.frombuffer(message, np.uint8, chunk.size, chunk.start)
        self.payload[self.received : end] = share
        self.received = end
        return end == self.layout.payload_size

    def __str__(self) -> str:
        return f"after {self.received} of {self.layout.payload_size} bytes of payload"
