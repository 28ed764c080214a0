"""Forms: the position of each array in the payload, computed once for trees that are alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.chunks import ALIGNMENT, Known, Piece
from juggler.runtime.wire.dtypes import dtype_from_number, dtype_to_number
from juggler.runtime.wire.trees import Tree, leaves
from juggler.runtime.wire.v1.tensors_pb2 import TreeInfo

_ZEROS = memoryview(bytes(ALIGNMENT))
# A relay of weights lays out trees that came from a network, which may be larger than any model's.
_MOST_FORMS = 1024
_MOST_KEPT, _LARGEST_KEPT = 8 << 20, 1 << 20  # bytes of the information on trees: all, and one's
_forms: dict[tuple[Any, ...], Form] = {}  # by marks
_kept = 0  # bytes of the information on their trees
_ROOT, _BEGIN, _END = object(), object(), object()  # no key of a tree equals these


class Form(NamedTuple):
    """What trees have in common if their arrays have the same paths, dtypes, shapes and orders."""

    known: Known
    gaps: list[memoryview]  # zeros before each array
    converted: list[np.dtype[Any] | None]  # dtype to convert an array to, if any
    plain: list[bool]  # whether an array's memory can be read directly
    whole: bool  # whether the payload is just the arrays, unchanged


def lay_out(tree: Tree) -> tuple[Form, list[Piece]]:
    """The form of a tree, and its payload in pieces: arrays and the zeros between them.

    Raises:
        WireError: the tree has something that cannot be sent.
    """
    marks: list[Any] = []
    arrays: list[NDArray[Any]] = []
    _look_at({_ROOT: tree}, marks, arrays)
    key = tuple(marks)
    form = _forms.get(key)
    if form is None:
        form = _form(tree)
        _keep(key, form)
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


def _keep(key: tuple[Any, ...], form: Form) -> None:
    global _kept
    size = len(form.known.tree)
    if size > _LARGEST_KEPT:
        return
    if len(_forms) >= _MOST_FORMS or _kept + size > _MOST_KEPT:
        _forms.clear()
        _kept = 0
    _forms[key] = form
    _kept += size


def _look_at(branch: Mapping[Any, Any], marks: list[Any], arrays: list[NDArray[Any]]) -> None:
    """Collect the arrays, and everything that the form depends on. The marks of a tree that cannot
    be sent differ from those of every tree that can."""
    for key, child in branch.items():
        if isinstance(child, np.ndarray):
            marks += (key, child.dtype, child.shape, child.flags.c_contiguous)
            arrays.append(child)
        elif isinstance(child, (dict, Mapping)):  # the check for a dict is faster
            marks += (key, _BEGIN)
            _look_at(child, marks, arrays)
            marks.append(_END)
        else:
            marks += (key, None)


def bytes_of(piece: Piece) -> memoryview:
    """A contiguous array as bytes, without a copy."""
    array = np.asarray(piece)
    return array.reshape(-1).view(np.uint8).data


def _form(tree: Tree) -> Form:
    info = TreeInfo()
    gaps: list[memoryview] = []
    converted: list[np.dtype[Any] | None] = []
    plain: list[bool] = []
    size, contiguous = 0, True
    for path, array in leaves(tree):
        if array is None:
            info.empty_branches.add(keys=path)
            continue
        gaps.append(_ZEROS[: -size % ALIGNMENT])
        size += len(gaps[-1])
        number = dtype_to_number(array.dtype)
        info.arrays.add(path=path, dtype=number, shape=array.shape, offset=size)
        little = dtype_from_number(number)
        converted.append(None if little == array.dtype else little)
        plain.append(little.kind in "biuf")  # not bfloat16, a kind that Python does not know
        contiguous &= array.flags.c_contiguous
        size += array.nbytes
    info.payload_size = size
    whole = contiguous and all(plain) and not any(gaps) and all(to is None for to in converted)
    return Form(Known.of(info.SerializeToString(), size), gaps, converted, plain, whole)
