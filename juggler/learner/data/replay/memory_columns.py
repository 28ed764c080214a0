"""The columns of a table, in memory of the host or of a device, or on disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.wire.structures import tree_leaves, tree_map

#: Rows that go into successive slots: the first row, the one behind the last, the first slot.
Runs = Sequence[tuple[int, int, int]]


class MemoryColumns:
    """Columns [capacity, ...] by name, or trees of them, for rows like the first ones.

    Args:
        like: rows by name, tensors [n, ...] or trees of them.
        capacity: the number of slots.
        directory: where the columns lie on disk; "": in memory, where the given tensors are.

    Attributes:
        device: where rows come from, and go to.
    """

    def __init__(self, like: Mapping[str, Any], capacity: int, directory: str = "") -> None:
        self._like: dict[str, Any] = tree_map(lambda _: None, like)  # it holds none of the rows
        self._names = [path[0] for path, _ in tree_leaves(like)]  # of each column
        self._flat = all(isinstance(x, Tensor) for x in like.values())
        tensors = self._tensors(like)
        self.device = tensors[0].device
        self._of_host = bool(directory) or self.device.type == "cpu"
        self._columns: list[_Column] = [
            _HostColumn(x, capacity, directory, self.device)
            if self._of_host
            else _DeviceColumn(x, capacity)
            for x in tensors
        ]

    @property
    def names(self) -> Collection[str]:
        return self._like.keys()

    def checked(self, rows: Mapping[str, Any]) -> list[Tensor]:
        """Rows as `write` takes them.

        Raises:
            ValueError: they are unlike the first ones.
        """
        tensors = self._tensors(rows)
        for new, column in zip(tensors, self._columns, strict=True):
            if new.shape[1:] != column.shape or new.dtype != column.dtype:
                raise unlike(
                    f"they have {new.dtype} of shape {tuple(new.shape[1:])} where it has "
                    f"{column.dtype} of {tuple(column.shape)}"
                )
        return tensors

    def write(self, slots: NDArray[np.intp], runs: Runs, tensors: Sequence[Tensor]) -> None:
        """Copy rows [n, ...], which were checked, into different slots [n], and perhaps runs."""
        places = self._places(slots)
        for new, column in zip(tensors, self._columns, strict=True):
            column.write(places, runs, new)

    def take(self, slots: NDArray[np.intp]) -> dict[str, Any]:
        """Copies of the rows in slots [B] -> by name, tensors [B, ...]."""
        places = self._places(slots)
        return self._named([column.take(places) for column in self._columns])

    def first(self, count: int) -> dict[str, Any]:
        """The first slots as arrays [count, ...] on the host, by name."""
        return self._named([column.first(count) for column in self._columns])

    def only(self, names: Collection[str]) -> MemoryColumns:
        """The columns of these names: the same memory."""
        found = copy(self)
        found._like = {name: like for name, like in self._like.items() if name in names}
        pairs = [each for each in zip(self._names, self._columns, strict=True) if each[0] in names]
        found._names, found._columns = [name for name, _ in pairs], [each for _, each in pairs]
        return found

    def replaced(self, others: MemoryColumns) -> MemoryColumns:
        """These columns, with others in the place of those of the same names."""
        found, rest = copy(self), iter(others._columns)
        found._columns = [
            next(rest) if name in others._like else column
            for name, column in zip(self._names, self._columns, strict=True)
        ]
        return found

    def grow(self, capacity: int) -> None:
        """Have more slots."""
        for column in self._columns:
            column.grow(capacity)

    def _places(self, slots: NDArray[np.intp]) -> Any:
        """Slots [n] where the columns are: sent to a device once for all of them."""
        if self._of_host:
            return slots
        return torch.from_numpy(slots).to(self.device, non_blocking=True)  # [n]

    def _tensors(self, rows: Mapping[str, Any]) -> list[Tensor]:
        """The leaves of rows, in the order of the columns."""
        if rows.keys() != self._like.keys():
            raise unlike(f"only one side has {sorted(rows.keys() ^ self._like.keys())}")
        if self._flat:
            return [rows[name] for name in self._like]
        found: list[Tensor] = []
        try:
            tree_map(lambda _, x: found.append(x), self._like, rows)
        except (KeyError, TypeError) as error:
            raise unlike(f"it has {error}, and they have not") from None
        return found

    def _named(self, leaves: list[Any]) -> dict[str, Any]:
        """Such leaves by the names of their columns."""
        if self._flat:
            return dict(zip(self._like, leaves, strict=True))
        rest = iter(leaves)
        found: dict[str, Any] = tree_map(lambda _: next(rest), self._like)
        return found


def any_leaf(rows: Mapping[str, Any]) -> Tensor:
    """Any of the tensors in a tree."""
    first = next(iter(rows.values()))
    found: Tensor = first if isinstance(first, Tensor) else next(tree_leaves(rows))[1]
    return found


def must_be_rows(rows: Mapping[str, Any]) -> None:
    """Raises:
    ValueError: these are not tensors [n, ...], or trees of them, of one n. A tensor with one entry
        would be broadcast to all rows.
    """
    leaves = {"/".join(path): x for path, x in tree_leaves(rows)}
    for name, x in leaves.items():
        if not isinstance(x, Tensor) or not x.ndim:
            found = "a tensor []" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(
                f"`rows` of a replay gives tensors [n, ...], and not {found} as {name!r}"
            )
    counts = {name: len(x) for name, x in leaves.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{count} of {name!r}" for name, count in counts.items())
        raise ValueError(
            f"`rows` of a replay gives one entry for each row in every column: it gave {told}"
        )


class _Column(Protocol):
    shape: torch.Size
    dtype: torch.dtype

    def write(self, slots: Any, runs: Runs, rows: Tensor) -> None: ...

    def take(self, slots: Any) -> Tensor: ...

    def first(self, count: int) -> NDArray[Any]: ...

    def grow(self, capacity: int) -> None: ...


class _HostColumn:
    """An array. NumPy copies rows in half the time that torch takes."""

    def __init__(self, like: Tensor, capacity: int, directory: str, device: torch.device) -> None:
        self.shape, self.dtype = like.shape[1:], like.dtype
        self._device = None if device.type == "cpu" else device
        dtype = like[:0].cpu().numpy().dtype
        self._directory = directory
        self._array = self._made(capacity, dtype)

    def write(self, slots: NDArray[np.intp], runs: Runs, rows: Tensor) -> None:
        new = (rows if self._device is None else rows.cpu()).numpy()  # [n, ...]
        for start, stop, slot in runs:
            self._array[slot : slot + stop - start] = new[start:stop]
        if not runs:
            self._array[slots] = new

    def take(self, slots: NDArray[np.intp]) -> Tensor:
        rows = torch.from_numpy(self._array.take(slots, 0))  # [B, ...]
        return rows if self._device is None else rows.to(self._device, non_blocking=True)

    def first(self, count: int) -> NDArray[Any]:
        return np.array(self._array[:count])

    def grow(self, capacity: int) -> None:
        before = self._array
        if not self._directory:
            before.resize((capacity, *self.shape), refcheck=False)  # mostly without a copy
            return
        self._array = self._made(capacity, before.dtype)
        self._array[: len(before)] = before

    def _made(self, capacity: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Memory is taken as the slots are filled; room on disk at once."""
        shape = (capacity, *self.shape)
        return (
            _on_disk(self._directory, shape, dtype) if self._directory else np.empty(shape, dtype)
        )


