"""Trees over the slots of a table: sums for draws by priority, least keys for what is in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _SlotTree:
    """Numbers by slot, in the leaves of a binary tree whose inner nodes join their two children.

    An inner node is computed anew whenever one of its children changes, so rounding errors do not
    add up. All methods take whole arrays of slots, and cost the logarithm of their number.
    """

    def __init__(self, capacity: int, empty: float, join: Callable[[Any, Any], Any]) -> None:
        self._depth = max(0, capacity - 1).bit_length()
        self._leaves = 1 << self._depth
        self._nodes = np.zeros(2 * self._leaves)  # [2 leaves]; node 1 is the root
        if empty:  # else memory is taken as slots are used
            self._nodes[:] = empty
        self._join = join

    def __getitem__(self, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """The numbers [B] of slots [B]."""
        return self._nodes[self._leaves + slots]

    def __setitem__(self, slots: NDArray[np.intp], numbers: NDArray[np.float64] | float) -> None:
        """Set the numbers [B] of slots [B]; of a slot that is named twice, the last one counts."""
        nodes, tree = self._leaves + slots, self._nodes  # [B], [2 leaves]
        tree[nodes] = numbers
        for _ in range(self._depth):
            # A parent of two of them is computed twice: faster than to find out which are.
            nodes = nodes >> 1
            tree[nodes] = self._join(tree[2 * nodes], tree[2 * nodes + 1])


class SumTree(_SlotTree):
    """Weights by slot, whose running sums can be searched.

    Args:
        capacity: the number of slots, whose weights are 0 at first.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 0.0, np.add)

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._nodes[1])

    def find(self, sums: NDArray[np.float64]) -> NDArray[np.intp]:
        """The slots [B] in which running sums [B], each in [0, total), lie.

        A slot without weight is never found, as long as there is one with weight.
        """
        rest, tree = sums.copy(), self._nodes  # [B], [2 leaves]
        nodes = np.ones(len(rest), np.intp)  # [B]
        for _ in range(self._depth):
            nodes = 2 * nodes
            left = tree[nodes]  # [B]
            # Rounding may leave a little more than the left sum for a right one of 0.
            right = ((rest >= left) & (tree[nodes + 1] > 0)) | (left == 0)  # [B]
            rest -= left * right
            nodes += right
        return nodes - self._leaves


class LeastTree(_SlotTree):
    """Keys by slot, of which the least ones can be found.

    Args:
        capacity: the number of slots, which are empty at first: their key is infinite.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, np.inf, np.minimum)

    def least(self, count: int) -> NDArray[np.intp]:
        """The slots of the `count` least keys, the least one first; fewer if fewer are not
        empty."""
        if count < 1:
            return np.zeros(0, np.intp)
        nodes, keys = np.ones(1, np.intp), self._nodes[1:2]  # [b] both, b at most 2 count
        for level in range(self._depth + 1):
            if level:
                nodes = (2 * nodes[:, None] + (0, 1)).ravel()  # [2 b]
                keys = self._nodes[nodes]
            # Those of the wanted leaves are below the least nodes of every level.
            if len(nodes) > count:
                kept = np.argpartition(keys, count - 1)[:count]  # [count]
                nodes, keys = nodes[kept], keys[kept]
        order = np.argsort(keys, kind="stable")  # [b]
        order = order[np.isfinite(keys[order])]
        slots: NDArray[np.intp] = nodes[order] - self._leaves
        return slots
