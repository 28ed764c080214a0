"""Layouts: the tree information of a frame."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.trees import Path, Tree, check_paths, dtype_from_number, nest, path_name
from juggler.runtime.wire.v1.tensors_pb2 import ArrayInfo, TreeInfo

#: Payload bytes of the largest frame that a reader accepts by default. A frame with one chunk needs
#: no memory beyond its message. A frame with several needs memory for its payload, which the system
#: provides as the bytes arrive. Arrays that the sender did not align are copied, which takes their
#: size again.
MOST_PAYLOAD_BYTES = 1 << 30


class _ArraySpec(NamedTuple):
    """One array of a frame, known to lie within the payload."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # 0 if the array is empty
    size: int  # bytes


class TreeLayout(NamedTuple):
    """Checked tree information."""

    specs: list[_ArraySpec]
    bools: list[int]  # indices of the arrays of bools
    empty_branches: list[Path]
    payload_size: int


#: Limits of a tree: its arrays; dimensions of an array, and keys in a path.
_MOST_ARRAYS, _DEEPEST = 4096, 32
_LONGEST_GAP = 64  # bytes between two arrays of a payload

_MOST_KEPT, _LARGEST_KEPT = 512, 4096  # layouts; bytes of the tree information of one


def layout_of(tree: bytes, most_bytes: int = MOST_PAYLOAD_BYTES) -> TreeLayout:
    """Read a tree's layout once, for batches of equal segment counts."""
    return (_kept_layout if len(tree) <= _LARGEST_KEPT else _read_layout)(tree, most_bytes)


def _read_layout(encoded: bytes, most_bytes: int) -> TreeLayout:
    """Check a frame's tree information.

    Memory is allocated only afterwards.
    """
    try:
        info = TreeInfo.FromString(encoded)
    except DecodeError as error:
        raise WireError(f"the tree information is not a TreeInfo message: {error}") from error
    size = info.payload_size
    if size > most_bytes:
        raise WireError(f"a payload of {size} bytes is over the limit, {most_bytes}")
    # First, since products of many dimensions and paths of many keys cost time and the stack.
    if (count := len(info.arrays) + len(info.empty_branches)) > _MOST_ARRAYS:
        raise WireError(f"a tree of {count} arrays is over the limit, {_MOST_ARRAYS}")
    keys = [*(each.path for each in info.arrays), *(each.keys for each in info.empty_branches)]
    deepest = max([*map(len, keys), *(len(each.shape) for each in info.arrays)], default=0)
    if deepest > _DEEPEST:
        raise WireError(f"{deepest} dimensions, or keys in a path, are over the limit, {_DEEPEST}")
    specs = [_read_spec(array, size) for array in info.arrays]
    # Arrays fill the payload, except for the bytes that align them.
    used = sum(spec.size for spec in specs)
    if not used <= size <= used + _LONGEST_GAP * (len(specs) + 1):
        raise WireError(f"a payload of {size} bytes has arrays of {used} bytes")
    empty = [tuple(branch.keys) for branch in info.empty_branches]
    check_paths([*(spec.path for spec in specs), *empty])
    bools = [n for n, spec in enumerate(specs) if spec.dtype.kind == "b" and spec.size]
    return TreeLayout(specs, bools, empty, size)


_kept_layout = lru_cache(_MOST_KEPT)(_read_layout)


def _read_spec(array: ArrayInfo, payload_size: int) -> _ArraySpec:
    path, shape = tuple(array.path), tuple(array.shape)
    dtype = dtype_from_number(array.dtype)
    size = math.prod(shape) * dtype.itemsize
    end = array.offset + size
    if end > payload_size:
        name = path_name(path)
        raise WireError(f"{name} ends at byte {end} of a payload of {payload_size} bytes")
    return _ArraySpec(path, dtype, shape, array.offset if size else 0, size)


def read_tree(layout: TreeLayout, payload: memoryview) -> Tree:
    """Return the tree in a read-only payload.

    Aligned arrays are views of the payload.
    """
    arrays: list[tuple[Path, NDArray[Any]]] = []
    for path, dtype, shape, offset, _ in layout.specs:
        try:
            array: NDArray[Any] = np.ndarray(shape, dtype, payload, offset)  # shape
        except (ValueError, OverflowError) as error:  # NumPy limits dimensions, even of no elements
            raise WireError(f"{path_name(path)} cannot have the shape {shape}: {error}") from error
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        arrays.append((path, array))
    for number in layout.bools:
        # NumPy's behaviour is undefined for bools with other values.
        path, array = arrays[number]
        if array.view(np.uint8).max() > 1:
            raise WireError(f"{path_name(path)} is bool but has bytes other than 0 and 1")
    return nest(arrays, layout.empty_branches)
