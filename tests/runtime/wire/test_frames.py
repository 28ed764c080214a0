"""Frames survive the round trip, and broken ones are refused."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wire_cases import HEADER, assert_same, feed_all, trees

from juggler.runtime.wire import frames, layouts
from juggler.runtime.wire.chunks import read_chunk, write_chunk
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import MAX_MESSAGE_BYTES, FrameReader, encode_frame
from juggler.runtime.wire.trees import Tree, dtype_from_number, dtype_to_number, leaves
from juggler.runtime.wire.v1.episodes_pb2 import BatchHeader
from juggler.runtime.wire.v1.tensors_pb2 import ArrayInfo, DType, TreeInfo
from juggler.runtime.wire.v1.tensors_pb2 import Path as EmptyPath

chunk_sizes = st.sampled_from([1, 5, 16, 100, 1 << 20])
LARGE: Tree = {"a": np.arange(1 << 20, dtype=np.float32)}  # 4 MiB


@given(trees, chunk_sizes, st.booleans())
def test_every_tree_survives_the_round_trip(tree: Any, chunk_bytes: int, digest: bool) -> None:
    messages = list(encode_frame(HEADER, tree, digest=digest, chunk_bytes=chunk_bytes))
    frame = feed_all(messages)
    assert frame is not None
    assert frame.header == HEADER
    assert_same(tree, frame.tree)
    assert_fit_for_use(frame.tree)


def assert_fit_for_use(tree: Tree) -> None:
    """Aligned, and protected from being written to by accident."""
    for _, array in leaves(tree):
        assert array is None or (array.flags.aligned and not array.flags.writeable)


@given(trees, chunk_sizes)
def test_chunks_hold_the_arrays_of_a_tree_in_order_and_aligned(tree: Any, chunk_bytes: int) -> None:
    messages = list(encode_frame(HEADER, tree, chunk_bytes=chunk_bytes))
    chunks = [read_chunk(message) for message in messages]
    assert chunks[0].header == HEADER.SerializeToString()
    assert not any(chunk.header or chunk.tree for chunk in chunks[1:])
    payload = b""
    for chunk, message in zip(chunks, messages, strict=True):
        assert chunk.offset == len(payload)
        assert chunk.start % 16 == 0
        payload += message[chunk.start :]
    info = TreeInfo.FromString(chunks[0].tree)
    assert len(payload) == info.payload_size
    written = [(path, array) for path, array in leaves(tree) if array is not None]
    assert [tuple(array.path) for array in info.arrays] == [path for path, _ in written]
    for place, (_, array) in zip(info.arrays, written, strict=True):
        dtype = dtype_from_number(place.dtype)
        raw = payload[place.offset : place.offset + array.nbytes]
        assert_same(array, np.frombuffer(raw, dtype).reshape(tuple(place.shape)))
        assert place.offset % 16 == 0


def pack(tree: Any, gap: int) -> tuple[TreeInfo, bytes]:
    """A tree as another writer might encode it, without alignment."""
    info, payload = TreeInfo(), b""
    for path, array in leaves(tree):
        if array is None:
            info.empty_branches.add(keys=path)
            continue
        payload += b"?" * gap
        number = dtype_to_number(array.dtype)
        info.arrays.add(path=path, dtype=number, shape=array.shape, offset=len(payload))
        payload += array.astype(dtype_from_number(number)).tobytes()
    info.payload_size = len(payload)
    return info, payload


def chunk(
    payload: bytes = b"",
    offset: int = 0,
    header: bytes = b"",
    tree: TreeInfo | None = None,
    digest: bool = False,
) -> bytes:
    """A chunk as another writer might make it."""
    info = b"" if tree is None else tree.SerializeToString()
    share = [memoryview(payload)]
    return write_chunk(share, offset=offset, header=header, tree=info, digest=digest)


@given(trees, st.integers(0, 3), st.integers(1, 40))
def test_frames_without_alignment_are_read(tree: Any, gap: int, chunk_bytes: int) -> None:
    info, payload = pack(tree, gap)
    messages = [chunk(payload[:chunk_bytes], 0, HEADER.SerializeToString(), info)]
    later = range(chunk_bytes, len(payload), chunk_bytes)
    messages += [chunk(payload[offset : offset + chunk_bytes], offset) for offset in later]
    frame = feed_all(messages)
    assert frame is not None
    assert frame.header == HEADER
    assert_same(tree, frame.tree)
    assert_fit_for_use(frame.tree)


def test_an_array_is_copied_once_when_written_and_not_at_all_when_read() -> None:
    tracemalloc.start()
    try:
        (message,) = encode_frame(HEADER, LARGE, chunk_bytes=4 << 20)
        assert tracemalloc.get_traced_memory()[1] < len(message) + 65_536
        tracemalloc.reset_peak()
        frame = FrameReader(BatchHeader).feed(message)
        assert tracemalloc.get_traced_memory()[1] < len(message) + 65_536
    finally:
        tracemalloc.stop()
    assert frame is not None
    assert_same(LARGE, frame.tree)


def test_a_chunk_has_as_many_bytes_as_asked_for_and_fits_a_message() -> None:
    messages = list(encode_frame(HEADER, LARGE, chunk_bytes=3 << 20))
    sizes = [read_chunk(message).size for message in messages]
    assert sizes == [3 << 20, 1 << 20]
    assert all(len(message) < MAX_MESSAGE_BYTES for message in messages)


def test_information_that_fits_no_message_is_refused_before_it_is_sent() -> None:
    header = BatchHeader(envrunner="x" * MAX_MESSAGE_BYTES)
    with pytest.raises(WireError, match="do not fit"):
        encode_frame(header, {})
    with pytest.raises(ValueError, match="positive"):
        encode_frame(HEADER, {}, chunk_bytes=0)


@pytest.mark.parametrize("dtype", ["complex64", "datetime64[s]", "O", "U3", "longdouble", "i4,f4"])
def test_a_dtype_that_cannot_be_sent_is_named(dtype: str) -> None:
    with pytest.raises(WireError, match="cannot be sent") as caught:
        encode_frame(HEADER, {"a": np.zeros(2, dtype)})
    assert str(np.dtype(dtype)) in str(caught.value)


# Trees that came before, and limits.


LAYOUTS_HEADER = BatchHeader(batch_id=1)


def read(array: Any, most_bytes: int = 1 << 30) -> Any:
    (message,) = encode_frame(LAYOUTS_HEADER, {"a": array})
    frame = FrameReader(BatchHeader, most_bytes).feed(message)
    assert frame is not None
    return frame.tree


def test_a_tree_that_came_before_is_compared_with_the_limits_of_whoever_reads_it_now() -> None:
    assert len(read(np.zeros(100))["a"]) == 100
    with pytest.raises(WireError, match="payload"):
        read(np.zeros(100), 799)
    assert len(read(np.zeros(100))["a"]) == 100


def test_however_many_different_trees_come_few_are_remembered_and_all_are_read() -> None:
    for size in range(layouts._MOST_KEPT + 2):
        np.testing.assert_array_equal(read(np.arange(size))["a"], np.arange(size))
    assert layouts._kept_layout.cache_info().currsize == layouts._MOST_KEPT


def test_a_large_tree_is_not_remembered() -> None:
    before = layouts._kept_layout.cache_info()
    many = {f"array {number}": np.zeros(1) for number in range(400)}
    assert read(many)["a"].keys() == many.keys()
    assert layouts._kept_layout.cache_info() == before


def test_however_many_trees_are_sent_the_forms_that_are_kept_have_a_limit() -> None:
    frames.lay_out({"x" * (1 << 20): np.zeros(1)})
    for number in range(frames._MOST_FORMS + 2):
        frames.lay_out({f"{number}": np.zeros(1)})
        assert len(frames._forms) <= frames._MOST_FORMS
    assert all(len(form.tree) <= frames._LARGEST_KEPT for form in frames._forms.values())


# Broken chunks: one clear error, and no memory beyond the limits.


TREE: Tree = {
    "default": {
        "observations": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "live": np.array([True, False, True]),
        "final_rows": np.zeros(0, np.int32),
        "empty": {},
    },
    "scalar": np.array(3, np.uint64),
}
MOST_BYTES = 4096
ONE_CHUNK = list(encode_frame(HEADER, TREE, digest=False))
MANY_CHUNKS = list(encode_frame(HEADER, TREE, digest=False, chunk_bytes=33))
U8 = DType.DTYPE_UINT8


@pytest.mark.parametrize("frame", [ONE_CHUNK, MANY_CHUNKS], ids=["one chunk", "many chunks"])
def test_a_frame_truncated_at_any_byte_is_never_read(frame: list[bytes]) -> None:
    for end in range(len(frame[0])):
        reader = FrameReader(BatchHeader, MOST_BYTES)
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
    "33 dimensions, or keys in a path": one_array(shape=[1] * 33),
    "3000 dimensions, or keys": one_array(shape=[2**62] * 3000),
    "1100 dimensions, or keys": one_array(path=["a"] * 1100),
    "40 dimensions, or keys": TreeInfo(empty_branches=[EmptyPath(keys=["a"] * 40)]),
    "4097 arrays": TreeInfo(arrays=[array(str(n), size=0) for n in range(4097)]),
    "8 bytes has arrays of 12": two_arrays(array("a", size=8), array("b", offset=4, size=4)),
    "200 bytes has arrays of 8": TreeInfo(arrays=[array("a", size=8)], payload_size=200),
    "no dtype is given": one_array(dtype=0),
    "number 14 is not known": one_array(dtype=14),
    "ends at byte 9 ": one_array(shape=[9]),
    "ends at byte 12 ": one_array(offset=4),
    "ends at byte 18446744073709551616 ": one_array(shape=[2**32, 2**32]),
    "ends at byte 18446744073709551615 ": one_array(shape=[0], offset=2**64 - 1),
    "cannot have the shape (0, ": one_array(shape=[0, 2**63, 2**63]),
    "'a' twice": two_arrays(array("a"), array("a", offset=1)),
    "'a' both": two_arrays(array("a", "b"), array("a", offset=1)),
    "neither": TreeInfo(payload_size=8),
    "other than 0 and 1": one_array(dtype=DType.DTYPE_BOOL),
}


@pytest.mark.parametrize("cut", [8, 3], ids=["one chunk", "two chunks"])
@pytest.mark.parametrize("complaint", BAD_TREES)
def test_a_tree_that_cannot_be_is_refused(complaint: str, cut: int) -> None:
    payload = b"\x02" * 8
    chunks = [chunk(payload[:cut], header=HEADER.SerializeToString(), tree=BAD_TREES[complaint])]
    chunks += [chunk(payload[cut:], cut)] if cut < 8 else []
    reader = FrameReader(BatchHeader, MOST_BYTES)
    with pytest.raises(WireError, match=re.escape(complaint)):
        feed_all(chunks, reader=reader)
    frame = reader.feed(ONE_CHUNK[0])  # the reader goes on with the next frame
    assert frame is not None
    assert_same(TREE, frame.tree)


def changed(message: bytes, **fields: Any) -> bytes:
    """A chunk with other fields."""
    found = read_chunk(message)
    same = {"offset": found.offset, "header": found.header, "tree": found.tree}
    return write_chunk([memoryview(message[found.start :])], **{**same, **fields})


BAD_STREAMS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "first chunk of a frame must have": lambda chunks: chunks[1:2],
    "wrong offset 66, after 33 of": lambda chunks: [chunks[0], chunks[2]],
    "wrong offset 33, after 66 of": lambda chunks: [*chunks[:2], chunks[1]],
    "wrong offset 5, after 0 of": lambda chunks: [changed(ONE_CHUNK[0], offset=5)],
    "new frame began": lambda chunks: [*chunks[:2], chunks[0]],
    "without payload": lambda chunks: [chunks[0], chunk(offset=33)],
    "is too large, after 33 of": lambda chunks: [chunks[0], chunk(bytes(4000), 33)],
    "not a BatchHeader": lambda chunks: [changed(chunks[0], header=b"\xff")],
    "not a TreeInfo": lambda chunks: [changed(chunks[0], tree=b"\xff")],
    "is truncated": lambda chunks: [chunks[0], b"\xff" * 10],
    "bytes instead of": lambda chunks: [chunks[0] + b"x"],
    "a chunk has 40 bytes instead": lambda chunks: [chunks[0], b"\xff" * 40],
    "does not match its digest": lambda chunks: [
        chunks[0],
        chunk(bytes(33), 33, digest=True)[:-1] + b"x",
    ],
}


@pytest.mark.parametrize("complaint", BAD_STREAMS)
def test_chunks_that_do_not_follow_each_other_are_refused(complaint: str) -> None:
    messages = BAD_STREAMS[complaint](MANY_CHUNKS)
    reader = FrameReader(BatchHeader, MOST_BYTES)
    assert [reader.feed(message) for message in messages[:-1]] == [None] * (len(messages) - 1)
    with pytest.raises(WireError, match=complaint):
        reader.feed(messages[-1])
    assert feed_all(MANY_CHUNKS, reader=reader) is not None  # it goes on with the next frame


@pytest.mark.parametrize("chunk_bytes", [50, 1 << 20])
def test_a_digest_finds_a_flipped_bit_of_the_payload(chunk_bytes: int) -> None:
    messages = list(encode_frame(HEADER, TREE, digest=True, chunk_bytes=chunk_bytes))
    assert feed_all(messages) is not None
    for number, message in enumerate(messages):
        for at in range(read_chunk(message).start, len(message)):
            damaged = message[:at] + bytes([message[at] ^ 4]) + message[at + 1 :]
            with pytest.raises(WireError, match="digest"):
                feed_all([*messages[:number], damaged])


def test_a_reader_that_needs_digests_refuses_a_chunk_without_one() -> None:
    reader = FrameReader(BatchHeader, digests=True)
    assert reader.feed(next(encode_frame(HEADER, TREE, digest=True))) is not None
    with pytest.raises(WireError, match="without its digest"):
        reader.feed(next(encode_frame(HEADER, TREE)))


def test_a_chunk_that_refers_to_shared_memory_has_no_payload_of_its_own() -> None:
    info = one_array().SerializeToString()
    reader = FrameReader(BatchHeader, lease=lambda slot, size: memoryview(bytes(size)))
    for fields in {"share": [memoryview(b"x")]}, {"offset": 1}:
        with pytest.raises(WireError, match="shared memory, which this stream does not share"):
            reader.feed(write_chunk(tree=info, slot=0, **fields))
    assert reader.feed(write_chunk(tree=info, slot=0)) is not None


def peak_bytes(most_bytes: int, info: TreeInfo, share: int) -> int:
    """A reader's peak memory for the first chunk of a frame."""
    message = chunk(bytes(share), header=HEADER.SerializeToString(), tree=info)
    reader = FrameReader(BatchHeader, most_bytes)
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
    most_bytes = 1 << 20
    small = 1 << 16
    for size in (1 << 20) + 1, 1 << 40, 2**64 - 1:
        whole = ArrayInfo(path=["a"], dtype=U8, shape=[size])
        assert peak_bytes(most_bytes, TreeInfo(arrays=[whole], payload_size=size), 100) < small
    # Within the limit, but no tree: refused before memory is taken.
    for second in array("a", offset=9), array("a", "b", offset=9):
        bad = TreeInfo(arrays=[array("a", size=9), second], payload_size=1 << 20)
        assert peak_bytes(most_bytes, bad, 100) < small
    good = TreeInfo(arrays=[array("a", size=1 << 20)], payload_size=1 << 20)
    assert 1 << 20 <= peak_bytes(most_bytes, good, 100) < (1 << 20) + small


def test_memory_that_is_not_there_is_a_wire_error() -> None:
    size = 1 << 62
    info = TreeInfo(arrays=[array("a", size=size)], payload_size=size)
    message = chunk(b"x", header=HEADER.SerializeToString(), tree=info)
    with pytest.raises(WireError, match="too little memory"):
        feed_all([message], size)
