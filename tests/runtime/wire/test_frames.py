"""Frames survive the round trip, also between ours and generated classes."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wire_cases import HEADER, assert_same, feed_all, trees

from juggler.runtime.wire import frames, layouts
from juggler.runtime.wire.chunks import read_varint
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import MAX_MESSAGE_BYTES, FrameReader, encode_frame
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.trees import Tree, dtype_from_number, dtype_to_number, leaves
from juggler.runtime.wire.v1.episodes_pb2 import BatchHeader, EpisodeChunk
from juggler.runtime.wire.v1.tensors_pb2 import TreeInfo

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
def test_our_frames_are_read_by_the_generated_classes(tree: Any, chunk_bytes: int) -> None:
    chunks = [
        EpisodeChunk.FromString(message)
        for message in encode_frame(HEADER, tree, chunk_bytes=chunk_bytes)
    ]
    assert chunks[0].header == HEADER
    assert not any(chunk.HasField("header") or chunk.HasField("tree") for chunk in chunks[1:])
    payload = b""
    for chunk in chunks:
        assert chunk.offset == len(payload)
        payload += chunk.payload
    info = chunks[0].tree
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


@given(trees, st.integers(0, 3), st.integers(1, 40), st.randoms(use_true_random=False))
def test_frames_of_the_generated_classes_are_read_in_any_field_order(
    tree: Any, gap: int, chunk_bytes: int, rng: random.Random
) -> None:
    info, payload = pack(tree, gap)
    messages = []
    for offset in range(0, max(len(payload), 1), chunk_bytes):
        parts = [
            EpisodeChunk(offset=offset),
            EpisodeChunk(padding=bytes(rng.randrange(9))),
            EpisodeChunk(payload=payload[offset : offset + chunk_bytes]),
        ]
        if offset == 0:
            parts.append(EpisodeChunk(header=HEADER, tree=TreeInfo(payload_size=len(payload))))
            parts.append(EpisodeChunk(tree=TreeInfo(empty_branches=info.empty_branches)))
            parts.append(EpisodeChunk(tree=TreeInfo(arrays=info.arrays)))
        rng.shuffle(parts)
        messages.append(b"".join(part.SerializeToString() for part in parts))
    frame = feed_all(messages)
    assert frame is not None
    assert frame.header == HEADER
    assert_same(tree, frame.tree)
    assert_fit_for_use(frame.tree)


def test_fields_of_a_later_version_are_skipped() -> None:
    (message,) = encode_frame(HEADER, {"a": np.arange(3)})
    unknown = (
        b"\xa0\x06\x96\x01"  # 100: number
        b"\xa1\x06"
        + bytes(8)
        + b"\xa5\x06"
        + bytes(4)  # 100: fixed widths
        + b"\xa2\x06\x03abc"  # 100: bytes
    )
    EpisodeChunk.FromString(unknown)  # is what it should be
    frame = feed_all([unknown + message + unknown])
    assert frame is not None
    assert_same({"a": np.arange(3)}, frame.tree)


def test_the_arrays_of_a_frame_of_one_chunk_are_views_of_its_message() -> None:
    (message,) = encode_frame(HEADER, {"a": np.arange(5), "b": {"c": np.ones((2, 3))}})
    frame = FrameReader(BatchHeader).feed(message)
    assert frame is not None
    assert isinstance(frame.tree, Mapping)
    for _, array in leaves(frame.tree):
        assert array is not None
        assert np.shares_memory(array, np.frombuffer(message, np.uint8))
        assert array.__array_interface__["data"][0] % 16 == 0


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
    sizes = [len(EpisodeChunk.FromString(message).payload) for message in messages]
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


def read(array: Any, limits: Limits = Limits()) -> Any:  # noqa: B008
    (message,) = encode_frame(LAYOUTS_HEADER, {"a": array})
    frame = FrameReader(BatchHeader, limits).feed(message)
    assert frame is not None
    return frame.tree


def test_a_tree_that_came_before_is_compared_with_the_limits_of_whoever_reads_it_now() -> None:
    assert len(read(np.zeros(100))["a"]) == 100
    with pytest.raises(WireError, match="payload"):
        read(np.zeros(100), Limits(payload_bytes=799))
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


def test_however_many_large_trees_are_sent_the_forms_that_are_kept_have_a_limit() -> None:
    for number in range(20):
        frames.lay_out({f"{number} {'x' * 900_000}": np.zeros(1)})
        kept = sum(len(form.tree) for form in frames._forms.values())
        assert kept == frames._kept <= frames._MOST_KEPT


def test_a_number_of_too_many_bytes_is_none() -> None:
    assert read_varint(b"\xff" * 9 + b"\x01", 0) == (2**64 - 1, 10)
    assert read_varint(b"\xff" * 9 + b"\x7f", 0) == (2**64 - 1, 10), "bits beyond are left out"
    with pytest.raises(WireError, match="no number at byte 0"):
        read_varint(b"\xff" * 10 + b"\x01", 0)
