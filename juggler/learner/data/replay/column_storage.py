"""Storage of replayed rows on host, device or disk, and its size."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.actors.resources import usable_memory
from juggler.runtime.connectors.contexts import FRAMES
from juggler.runtime.modules.columns import LIVE
from juggler.runtime.wire.structures import tree_leaves, tree_map


class ColumnStorage:
    """Columns [capacity, ...] by name, or trees of them.

    Args:
        like: rows by name, tensors [n, ...] or trees of them.
        capacity: number of slots.
        directory: directory on disk; "": the memory of the given tensors' device.
    """

    def __init__(self, like: Mapping[str, Any], capacity: int, directory: str = "") -> None:
        device = any_leaf(like).device
        on_host = bool(directory) or device.type == "cpu"
        self._device = None if on_host else device  # of slots
        make = _HostColumn if on_host else _Column
        self.tree: dict[str, Any] = tree_map(lambda x: make(x, capacity, directory), dict(like))

    def check(self, rows: Mapping[str, Any]) -> None:
        """Raise ValueError if rows differ from the first ones."""
        if rows.keys() != self.tree.keys():
            raise unlike(f"only one side has {sorted(rows.keys() ^ self.tree.keys())}")
        try:
            tree_map(_Column.check, self.tree, dict(rows))
        except (KeyError, TypeError) as error:
            raise unlike(f"it has {error}, and they have not") from None

    def write(self, slots: NDArray[np.intp], rows: Mapping[str, Any]) -> None:
        """Copy checked rows [n, ...] into different slots [n]."""
        places = self._places(slots)
        tree_map(lambda column, x: column.write(places, x), self.tree, dict(rows))

    def take(self, slots: NDArray[np.intp], names: Collection[str] = ()) -> dict[str, Any]:
        """Copy the rows in slots [B], by name; (): all names."""
        places = self._places(slots)
        some = {name: self.tree[name] for name in names} if names else self.tree
        found: dict[str, Any] = tree_map(lambda column: column.take(places), some)
        return found

    def first(self, count: int) -> dict[str, Any]:
        """Return the first slots as host arrays [count, ...], by name."""
        found: dict[str, Any] = tree_map(lambda column: column.first(count), self.tree)
        return found

    def grow(self, capacity: int) -> None:
        """Add slots."""
        tree_map(lambda column: column.grow(capacity), self.tree)

    def _places(self, slots: NDArray[np.intp]) -> Any:
        """Move slots [n] to the columns' device, once for all columns."""
        if self._device is None:
            return slots
        return torch.from_numpy(slots).to(self._device, non_blocking=True)  # [n]


class _Column:
    """A tensor on a device."""

    def __init__(self, like: Tensor, capacity: int, directory: str) -> None:
        self.shape, self.dtype = like.shape[1:], like.dtype
        self.device = None if like.device.type == "cpu" else like.device  # of rows, if not the host
        self._directory, self._like = directory, like[:0].clone()
        self._data: Any = self._made(capacity)

    def check(self, rows: Tensor) -> None:
        if rows.shape[1:] != self.shape or rows.dtype != self.dtype:
            raise unlike(
                f"they have {rows.dtype} of shape {tuple(rows.shape[1:])} where it has "
                f"{self.dtype} of {tuple(self.shape)}"
            )

    def write(self, slots: Any, rows: Tensor) -> None:
        self._data.index_copy_(0, slots, rows)

    def take(self, slots: Any) -> Tensor:
        found: Tensor = self._data.index_select(0, slots)  # [B, ...]
        return found

    def first(self, count: int) -> NDArray[Any]:
        array: NDArray[Any] = self._data[:count].cpu().numpy().copy()
        return array

    def grow(self, capacity: int) -> None:
        before = self._data
        self._data = self._made(capacity)
        self._data[: len(before)] = before

    def _made(self, capacity: int) -> Any:
        return self._like.new_empty((capacity, *self.shape))


class _HostColumn(_Column):
    """An array, which NumPy copies twice as fast as torch."""

    def write(self, slots: NDArray[np.intp], rows: Tensor) -> None:
        self._data[slots] = (rows if self.device is None else rows.cpu()).numpy()  # [n, ...]

    def take(self, slots: NDArray[np.intp]) -> Tensor:
        rows = torch.from_numpy(self._data.take(slots, 0))  # [B, ...]
        return rows if self.device is None else rows.to(self.device, non_blocking=True)

    def first(self, count: int) -> NDArray[Any]:
        return np.array(self._data[:count])

    def grow(self, capacity: int) -> None:
        if self._directory:
            super().grow(capacity)
        else:
            self._data.resize((capacity, *self.shape), refcheck=False)  # mostly without a copy

    def _made(self, capacity: int) -> NDArray[Any]:
        """Allocate slots: in memory as they fill, on disk all at once."""
        shape, dtype = (capacity, *self.shape), self._like.cpu().numpy().dtype
        if not self._directory or not prod(shape):
            return np.empty(shape, dtype)
        return _on_disk(self._directory, shape, dtype)


