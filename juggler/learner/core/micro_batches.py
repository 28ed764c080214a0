"""Micro-batches: parts of a sample whose gradient would take too much memory as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Columns
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map

#: Columns without one entry for each row, by the column of their row indices.
_INDEXED = {
    c.FINAL_ROWS: c.FINALS,
    c.SEGMENT_ROWS: c.SEGMENTS,
}


def micro_batches(columns: Columns, count: int) -> list[Columns]:
    """Split columns into parts with about equally many rows, as views. Parts without a
    segment are left out: there is nothing to learn from.

    The host waits for the device here, because it has to read which truncations and segments belong
    to a part.

    Args:
        columns: [N, ...], or [K] or [S] with row indices, as `collate` makes them.
        count: the number of parts; there are never more than rows.
    """
    if count == 1:
        return [columns]
    indexed = {name: rows for rows, names in _INDEXED.items() if rows in columns for name in names}
    whole = {name: column for name, column in columns.items() if name not in indexed}
    n = len(columns[c.LIVE])
    count = min(count, n)
    parts: list[Columns] = []
    for place in range(count):
        start, stop = place * n // count, (place + 1) * n // count
        part = {
            name: tree_map(lambda x, a=start, b=stop: _some_rows(x, a, b), column)
            for name, column in whole.items()
        }
        for rows in _INDEXED.keys() & columns.keys():
            within = (columns[rows] >= start) & (columns[rows] < stop)  # [K] or [S]
            index = within.nonzero().squeeze(1)  # [k] or [s]
            for name in columns.keys() & set(_INDEXED[rows]):
                part[name] = tree_map(lambda x, i=index: x[i], columns[name])
            part[rows] = part[rows] - start
        if c.SEGMENT_ROWS not in part or len(part[c.SEGMENT_ROWS]):
            parts.append(part)
    return parts or [columns]


def _some_rows(x: Tensor, start: int, stop: int) -> Tensor:
    """Rows of x [N, ...]; of a count [] for the whole sample, all at the first row."""
    if x.ndim:
        return x[start:stop]
    return torch.zeros_like(x) if start else x


class MeanOverParts:
    """The mean of trees of tensors, weighted by their live steps; 0 where there are none.

    The means over the live steps of each part so become the mean over the whole. A tree is a
    tensor, or a map or a tuple of trees.
    """

    def __init__(self) -> None:
        self._parts = 0
        self._sums: Any = None
        self.live_steps: Any = 0  # []

    def add(self, tree: Any, live_steps: Tensor) -> None:
        """Add one part's tree and the number of its live steps []."""
        if self._parts == 1:
            self._sums = _map(lambda x: x * self.live_steps, self._sums)
        if self._parts:
            self._sums = _map(lambda x, y: x + y * live_steps, self._sums, tree)
        else:
            self._sums = tree  # as it is: a single part needs no arithmetic
        self._parts += 1
        self.live_steps = self.live_steps + live_steps  # []

    def mean(self) -> Any:
        """The mean of the trees added so far."""
        if self._parts == 1:
            return self._sums
        return _map(lambda x: x / self.live_steps.clamp(min=1), self._sums)


def _map(function: Callable[..., Tensor], *trees: Any) -> Any:
    if isinstance(trees[0], tuple):
        return tuple(_map(function, *branches) for branches in zip(*trees, strict=True))
    return tree_map(function, *trees)
