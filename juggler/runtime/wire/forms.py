"""Forms: where each array goes in the payload, worked out once for trees that are alike."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from juggler.runtime.wire.chunks import ALIGNMENT, Piece
from juggler.runtime.wire.dtypes import dtype_from_number, dtype_to_number
from juggler.runtime.wire.trees import Path, Tree, leaves
from juggler.runtime.wire.v1.tensors_pb2 import TreeInfo

_ZEROS = memoryview(bytes(ALIGNMENT))


class Form(NamedTuple):
    """What trees have in common whose arrays have the same paths, dtypes and shapes."""

    tree_info: bytes  # serialized
    gaps: list[memoryview]  # zeros before each array
    converted: list[np.dtype[Any] | None]  # what an array has to be converted to
    plain: list[bool]  # whether an array's memory can be read as it is
    whole: bool  # whether the payload is nothing but the arrays, as they are
    size: int  # of the payload


def lay_out(tree: Tree) -> tuple[Form, list[Piece]]:
    """The form of a tree, and its payload in pieces: arrays and the zeros between them.

    Raises:
        WireError: the tree holds what cannot be sent.
    """
    found = leaves(tree)
    form = _form(tuple([path if a is None else (path, a.dtype, a.shape) for path, a in found]))
    arrays = [array for _, array in found if array is not None]
    if form.whole and all([array.flags.c_contiguous for array in arrays]):
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
    """A contiguous array as bytes, without a copy."""
    array = np.asarray(piece)
    return array.reshape(-1).view(np.uint8).data


@lru_cache(maxsize=1024)
def _form(leaves: tuple[Path | tuple[Path, np.dtype[Any], tuple[int, ...]], ...]) -> Form:
    """Args:
    leaves: path, dtype and shape of each array, and the path alone of an empty branch.
    """
    info = TreeInfo()
    gaps: list[memoryview] = []
    converted: list[np.dtype[Any] | None] = []
    plain: list[bool] = []
    size = 0
    for leaf in leaves:
        if len(leaf) != 3 or not isinstance(leaf[1], np.dtype):
            info.empty_branches.add(keys=leaf)
            continue
        path, dtype, shape = leaf
        gaps.append(_ZEROS[: -size % ALIGNMENT])
        size += len(gaps[-1])
        number = dtype_to_number(dtype)
        info.arrays.add(path=path, dtype=number, shape=shape, offset=size)
        little = dtype_from_number(number)
        converted.append(None if little == dtype else little)
        plain.append(little.kind in "biuf")  # not bfloat16: Python does not know its kind
        size += math.prod(shape) * dtype.itemsize
    info.payload_size = size
    whole = all(plain) and not any(gaps) and all(to is None for to in converted)
    return Form(info.SerializeToString(), gaps, converted, plain, whole, size)
