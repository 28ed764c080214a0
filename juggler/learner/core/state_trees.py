"""Converts a learner's state between tensors and checkpoint arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.wire.trees import Tree

#: Advice for a run that cannot continue from its checkpoint.
REMEDY: Final = (
    "Restore the files and the settings that it was made with, or begin a new run with the "
    "parameters that still fit: --from and --from-parameters"
)


class StateMismatch(ValueError):
    """A checkpoint is of another module, algorithm or optimizer.

    Attributes:
        what: the array and its problem; "": see the message.
    """

    def __init__(self, message: str, what: str = "") -> None:
        super().__init__(message)
        self.what = what


def to_device(tree: Any, device: torch.device) -> Any:
    """Copy a tree of tensors to a device, asynchronously if page-locked."""
    if isinstance(tree, Tensor):
        # The check costs a tenth of a no-op `to`, which an update would call forty times.
        return tree if tree.device == device else tree.to(device, non_blocking=True)
    return {key: to_device(branch, device) for key, branch in tree.items()}


def arrays_like(tree: Mapping[str, Any], *, copied: bool = False) -> dict[str, Tree]:
    """Convert tensors to host arrays, sharing CPU memory unless `copied`."""
    return {
        key: _array(branch, copied)
        if isinstance(branch, Tensor)
        else arrays_like(branch, copied=copied)
        for key, branch in tree.items()
    }


def _array(tensor: Tensor, copied: bool) -> NDArray[Any]:
    tensor = tensor.detach().to("cpu", copy=copied)  # [...]
    if tensor.dtype == torch.bfloat16:  # which plain NumPy does not have
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # [...]
    return tensor.numpy()  # [...]


def tensors_like(tree: Tree, like: Mapping[str, Any]) -> dict[str, Any]:
    """Copy arrays into tensors with the structure of another tree.

    Args:
        tree: the arrays.
        like: tensors with the expected keys, shapes, dtypes and devices.

    Raises:
        StateMismatch: a key is missing or unknown, or an array has another shape or dtype.
    """
    return _tensors(tree, like, ())


def _tensors(tree: object, like: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        raise _mismatch(path, "is an array in the checkpoint, and a branch of arrays here")
    for key in tree:
        if key not in like:
            raise _mismatch((*path, key), "is in the checkpoint, and not here")
    tensors: dict[str, Any] = {}
    for key, expected in like.items():
        here = (*path, key)
        if isinstance(expected, Mapping):
            # Files of arrays do not keep empty branches.
            branch = tree.get(key, {}) if not expected else _at(tree, key, here)
            tensors[key] = _tensors(branch, expected, here)
        else:
            tensors[key] = _tensor(_at(tree, key, here), expected, here)
    return tensors


def _tensor(array: object, expected: Tensor, path: tuple[str, ...]) -> Tensor:
    if not isinstance(array, np.ndarray):
        raise _mismatch(path, "is a branch of arrays in the checkpoint, and an array here")
    if array.shape != expected.shape:
        shapes = f"{array.shape} in the checkpoint, and {tuple(expected.shape)} here"
        raise _mismatch(path, f"has shape {shapes}")
    # Copied into torch's own memory: a matrix product may depend on the alignment of its operands,
    # and resumed training must give the same numbers as uninterrupted training.
    tensor = torch.tensor(array)  # [...]
    if tensor.dtype != expected.dtype:
        raise _mismatch(path, f"is {tensor.dtype} in the checkpoint, and {expected.dtype} here")
    return tensor.to(expected.device)


def _at(tree: Mapping[str, Any], key: str, path: tuple[str, ...]) -> object:
    if key not in tree:
        raise _mismatch(path, "is here, and not in the checkpoint")
    return tree[key]


def _mismatch(path: tuple[str, ...], what: str) -> StateMismatch:
    name = "/".join(path) or "state"
    return StateMismatch(
        f"the checkpoint does not fit this module, algorithm and configuration: {name!r} {what}. "
        + REMEDY,
        f"{name!r} {what}",
    )
