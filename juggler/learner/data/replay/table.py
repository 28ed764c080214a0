"""A table of rows: columns of fixed size, in which new rows take the slots of others that leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from juggler.learner.data.replay.memory_columns import (
    MemoryColumns,
    any_leaf,
    runs_of,
)
from juggler.learner.data.replay.room import bytes_of_step, must_fit
from juggler.runtime.wire.structures import tree_leaves, tree_map
from juggler.runtime.wire.trees import Tree

#: Says which slots [n] make room for n rows when a table is full.
Leaving = Callable[[int], NDArray[np.intp]]

_NONE = np.zeros(0, np.intp)
_BYTES_AT_ONCE = 2**26  # of rows that are restored together


class Table:
    """Keeps rows in columns, which are made when the first ones come.

    New rows take slots that were freed, then those that were never used, then those of rows that
    leave for them. As long as nothing is freed and the oldest rows leave, slots form a ring.

    Args:
        capacity: the most rows.
        row_steps: steps in each row.
        directory: where the rows lie on disk; "": in memory.

    Attributes:
        capacity: as given.
        row_steps: as given.
        size: rows in the table.
        generations: int64 [capacity], the number of the row in each slot, counted from 1 as they
            came; 0: there is none. A slot that has another generation than it had when it was drawn
            holds another row by now, or none.
        used: slots that were ever used, the first ones.
        left: hears of the slots whose rows leave.
    """

    left: Callable[[NDArray[np.intp]], None]

    def __init__(self, capacity: int, *, row_steps: int = 1, directory: str = "") -> None:
        self.capacity, self.size = capacity, 0
        self.generations = np.zeros(capacity, np.int64)  # [capacity]
        self.row_steps, self._directory = row_steps, directory
        self._columns: MemoryColumns | None = None
        self._came = 0  # rows so far
        self._next = 0  # behind the slot of the last row, in a ring
        self.used = 0
        self._free = _NONE  # slots that were freed, and not used again
        self.left = lambda slots: None

    @property
    def steps(self) -> int:
        """The most steps."""
        return self.capacity * self.row_steps

    def put(self, rows: dict[str, Any], leaving: Leaving | None = None) -> NDArray[np.intp]:
        """Copy rows into the table -> the slots [n] that they took, each one once.

        Of more rows than the table can hold, the last ones are taken.

        Args:
            rows: by name, tensors [n, ...] or trees of them; the same names every time.
            leaving: which rows leave if there is no room; by default the oldest ones, for a table
                in which nothing is freed.

        Raises:
            ValueError: the table does not fit into memory, or the rows are unlike earlier ones.
        """
        count = len(any_leaf(rows))
        if count > self.capacity:
            count = self.capacity
            rows = tree_map(lambda x: x[-count:], rows)
        if self._columns is None:
            self._columns = self._made(rows)
        tensors = self._columns.checked(rows)
        slots = self._slots_for(count, leaving or self.oldest)
        runs = runs_of(slots)
        at = slice(runs[0][2], runs[0][2] + count) if len(runs) == 1 else slots  # a slice is faster
        # Until its row is whole, a slot has none: whatever fails here, half a row is never drawn.
        held = self.generations[at] > 0  # [n]
        self._leave(slots if held.all() else slots[held])
        self._columns.write(slots, runs, tensors)
        self.generations[at] = np.arange(self._came + 1, self._came + count + 1)
        self._came += count
        self.size += count
        return slots

    def free(self, slots: NDArray[np.intp]) -> None:
        """Let the rows in different slots [n] go. Their memory is used for the next ones."""
        self._leave(slots)
        self._free = np.concatenate([self._free, slots])

    def make_room(
        self, rows: dict[str, Any], leaving: Leaving | None = None
    ) -> NDArray[np.intp] | None:
        """Make room for rows like these, which `put` needs; the arguments are the same.

        Returns:
            The slots [n] of the rows that are still there; they are in slots 0..n-1 from now on, in
            this order. None: all are where they were.
        """
        return None

    def rows(self, slots: NDArray[np.intp]) -> dict[str, Any]:
        """Copies of the rows in slots [B] -> by name, tensors [B, ...]."""
        assert self._columns is not None  # there are slots only if there are rows
        return self._columns.take(slots)

    def oldest_first(self) -> NDArray[np.intp]:
        """The slots [size] in the order in which their rows came."""
        slots = np.flatnonzero(self.generations[: self.used])  # [size]
        return slots[np.argsort(self.generations[slots])]

    @property
    def is_ring(self) -> bool:
        """Whether the rows lie one behind the other as they came, with room for the next one behind
        the last."""
        places = self._next - self.size + np.arange(self.size)  # [size]
        return self.size == self.used and np.array_equal(
            self.oldest_first(), places % max(1, self.capacity)
        )

    def clear(self) -> None:
        """Drop all rows. What was drawn before counts as written over."""
        self.generations[: self.used] = 0
        self.size = self._next = self.used = 0
        self._free = _NONE

    def state(self) -> dict[str, Tree]:
        """All rows as arrays on the host, and in which slots the next ones go."""
        return {
            "columns": self._columns.first(self.used) if self._columns and self.used else {},
            "generations": self.generations[: self.used].copy(),  # [u]
            "free": self._free.copy(),
            "counts": np.array([self._came, self._next]),
        }

    def prepare(self, state: dict[str, Any]) -> int:
        """See that `restore` can go on from a saved state, before it takes memory for it -> how
        many rows it has. The table must be empty.

        Raises:
            ValueError: it is not the state of such a table.
        """
        generations, free = state["generations"], state["free"]  # [u], [f]
        (came, following), used = state["counts"].tolist(), len(generations)
        empty = np.flatnonzero(generations == 0)  # [f]
        whole = (
            all(len(x) == used for _, x in tree_leaves(state["columns"]))
            and bool(state["columns"]) == bool(used)
            and used <= self.capacity
            and np.array_equal(np.sort(free), empty)
            and len(np.unique(generations)) == used - len(empty) + bool(len(empty))
            and 0 <= generations.min(initial=0) <= generations.max(initial=0) <= came
            and 0 <= following <= min(used, self.capacity - 1)
        )
        if not whole:
            raise ValueError(
                f"the checkpoint's replay table has {used} rows, and cannot go on in one of "
                f"{self.capacity}: set replay_capacity and replay_memory as they were, or "
                "save_replay = false"
            )
        return used - len(free)

    def restore(self, state: dict[str, Any], device: torch.device) -> None:
        """Hold the rows of a saved state, on a device. They are copied once, a part at a time, and
        there is to be memory for them: it has been asked for when the first rows came.

        Raises:
            ValueError: as `prepare`.
        """
        size, used = self.prepare(state), len(state["generations"])
        columns = state["columns"]
        self.clear()
        self._columns = None
        came, following = state["counts"].tolist()
        each = sum(x.nbytes for _, x in tree_leaves(columns)) // max(1, used)  # bytes of a row
        at_once = max(1, _BYTES_AT_ONCE // max(1, each))
        for first in range(0, used, at_once):
            part = partial(_rows_of, slice(first, first + at_once), device)
            self._came = came  # so that memory is not asked for once more
            Table.put(self, tree_map(part, columns))
        self.generations[:used] = state["generations"]
        self._free, self.size = state["free"].astype(np.intp), size
        self._came, self._next = came, following

    def _slots_for(self, count: int, leaving: Leaving) -> NDArray[np.intp]:
        """Slots [count] for new rows; those whose rows leave are still in use."""
        parts: list[NDArray[np.intp]] = []
        freed = min(count, len(self._free))
        if freed:
            keep = len(self._free) - freed
            parts.append(self._free[keep:])
            self._free = self._free[:keep]
        new = min(count - freed, self.capacity - self.used)
        if new:
            parts.append(np.arange(self.used, self.used + new))
            self.used += new
            self._next = self.used % self.capacity
        if short := count - freed - new:
            parts.append(leaving(short))
        return parts[0] if len(parts) == 1 else np.concatenate([_NONE, *parts])

    def oldest(self, count: int) -> NDArray[np.intp]:
        """The slots [count] of the oldest rows of a ring."""
        slots = (self._next + np.arange(count)) % self.capacity  # [count]
        self._next = (self._next + count) % self.capacity
        return slots

    def _leave(self, slots: NDArray[np.intp]) -> None:
        if not len(slots):
            return
        self.left(slots)
        self.generations[slots] = 0
        self.size -= len(slots)

    def _made(self, rows: dict[str, Any]) -> MemoryColumns:
        """Columns for rows like these."""
        is_new = not self._came  # else it has memory, of which there was enough
        if is_new and not self._directory:
            must_fit(self.capacity * self.row_steps, bytes_of_step(rows), any_leaf(rows).device)
        return MemoryColumns(rows, self.capacity, self._directory)


def _rows_of(part: slice, device: torch.device, column: NDArray[Any]) -> torch.Tensor:
    """Rows of a column of a checkpoint, which torch may write to."""
    return torch.from_numpy(column[part].copy()).to(device)
