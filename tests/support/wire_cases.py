"""Trees, and helpers for the tests of the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from juggler.runtime.wire.frames import Frame, FrameReader
from juggler.runtime.wire.layouts import MOST_PAYLOAD_BYTES
from juggler.runtime.wire.trees import Tree, leaves
from juggler.runtime.wire.v1.episodes_pb2 import BatchHeader
from juggler.runtime.wire.v1.training_pb2 import WeightsVersion

HEADER = BatchHeader(batch_id=7, envrunner="envrunner-0", version=WeightsVersion(update=3))

DTYPES = [
    *(np.dtype(code) for code in ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]),
    *(np.dtype(code) for code in ["f2", "f4", "f8", ml_dtypes.bfloat16]),
    *(np.dtype(code) for code in [">i2", ">u4", ">i8", ">f2", ">f4", ">f8"]),
]


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    """Any dtype, bytes, shape and memory layout."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    seed = draw(st.integers(0, 2**32 - 1))
    size = int(np.prod(shape)) * dtype.itemsize
    content = np.random.default_rng(seed).integers(0, 256, size, np.uint8)  # [size]
    if dtype == np.bool_:
        content %= 2
    array = content.view(dtype).reshape(shape)  # shape
    layout = draw(st.sampled_from(["C", "F", "reversed", "strided", "broadcast"]))
    if layout == "F":
        return array.copy(order="F")
    if layout == "reversed":
        return array[(..., *[slice(None, None, -1)] * array.ndim)]
    if layout == "strided":
        return array[(..., *[slice(None, None, 2)] * array.ndim)]
    if layout == "broadcast":
        return np.broadcast_to(array, (3, *shape))
    return array


keys = st.text(max_size=6)
trees: st.SearchStrategy[Any] = st.recursive(
    arrays(), lambda inner: st.dictionaries(keys, inner, max_size=4), max_leaves=8
)


def feed_all(
    messages: list[bytes],
    most_bytes: int = MOST_PAYLOAD_BYTES,
    reader: FrameReader[BatchHeader] | None = None,
) -> Frame[BatchHeader] | None:
    """A reader's result for the last message, after all before it."""
    reader = reader or FrameReader(BatchHeader, most_bytes)
    frame = None
    for message in messages:
        frame = reader.feed(message)
    return frame


def assert_same(left: Tree, right: Tree) -> None:
    """The same keys, dtypes (but for the byte order), shapes and bytes."""
    if isinstance(left, Mapping) or isinstance(right, Mapping):
        assert isinstance(left, Mapping)
        assert isinstance(right, Mapping)
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    else:
        dtype = left.dtype.newbyteorder("<")
        assert right.dtype == dtype
        assert right.shape == left.shape
        assert right.tobytes() == left.astype(dtype).tobytes()


def nbytes(tree: Tree) -> int:
    """Of all arrays together."""
    return sum(array.nbytes for _, array in leaves(tree) if array is not None)
