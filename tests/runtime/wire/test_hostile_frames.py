"""Broken chunks: one clear error, and no memory beyond the limits."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.wire_cases import HEADER, assert_same, feed_all

from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1.episodes_pb2 import BatchHeader, EpisodeChunk
from juggler.runtime.wire.v1.tensors_pb2 import ArrayInfo, DType, TreeInfo

TREE: Tree = {
    "default": {
        "observations": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "live": np.array([True, False, True]),
        "final_rows": np.zeros(0, np.int32),
        "empty": {},
    },
    "scalar": np.array(3, np.uint64),
}
LIMITS = Limits(payload_bytes=4096, header_bytes=4096, arrays=8, depth=4, rank=4)
ONE_CHUNK = list(encode_frame(HEADER, TREE, digest=False))
MANY_CHUNKS = list(encode_frame(HEADER, TREE, digest=False, chunk_bytes=33))
U8 = DType.DTYPE_UINT8


@pytest.mark.parametrize("frame", [ONE_CHUNK, MANY_CHUNKS], ids=["one chunk", "many chunks"])
def test_a_frame_truncated_at_any_byte_is_never_read(frame: list[bytes]) -> None:
    for end in range(len(frame[0])):
        reader = FrameReader(BatchHeader, LIMITS)
        try:
            assert reader.feed(frame[0][:end]) is None  # it ends before the payload
        except WireError:
            continue
        with pytest.raises(WireError):
            feed_all([*frame[1:], frame[0]], reader=reader)


def one_array(**changes: Any) -> TreeInfo:
    array = {"path": ["a"], "dtype": U8, "shape": [8], "offset": 0} | changes
    return TreeInfo(arrays=[ArrayInfo(**array)], payload_size=8)


def two_arrays(first: ArrayInfo, second: ArrayInfo) -> TreeInfo:
    return TreeInfo(arrays=[first, second], payload_size=8)


def array(*path: str, offset: int = 0, size: int = 1) -> ArrayInfo:
    return ArrayInfo(path=path, dtype=U8, shape=[size], offset=offset)


BAD_TREES: dict[str, TreeInfo] = {
    "over the limit, 4096": TreeInfo(arrays=[array("a")], payload_size=4097),
    "over the limit, 8": TreeInfo(arrays=[array(str(i)) for i in range(9)], payload_size=8),
    "over the limit, 4$": one_array(path=list("abcde")),
    "5 dimensions, limit 4": one_array(shape=[1] * 5),
    "no dtype is given": one_array(dtype=0),
    "number 14 is not known": one_array(dtype=14),
    "ends at byte 9 ": one_array(shape=[9]),
    "ends at byte 12 ": one_array(offset=4),
    "ends at byte 18446744073709551616 ": one_array(shape=[2**32, 2**32]),
    "ends at byte 18446744073709551615 ": one_array(shape=[0], offset=2**64 - 1),
    "huge shape": one_array(shape=[0, 2**63, 2**63]),
    "overlap": two_arrays(array("b", offset=3, size=4), array("a", size=4)),
    "'a' twice": two_arrays(array("a"), array("a", offset=1)),
    "'a' both": two_arrays(array("a", "b"), array("a", offset=1)),
    "neither": TreeInfo(payload_size=8),
    "other than 0 and 1": one_array(dtype=DType.DTYPE_BOOL),
}


@pytest.mark.parametrize("cut", [8, 3], ids=["one chunk", "two chunks"])
@pytest.mark.parametrize("complaint", BAD_TREES)
def test_a_tree_that_cannot_be_is_refused(complaint: str, cut: int) -> None:
    payload = b"\x02" * 8
    chunks = [EpisodeChunk(header=HEADER, tree=BAD_TREES[complaint], payload=payload[:cut])]
    chunks += [EpisodeChunk(offset=cut, payload=payload[cut:])] if cut < 8 else []
    reader = FrameReader(BatchHeader, LIMITS)
    with pytest.raises(WireError, match=complaint):
        feed_all([chunk.SerializeToString() for chunk in chunks], reader=reader)
    frame = reader.feed(ONE_CHUNK[0])  # the reader goes on with the next frame
    assert frame is not None
    assert_same(TREE, frame.tree)


def payload_of(message: bytes) -> bytes:
    return EpisodeChunk.FromString(message).payload


def without(*names: str) -> bytes:
    chunk = EpisodeChunk.FromString(ONE_CHUNK[0])
    for name in names:
        chunk.ClearField(name)
    return chunk.SerializeToString()


BAD_STREAMS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "first chunk of a frame must have": lambda chunks: chunks[1:2],
    "wrong offset 66, after 33 of": lambda chunks: [chunks[0], chunks[2]],
    "wrong offset 33, after 66 of": lambda chunks: [*chunks[:2], chunks[1]],
    "wrong offset 5, after 0 of": lambda chunks: [
        ONE_CHUNK[0] + EpisodeChunk(offset=5).SerializeToString()
    ],
    "new frame began": lambda chunks: [*chunks[:2], chunks[0]],
    "without payload": lambda chunks: [chunks[0], EpisodeChunk(offset=33).SerializeToString()],
    "is too large, after 33 of": lambda chunks: [
        chunks[0],
        EpisodeChunk(offset=33, payload=bytes(4000)).SerializeToString(),
    ],
    "must have a header": lambda chunks: [without("tree")],
    "and tree information": lambda chunks: [without("header")],
    "not a BatchHeader": lambda chunks: [b"\x0a\x01\xff" + chunks[0]],
    "not a TreeInfo": lambda chunks: [b"\x12\x01\xff" + chunks[0]],
    "over 4096 bytes": lambda chunks: [b"\x0a\x82\x20\x12\xff\x1f" + b"x" * 4095 + chunks[0]],
    "does not match its digest": lambda chunks: [
        chunks[0],
        chunks[1] + EpisodeChunk(digest=5).SerializeToString(),
    ],
}


@pytest.mark.parametrize("complaint", BAD_STREAMS)
def test_chunks_that_do_not_follow_each_other_are_refused(complaint: str) -> None:
    messages = BAD_STREAMS[complaint](MANY_CHUNKS)
    reader = FrameReader(BatchHeader, LIMITS)
    assert [reader.feed(message) for message in messages[:-1]] == [None] * (len(messages) - 1)
    with pytest.raises(WireError, match=complaint):
        reader.feed(messages[-1])
    assert feed_all(MANY_CHUNKS, reader=reader) is not None  # it goes on with the next frame


@pytest.mark.parametrize("chunk_bytes", [50, 1 << 20])
def test_a_digest_finds_a_flipped_bit_of_the_payload(chunk_bytes: int) -> None:
    messages = list(encode_frame(HEADER, TREE, digest=True, chunk_bytes=chunk_bytes))
    assert feed_all(messages) is not None
    for number, message in enumerate(messages):
        for at in range(message.index(payload_of(message)), len(message)):
            damaged = message[:at] + bytes([message[at] ^ 4]) + message[at + 1 :]
            with pytest.raises(WireError, match="digest"):
                feed_all([*messages[:number], damaged])


def test_a_reader_that_needs_digests_refuses_a_chunk_without_one() -> None:
    reader = FrameReader(BatchHeader, digests=True)
    assert reader.feed(next(encode_frame(HEADER, TREE, digest=True))) is not None
    with pytest.raises(WireError, match="without its digest"):
        reader.feed(next(encode_frame(HEADER, TREE)))


def peak_bytes(limits: Limits, info: TreeInfo, share: int) -> int:
    """A reader's peak memory for the first chunk of a frame."""
    chunk = EpisodeChunk(header=HEADER, tree=info, payload=bytes(share))
    message = chunk.SerializeToString()
    reader = FrameReader(BatchHeader, limits)
    tracemalloc.start()
    try:
        reader.feed(message)
    except WireError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def test_a_frame_takes_no_memory_beyond_the_limit_whatever_it_declares() -> None:
    limits = Limits(payload_bytes=1 << 20)
    small = 1 << 16
    for size in (1 << 20) + 1, 1 << 40, 2**64 - 1:
        whole = ArrayInfo(path=["a"], dtype=U8, shape=[size])
        assert peak_bytes(limits, TreeInfo(arrays=[whole], payload_size=size), 100) < small
    # Within the limit, but no tree: refused before memory is taken.
    for second in array("a", offset=9), array("b", offset=8), array("a", "b", offset=9):
        bad = TreeInfo(arrays=[array("a", size=9), second], payload_size=1 << 20)
        assert peak_bytes(limits, bad, 100) < small
    good = TreeInfo(arrays=[array("a", size=1 << 20)], payload_size=1 << 20)
    assert 1 << 20 <= peak_bytes(limits, good, 100) < (1 << 20) + small


def test_memory_that_is_not_there_is_a_wire_error() -> None:
    size = 1 << 62
    info = TreeInfo(arrays=[array("a", size=size)], payload_size=size)
    message = EpisodeChunk(header=HEADER, tree=info, payload=b"x").SerializeToString()
    with pytest.raises(WireError, match="too little memory"):
        feed_all([message], Limits(payload_bytes=size))
