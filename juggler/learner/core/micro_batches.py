"""Micro-batches: a sample in parts by rows, where the whole's gradient takes too much memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from juggler.learner.core.learner_core import Columns
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map

#: Columns that are not one entry for each row, by the one that says which row they belong to.
_INDEXED = {
    c.FINAL_ROWS: c.FINALS,
    c.SEGMENT_ROWS: c.SEGMENTS,
}


def micro_batches(columns: Columns, count: int) -> list[Columns]:
    """One module's part of a sample in parts of about equally many rows, as views. Parts that no
    segment is in are left out: there is nothing to learn from.

    Which truncations and segments belong to a part the host has to ask the device: it waits here.

    Args:
        columns: [N, ...], or [K] or [S] with indices of rows, as `collate` makes them.
        count: of parts; as many as there are rows, where these are fewer.
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
        part = {name: tree_map(lambda x, a=start, b=stop: x[a:b], x) for name, x in whole.items()}
        for rows in _INDEXED.keys() & columns.keys():
            within = (columns[rows] >= start) & (columns[rows] < stop)  # [K] or [S]
            index = within.nonzero().squeeze(1)  # [k] or [s]
            for name in _INDEXED[rows]:
                part[name] = tree_map(lambda x, i=index: x[i], columns[name])
            part[rows] = part[rows] - start
        if c.SEGMENT_ROWS not in part or len(part[c.SEGMENT_ROWS]):
            parts.append(part)
    return parts or [columns]


class MeanOverParts:
    """A mean of trees of tensors, each with the weight of its live steps; 0 where there are none.

    What is a mean over live steps in every part is then the one over the whole. A tree is a tensor,
    or a map or a tuple of trees.
    """

    def __init__(self) -> None:
        self._parts = 0
        self._sums: Any = None
        self.live_steps: Any = 0  # []

    def add(self, tree: Any, live_steps: Tensor) -> None:
        """One part's tree, and how many live steps [] it has."""
        if self._parts == 1:
            self._sums = _map(lambda x: x * self.live_steps, self._sums)
        if self._parts:
            self._sums = _map(lambda x, y: x + y * live_steps, self._sums, tree)
        else:
            self._sums = tree  # as it is, where no other comes
        self._parts += 1
        self.live_steps = self.live_steps + live_steps  # []

    def mean(self) -> Any:
        """Of those added so far."""
        if self._parts == 1:
            return self._sums
        return _map(lambda x: x / self.live_steps.clamp(min=1), self._sums)


def _map(function: Callable[..., Tensor], *trees: Any) -> Any:
    if isinstance(trees[0], tuple):
        return tuple(_map(function, *branches) for branches in zip(*trees, strict=True))
    return tree_map(function, *trees)