class _DeviceColumn:
    """A tensor on a device."""

    def __init__(self, like: Tensor, capacity: int) -> None:
        self.shape, self.dtype = like.shape[1:], like.dtype
        self._tensor = like.new_empty((capacity, *self.shape))

    def write(self, slots: Tensor, runs: Runs, rows: Tensor) -> None:
        self._tensor.index_copy_(0, slots, rows)

    def take(self, slots: Tensor) -> Tensor:
        return self._tensor.index_select(0, slots)

    def first(self, count: int) -> NDArray[Any]:
        array: NDArray[Any] = self._tensor[:count].cpu().numpy().copy()
        return array

    def grow(self, capacity: int) -> None:
        before = self._tensor
        self._tensor = before.new_empty((capacity, *self.shape))
        self._tensor[: len(before)] = before


def runs_of(slots: NDArray[np.intp]) -> Runs:
    """Slots [n] as at most two runs of successive ones; none if there are more. A ring has one, or
    two where it wraps."""
    breaks = (slots[1:] - slots[:-1] != 1).nonzero()[0]
    if len(breaks) > 1 or not len(slots):
        return []
    starts = [0, *(breaks + 1).tolist(), len(slots)]
    return [(a, b, int(slots[a])) for a, b in pairwise(starts)]


def _on_disk(directory: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array in a file without a name, of which nothing is left when the process ends."""
    size = prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # else writing to a full disk kills
            return np.asarray(np.memmap(file, dtype, "r+", shape=shape))
    except OSError as error:
        raise no_room_on_disk(directory, size, error.strerror or str(error)) from error


def unlike(how: str) -> ValueError:
    """An error that says how rows are unlike those of their table."""
    return ValueError(
        f"these rows do not fit those in the replay table: {how}. If the run goes on with other "
        "connectors than it began with, set save_replay = false"
    )


def no_room_on_disk(directory: str, size: float, why: str) -> ValueError:
    """An error that says that so many bytes of kept steps have no room there."""
    return ValueError(
        f"replay_directory = {directory!r}: there is no room for {size / 1e9:.1f} GB of kept "
        f"steps: {why}. Lower replay_capacity, or name another directory"
    )
