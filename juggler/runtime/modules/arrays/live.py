"""NumPy's views of a module's tensors."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class NotKnown(Exception):
    """Something in a module cannot be done in NumPy; says what."""


class LiveArrays:
    """Arrays of a module's parameters and buffers, which follow every change of them in place.

    Views share their memory. Transposed copies, which NumPy multiplies with in half the time, are
    made anew where torch says that a tensor was written to.

    Args:
        shared: whether copies are made anew each time, since torch does not say what is written
            through `.data`.
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._tensors: dict[int, Tensor] = {}  # by id
        self._transposed: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}  # copy and view, by id
        self._version = 0

    def view(self, tensor: Tensor) -> NDArray[Any]:
        """The array [...] of a tensor [...].

        Raises:
            NotKnown: NumPy cannot read it.
        """
        try:
            array: NDArray[Any] = tensor.detach().numpy()
            version = tensor._version
        except (TypeError, RuntimeError):
            raise NotKnown(f"a tensor is of {tensor.dtype} on {tensor.device}") from None
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor
            self._version += version
        return array

    def transposed(self, tensor: Tensor) -> NDArray[Any]:
        """A matrix [a, b] as a contiguous array [b, a].

        Raises:
            NotKnown: as `view`.
        """
        if id(tensor) not in self._transposed:
            view = self.view(tensor).T
            self._transposed[id(tensor)] = np.ascontiguousarray(view), view
        return self._transposed[id(tensor)][0]

    def lent(self, array: NDArray[Any]) -> bool:
        """Whether an array may share the memory of some tensor."""
        tensors = self._tensors.values()
        return any(np.may_share_memory(array, each.detach().numpy()) for each in tensors)

    def follow(self) -> bool:
        """Bring copies up to date. True: some tensor was written to since the last call."""
        version = sum(map(_version_of, self._tensors.values()))
        changed: bool = version != self._version
        self._version = version
        if changed or self._shared:
            for copy, view in self._transposed.values():
                np.copyto(copy, view)
        return changed


_version_of = attrgetter("_version")


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The array [...] of a tensor [...], in float32 if it is bfloat16, which NumPy has not.

    In inference mode, what shares the memory of a weight is copied, since weights change.
    """
    if not tensor.is_inference():
        tensor = tensor.detach().clone()  # [...]
    array: NDArray[Any] = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def as_tensor(array: NDArray[Any]) -> Tensor:
    """The tensor [...] of an array [...], a copy only where torch cannot use its memory."""
    usable = array.flags.writeable and min(array.strides, default=0) >= 0
    return torch.from_numpy(array) if usable else torch.tensor(array)