def _on_disk(directory: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Create an array in an unnamed file, deleted with the process."""
    size = prod(shape) * dtype.itemsize
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # otherwise a full disk kills the process
            return np.asarray(np.memmap(file, dtype, "r+", shape=shape))
    except OSError as error:
        raise no_room_on_disk(directory, size, error.strerror or str(error)) from error


def any_leaf(rows: Mapping[str, Any]) -> Tensor:
    """Return any tensor of a tree."""
    first = next(iter(rows.values()))
    found: Tensor = first if isinstance(first, Tensor) else next(tree_leaves(rows))[1]
    return found


def count_of(rows: Mapping[str, Any]) -> int:
    """Return the number of rows [n, ...]; 0 for {}."""
    return len(rows[LIVE] if LIVE in rows else any_leaf(rows)) if rows else 0


def must_be_rows(rows: Mapping[str, Any]) -> None:
    """Raise ValueError unless rows are trees of tensors [n, ...].

    A tensor with one entry would be broadcast to all rows.
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
        given = ", ".join(f"{count} of {name!r}" for name, count in counts.items())
        raise ValueError(
            f"`rows` of a replay gives one entry for each row in every column: it gave {given}"
        )


class ReplayLimits(NamedTuple):
    """Limits of number and size of kept steps.

    Attributes:
        capacity: maximum number of steps.
        memory: maximum gigabytes; none: only `capacity` is a limit.
        directory: directory on disk; "": memory.
        begin: number of steps before learning begins, all of which must fit.
        saved: whether checkpoints hold the steps.
    """

    capacity: int
    memory: float | None = None
    directory: str = ""
    begin: int = 0
    saved: bool = False

    def steps_of(self, each: float, row_steps: int = 1) -> int:
        """Return the number of steps kept, by the bytes of each.

        Args:
            each: bytes per step.
            row_steps: number of steps in a row.

        Raises:
            ValueError: too few steps fit.
        """
        if self.memory is None:
            return self.capacity
        steps = min(self.capacity, int(self.memory * 1e9 / each))
        of_begin = f"learning begins with replay_begin = {self.begin}"
        for fewest, why, instead in (
            (row_steps, f"a row has {row_steps}", ""),
            (self.begin, of_begin, ", or replay_begin to less"),
        ):
            if steps < fewest:
                enough = ceil(fewest * each / 1e7) / 100  # gigabytes
                raise ValueError(
                    f"replay_memory = {self.memory:g}: {steps} steps of {each:.0f} bytes have "
                    f"room, and {why}; set replay_memory to {enough:g} or more{instead}"
                )
        return steps

    def taken_by(self, rows: Mapping[str, Any]) -> float:
        """Return bytes of this host's memory that rows like these will take.

        Raises:
            ValueError: they do not fit into memory, on the disk, or on their device.
        """
        if not rows:
            return 0.0
        each, device = bytes_of_step(rows), any_leaf(rows).device
        steps = self.steps_of(each, steps_of_row(rows))
        if self.directory:
            self._must_fit_on_disk(steps * each)
            return 0.0
        # torch keeps freed memory, which counts as free here: see `memory_of`.
        on_host = device.type == "cpu"
        free = usable_memory() if on_host else memory_of(device)
        if free is not None and steps * each > free:
            memory = "this host's memory" if on_host else f"the memory of {device}"
            raise ValueError(
                f"replay_capacity = {steps}: that many steps of {each:.0f} bytes take "
                f"{steps * each / 1e9:.1f} GB, and {free / 1e9:.1f} GB of {memory} are free. "
                f"Set it to {int(free * 0.9 / each)} or less, or keep the steps on disk with "
                "replay_directory"
            )
        return steps * each if on_host else 0.0

    def _must_fit_on_disk(self, size: float) -> None:
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise ValueError(
                f"replay_directory = {self.directory!r}: {error.strerror or error}; name another "
                "directory"
            ) from error
        if size > free:
            raise no_room_on_disk(self.directory, size, f"{free / 1e9:.1f} GB are free")
        in_memory = usable_memory() if self.saved else None
        # The learner makes a copy for a checkpoint, and the driver receives one.
        if in_memory is not None and 2 * size > in_memory:
            raise ValueError(
                f"replay_directory = {self.directory!r}: two copies of kept steps for a "
                f"checkpoint, at the learner and at the driver, take {2 * size / 1e9:.1f} GB of "
                f"memory, and {in_memory / 1e9:.1f} GB of this host's memory are free. Set "
                "save_replay = false, or lower replay_capacity"
            )


def memory_of(device: torch.device) -> int | None:
    """Return free bytes of a device's memory; None: unknown to torch."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def bytes_of_step(rows: Mapping[str, Any]) -> float:
    """Return bytes per step of rows [n, ...] and FRAMES [P, ...]."""
    rest = {name: column for name, column in rows.items() if name != FRAMES}
    size: float = sum(prod(x.shape[1:]) * x.element_size() for _, x in tree_leaves(rest))
    frames = [x for _, x in tree_leaves(rows.get(FRAMES, {}))]
    size += sum(x.numel() * x.element_size() for x in frames) / max(1, count_of(rest))
    return size / steps_of_row(rest)


def steps_of_row(rows: Mapping[str, Any]) -> int:
    """Return steps T per row; 1 without a column of live steps."""
    return max(1, rows[LIVE].shape[1]) if LIVE in rows else 1


def unlike(how: str) -> ValueError:
    """Make the error for rows that do not match their table."""
    return ValueError(
        f"these rows do not fit those in the replay table: {how}. If the run continues with other "
        "connectors than it began with, set save_replay = false"
    )


def no_room_on_disk(directory: str, size: float, why: str) -> ValueError:
    """Make the error for a replay that does not fit on disk."""
    return ValueError(
        f"replay_directory = {directory!r}: there is no room for {size / 1e9:.1f} GB of kept "
        f"steps: {why}. Lower replay_capacity, or name another directory"
    )
