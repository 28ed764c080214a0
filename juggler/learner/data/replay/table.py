"""A table of rows: columns of fixed size, in which new rows replace the oldest ones."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree, flatten

_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes of this host


class Table:
    """Keeps the newest rows, in columns that are made when the first ones come.

    Args:
        capacity: the most rows.
        row_steps: steps in each row, for messages about `replay_capacity`.

    Attributes:
        capacity: as given.
        size: rows in the table, in slots 0..size-1.
        generations: int64 [capacity], how often each slot was written. A slot that has another
            generation than it had when it was drawn holds another row by now.
    """

    def __init__(self, capacity: int, row_steps: int = 1) -> None:
        self.capacity = capacity
        self._row_steps = row_steps
        self.size = 0
        self.generations = np.zeros(capacity, np.int64)  # [capacity]
        self._next = 0
        self._columns: dict[str, Any] = {}

    def put(self, rows: dict[str, Any]) -> NDArray[np.intp]:
        """Copy rows into the table -> the slots [n] that they took, each one once.

        Of more rows than the table can hold, the last ones are taken.

        Args:
            rows: by name, tensors [n, ...] or trees of them; the same names every time.

        Raises:
            ValueError: the table does not fit into memory, or the rows are unlike earlier ones.
        """
        count = len(_first(rows))
        rows = tree_map(lambda x: x[-self.capacity :], rows)
        count = min(count, self.capacity)
        if not self._columns:
            self._columns = self._allocated(rows)
        slots = (self._next + np.arange(count)) % self.capacity  # [n]
        at = torch.from_numpy(slots)
        try:
            tree_map(
                lambda old, new: old.index_copy_(0, at.to(old.device), new), self._columns, rows
            )
        except (KeyError, RuntimeError, IndexError) as error:
            raise ValueError(f"these rows do not fit those in the replay table: {error}") from None
        self.generations[slots] += 1
        self._next = (self._next + count) % self.capacity
        self.size = min(self.capacity, self.size + count)
        return slots

    def make_room(self, rows: dict[str, Any]) -> NDArray[np.intp] | None:
        """Make room for rows like these, which `put` needs.

        Returns:
            The slots [n] of the rows that are still there; they are in slots 0..n-1 from now on, in
            this order. None: all are where they were.
        """
        return None

    def rows(self, slots: NDArray[np.intp]) -> dict[str, Any]:
        """Copies of the rows in slots [B] -> by name, tensors [B, ...]."""
        at = torch.from_numpy(slots)  # [B]
        found: dict[str, Any] = tree_map(
            lambda x: x.index_select(0, at.to(x.device)), self._columns
        )
        return found

    def oldest_first(self) -> NDArray[np.intp]:
        """The slots [size] in the order in which their rows came."""
        return (self._next - self.size + np.arange(self.size)) % self.capacity

    def clear(self) -> None:
        """Drop all rows. What was drawn before counts as written over."""
        self.generations[: self.size] += 1
        self.size = self._next = 0

    def state(self) -> dict[str, Tree]:
        """All rows as arrays on the host, and where the next one goes."""
        return {
            "columns": tree_map(lambda x: x[: self.size].cpu().numpy().copy(), self._columns),
            "next": np.array(self._next),
            "generations": self.generations[: self.size].copy(),  # [size]
        }

    def restore(self, state: dict[str, Any], device: torch.device) -> None:
        """Hold the rows of a saved state, on a device.

        Raises:
            ValueError: it is not the state of such a table.
        """
        columns: dict[str, Any] = tree_map(lambda x: torch.from_numpy(x.copy()), state["columns"])
        size, following = len(_first(columns)) if columns else 0, int(state["next"])
        alike = all(len(x) == size for _, x in flatten(state["columns"]))
        if not alike or size > self.capacity or not 0 <= following <= min(size, self.capacity - 1):
            raise ValueError(
                f"the checkpoint's replay table has {size} rows, and cannot go on in one of "
                f"{self.capacity}: set replay_capacity as it was, or save_replay = false"
            )
        self.clear()
        self._columns = {}
        if columns:
            self.put(tree_map(lambda x: x.to(device), columns))
        self._next = following
        self.generations[:size] = state["generations"]

    def _allocated(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Columns [capacity, ...] for rows like these. Memory is taken as they fill up."""
        each = sum(x[0].numel() * x.element_size() for x in _tensors(rows))
        if _first(rows).device.type == "cpu" and each * self.capacity > _MEMORY:
            most = _MEMORY // each // 2 * self._row_steps
            raise ValueError(
                f"replay_capacity = {self.capacity * self._row_steps}: so many steps, in rows of "
                f"{each} bytes, take {each * self.capacity / 1e9:.1f} GB, and this host has "
                f"{_MEMORY / 1e9:.1f} GB. Set it to {most} or less"
            )
        shape = (self.capacity,)
        columns: dict[str, Any] = tree_map(lambda x: x.new_empty(shape + x.shape[1:]), rows)
        return columns  # [capacity, ...] each


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for branch in tree.values() for tensor in _tensors(branch)]


def _first(tree: Any) -> Tensor:
    return _tensors(tree)[0]
