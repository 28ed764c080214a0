"""Trees of arrays as safetensors files. The name of an array is its path, joined with "/"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from juggler.runtime.wire.trees import Tree, leaves, unflatten

#: The keys from the root of a tree down to an array or an empty branch.
Keys: TypeAlias = tuple[str, ...]

#: By their names in safetensors. It has more, which neither NumPy nor torch uses here.
_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "I8": np.dtype(np.int8),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def encode(tree: Tree) -> tuple[bytes, list[Keys]]:
    """The file with the arrays of a tree, and the tree's empty branches, which a file cannot hold.

    Raises:
        ValueError: the tree has something that a file cannot hold; names it.
    """
    arrays: dict[str, NDArray[Any]] = {}
    empty: list[Keys] = []
    for keys, array in leaves(tree):
        name = "/".join(keys)
        if any("/" in key for key in keys) or name == "__metadata__":
            raise ValueError(f"{keys} is no name for an array")
        if array is None:
            empty.append(keys)
            continue
        little = array.dtype.newbyteorder("<")
        if little not in _DTYPES.values():
            raise ValueError(f"{name} has dtype {array.dtype}, which no checkpoint can hold")
        # safetensors reads the memory as it is, whatever the strides are.
        arrays[name] = np.asarray(array, dtype=little, order="C")
    return safetensors.numpy.save(arrays), empty


def decode(content: bytes, empty: Iterable[Keys]) -> Tree:
    """The tree that `encode` wrote, in the order of its names; its arrays are writable.

    Raises:
        ValueError: the content is not such a file, or the empty branches are not of its tree.
    """
    try:
        # safetensors.numpy.load has no bfloat16, so the arrays are made here.
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
        arrays = [
            (
                tuple(name.split("/")),
                np.ndarray(entry["shape"], _DTYPES[entry["dtype"]], buffer=entry["data"]),
            )
            for name, entry in sorted(entries, key=lambda entry: entry[0])
        ]
    except KeyError as error:
        raise ValueError(f"dtype {error} is unknown") from error
    except (safetensors.SafetensorError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return unflatten(arrays, empty)
