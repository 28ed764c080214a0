"""A tree of sums, for draws in proportion to priorities."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class SumTree:
    """Weights by slot, whose running sums can be searched in the logarithm of their number.

    Every inner node is the sum of its two children, computed anew whenever one of them changes, so
    rounding errors do not add up. All methods take whole arrays of slots.

    Args:
        capacity: the number of slots.
    """

    def __init__(self, capacity: int) -> None:
        self._depth = max(0, capacity - 1).bit_length()
        self._leaves = 1 << self._depth
        self._nodes = np.zeros(2 * self._leaves)  # [2 leaves]; node 1 is the root

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._nodes[1])

    def __getitem__(self, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """The weights [B] of slots [B]."""
        return self._nodes[self._leaves + slots]

    def __setitem__(self, slots: NDArray[np.intp], weights: NDArray[np.float64]) -> None:
        """Set the weights [B] of slots [B]; of a slot that is named twice, the last one counts."""
        nodes, tree = self._leaves + slots, self._nodes  # [B], [2 leaves]
        tree[nodes] = weights
        for _ in range(self._depth):
            # A parent of two of them is computed twice: faster than to find out which are.
            nodes = nodes >> 1
            tree[nodes] = tree[2 * nodes] + tree[2 * nodes + 1]

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
