"""Layouts: the tree information of a frame."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.trees import Path, Skeleton, Tree, dtype_from_number, path_name
from juggler.runtime.wire.v1.tensors_pb2 import ArrayInfo, TreeInfo

_LONGEST_GAP = 64  # bytes before or after an array, on average: room for any alignment


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest frame that a reader accepts from any sender.

    A frame with one chunk needs no memory beyond its message. A frame with several needs memory
    for its payload, which the system provides as the bytes arrive. Arrays that the sender did not
    align are copied, which takes their size again. Parsing header and tree information briefly
    needs up to thirty times their size.
    """

    payload_bytes: int = 1 << 30
    arrays: int = 4096  # including empty branches
    depth: int = 16  # keys of a path
    rank: int = 16  # dimensions of an array
    header_bytes: int = 1 << 20  # for the header, and as many for the tree information


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
    skeleton: Skeleton
    payload_size: int


_MOST_KEPT, _LARGEST_KEPT = 512, 4096  # layouts; bytes of the tree information of one


def layout_of(tree: bytes, limits: Limits) -> TreeLayout:
    """Read a tree's layout once, for batches of equal segment counts."""
    return (_kept_layout if len(tree) <= _LARGEST_KEPT else _read_layout)(tree, limits)


def _read_layout(encoded: bytes, limits: Limits) -> TreeLayout:
    """Check a frame's tree information.

    Memory is allocated only afterwards.
    """
    try:
        info = TreeInfo.FromString(encoded)
    except DecodeError as error:
        raise WireError(f"the tree information is not a TreeInfo message: {error}") from error
    size, count = info.payload_size, len(info.arrays) + len(info.empty_branches)
    if size > limits.payload_bytes:
        raise WireError(f"a payload of {size} bytes is over the limit, {limits.payload_bytes}")
    if count > limits.arrays:
        raise WireError(f"a tree of {count} arrays is over the limit, {limits.arrays}")
    # Limits come before work that grows with the number of arrays.
    specs = [_read_spec(array, size, limits) for array in info.arrays]
    empty = [tuple(branch.keys) for branch in info.empty_branches]
    paths = [*(spec.path for spec in specs), *empty]
    if (depth := max(map(len, paths), default=0)) > limits.depth:
        raise WireError(f"a tree of depth {depth} is over the limit, {limits.depth}")
    skeleton = Skeleton([spec.path for spec in specs], empty)
    end = 0
    for spec in sorted(specs, key=attrgetter("offset")):
        if spec.size and spec.offset < end:
            raise WireError(f"the bytes of {path_name(spec.path)} overlap another array's")
        end = max(end, spec.offset + spec.size)
    # Views of arrays keep the whole payload alive, but memory limits count arrays.
    used = sum(spec.size for spec in specs)
    if size > used + _LONGEST_GAP * (len(specs) + 1):
        raise WireError(f"a payload of {size} bytes has arrays of only {used}")
    bools = [n for n, spec in enumerate(specs) if spec.dtype.kind == "b" and spec.size]
    return TreeLayout(specs, bools, skeleton, size)


_kept_layout = lru_cache(_MOST_KEPT)(_read_layout)


def _read_spec(array: ArrayInfo, payload_size: int, limits: Limits) -> _ArraySpec:
    path, shape = tuple(array.path), tuple(array.shape)
    if len(shape) > limits.rank:
        raise WireError(f"{path_name(path)} has {len(shape)} dimensions, limit {limits.rank}")
    dtype = dtype_from_number(array.dtype)
    size = math.prod(shape) * dtype.itemsize
    end = array.offset + size
    if end > payload_size:
        name = path_name(path)
        raise WireError(f"{name} ends at byte {end} of a payload of {payload_size} bytes")
    # NumPy cannot make an array with huge dimensions, even if it has no elements.
    if not size and math.prod(n or 1 for n in shape) * dtype.itemsize > limits.payload_bytes:
        raise WireError(f"{path_name(path)} has no elements, but the huge shape {shape}")
    return _ArraySpec(path, dtype, shape, array.offset if size else 0, size)


def read_tree(layout: TreeLayout, payload: memoryview) -> Tree:
    """Return the tree in a read-only payload.

    Aligned arrays are views of the payload.
    """
    arrays: list[NDArray[Any]] = []
    for _, dtype, shape, offset, _ in layout.specs:
        array: NDArray[Any] = np.ndarray(shape, dtype, payload, offset)  # shape
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        arrays.append(array)
    for number in layout.bools:
        # NumPy's behaviour is undefined for bools with other values.
        if arrays[number].view(np.uint8).max() > 1:
            name = path_name(layout.specs[number].path)
            raise WireError(f"{name} is bool but has bytes other than 0 and 1")
    return layout.skeleton.fill(arrays)
