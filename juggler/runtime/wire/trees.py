"""Named trees of arrays, and the numbers of their dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.v1.tensors_pb2 import DType

_DTYPES: dict[DType, np.dtype[Any]] = {
    DType.DTYPE_BOOL: np.dtype(np.bool_),
    DType.DTYPE_INT8: np.dtype(np.int8),
    DType.DTYPE_INT16: np.dtype("<i2"),
    DType.DTYPE_INT32: np.dtype("<i4"),
    DType.DTYPE_INT64: np.dtype("<i8"),
    DType.DTYPE_UINT8: np.dtype(np.uint8),
    DType.DTYPE_UINT16: np.dtype("<u2"),
    DType.DTYPE_UINT32: np.dtype("<u4"),
    DType.DTYPE_UINT64: np.dtype("<u8"),
    DType.DTYPE_FLOAT16: np.dtype("<f2"),
    DType.DTYPE_FLOAT32: np.dtype("<f4"),
    DType.DTYPE_FLOAT64: np.dtype("<f8"),
    DType.DTYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


def dtype_to_number(dtype: np.dtype[Any]) -> DType:
    """Return the wire's number for a dtype of either byte order.

    Raises:
        WireError: the wire has no such dtype.
    """
    number = _NUMBERS.get(dtype) or _NUMBERS.get(dtype.newbyteorder("<"))
    if number is None:
        known = ", ".join(str(known) for known in _NUMBERS)
        raise WireError(f"dtype {dtype} cannot be sent; convert it to one of {known}")
    return number


def dtype_from_number(number: DType) -> np.dtype[Any]:
    """Return the little-endian dtype with this number on the wire.

    Raises:
        WireError: no dtype has this number.
    """
    if not number:
        raise WireError("no dtype is given; tensors.proto lists the known ones")
    dtype = _DTYPES.get(number)
    if dtype is None:
        raise WireError(f"dtype number {number} is not known; tensors.proto lists the known ones")
    return dtype


#: An array, or a branch. Branches from the wire are dicts.
Tree: TypeAlias = "NDArray[Any] | Mapping[str, Tree]"

#: The keys from the root of a tree down to a node; empty at the root.
Path: TypeAlias = tuple[str, ...]


def leaves(tree: object) -> list[tuple[Path, NDArray[Any] | None]]:
    """List a tree's arrays by path, with None for empty branches.

    Depth first, in the order of the branches' keys.

    Raises:
        WireError: a node is neither an array nor a branch, or a key is not a string.
    """
    found: list[tuple[Path, NDArray[Any] | None]] = []
    _collect(tree, (), found)
    return found


def _collect(tree: object, path: Path, found: list[tuple[Path, NDArray[Any] | None]]) -> None:
    if isinstance(tree, np.ndarray):
        found.append((path, tree))
    elif not isinstance(tree, (dict, Mapping)):  # the check for a dict is faster
        kind = type(tree).__name__
        raise WireError(f"a tree holds arrays and branches, but {path_name(path)} is a {kind}")
    elif not tree:
        found.append((path, None))
    else:
        for key, child in tree.items():
            if not isinstance(key, str):
                raise WireError(f"keys of a tree are strings, but {path_name(path)} has {key!r}")
            _collect(child, (*path, key), found)


def flatten(tree: Tree) -> list[tuple[Path, NDArray[Any]]]:
    """List a tree's arrays with their paths, ordered as `leaves`.

    Raises:
        WireError: as for `leaves`.
    """
    return [(path, array) for path, array in leaves(tree) if array is not None]


def unflatten(arrays: Iterable[tuple[Path, Any]], empty_branches: Iterable[Path] = ()) -> Tree:
    """Make a tree of arrays and empty branches.

    Raises:
        WireError: the paths do not belong to one tree.
    """
    arrays, empty_branches = list(arrays), list(empty_branches)
    check_paths([*(path for path, _ in arrays), *empty_branches])
    return nest(arrays, empty_branches)


def nest(arrays: Iterable[tuple[Path, Any]], empty_branches: Iterable[Path] = ()) -> Tree:
    """Make a tree like `unflatten`, from paths that were checked."""
    root: dict[str, Any] = {}
    for path, array in arrays:
        if not path:
            root_array: Tree = array
            return root_array
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = array
    for path in empty_branches:
        branch = root
        for key in path:
            branch = branch.setdefault(key, {})
    return root


def check_paths(paths: Iterable[Path]) -> None:
    """Check that paths of arrays and empty branches form one tree.

    Raises:
        WireError: there are no paths, one occurs twice, or one continues after the end of another.
    """
    ordered = sorted(paths)
    if not ordered:
        raise WireError("the tree names neither an array nor an empty branch")
    # In this order, the next path shows whether another one continues a path.
    for path, after in pairwise(ordered):
        if path == after:
            raise WireError(f"the tree has {path_name(path)} twice")
        if path == after[: len(path)]:
            name = path_name(path)
            raise WireError(f"the tree has {name} both as a branch and as an array or empty branch")


def path_name(path: Path) -> str:
    """Format a path for messages, on one line and of bounded length."""
    name = repr("/".join(path)) if path else "the root"
    return name if len(name) <= 100 else f"{name[:90]}…{name[-9:]}"
