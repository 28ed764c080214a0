"""Trees over the slots of a table: sums for draws by priority, least keys for what is in order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

#: Children of an inner node. NumPy joins many at once in little more time than two, and a tree of
#: many children has few levels: five for a million slots, where pairs would have twenty.
_WIDTH = 16


class _SlotTree:
    """Numbers by slot, in the leaves of a tree whose inner nodes join their children.

    An inner node is computed anew whenever one of its children changes, so rounding errors do not
    add up. All methods take whole arrays of slots, and cost the logarithm of their number.
    """

    def __init__(self, capacity: int, empty: float, join: np.ufunc) -> None:
        self._join = join
        self._levels: list[NDArray[np.float64]] = []  # [n] each, of which the last has the root
        count = max(1, capacity)
        while count > 1 or not self._levels:
            count = -(-count // _WIDTH)  # nodes that join these
            level = np.zeros(count * _WIDTH)  # memory is taken as slots are used
            if empty:
                level[:] = empty
            self._levels.append(level)
        self._levels.append(np.full(1, empty))

    def __getitem__(self, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """The numbers [B] of slots [B]."""
        return self._levels[0][slots]

    def __setitem__(self, slots: NDArray[np.intp], numbers: NDArray[np.float64] | float) -> None:
        """Set the numbers [B] of slots [B]; of a slot that is named twice, the last one counts."""
        self._levels[0][slots] = numbers
        nodes, of_runs = slots, True
        for below, level in pairwise(self._levels):
            nodes = nodes // _WIDTH  # [b]
            if of_runs:  # successive slots have the same parents
                differs = np.ones(len(nodes), np.bool_)  # [b]
                np.not_equal(nodes[1:], nodes[:-1], out=differs[1:])
                before, nodes = len(nodes), nodes[differs]
                of_runs = len(nodes) < before
            children = below.reshape(-1, _WIDTH).take(nodes, 0)  # [b, W]
            level[nodes] = self._join.reduce(children.T.copy(), axis=0)  # faster than axis 1


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
        return float(self._levels[-1][0])

    def find(self, sums: NDArray[np.float64]) -> NDArray[np.intp]:
        """The slots [B] in which running sums [B], each in [0, total), lie.

        A slot without weight is never found, as long as there is one with weight.
        """
        rest, rows = sums.copy(), np.arange(len(sums))  # [B] both
        nodes = np.zeros(len(sums), np.intp)  # [B]
        running = np.zeros((_WIDTH + 1, len(sums)))  # [W + 1, B] sums of the children before each
        for level in reversed(self._levels[:-1]):
            children = level.reshape(-1, _WIDTH).take(nodes, 0).T  # [W, B]
            for place in range(_WIDTH):  # faster than `cumsum`
                np.add(running[place], children[place], out=running[place + 1])
            places = (running[1:] <= rest).sum(0)  # [B]
            # Rounding may leave a little more than there is: then it is the last one with weight.
            for row in np.flatnonzero(places == _WIDTH):
                places[row] = np.flatnonzero(children[:, row])[-1:].sum()
            rest -= running[places, rows]
            nodes = nodes * _WIDTH + places
        return nodes


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
        nodes, keys = np.zeros(1, np.intp), self._levels[-1]  # [b] both
        for level in reversed(self._levels[:-1]):
            nodes = nodes[np.isfinite(keys)]  # below others there is nothing
            nodes = (nodes[:, None] * _WIDTH + np.arange(_WIDTH)).ravel()  # [W b]
            keys = level[nodes]
            # Those of the wanted leaves are below the least nodes of every level.
            if len(nodes) > count:
                kept = np.argpartition(keys, count - 1)[:count]  # [count]
                nodes, keys = nodes[kept], keys[kept]
        order = np.argsort(keys, kind="stable")  # [b]
        order = order[np.isfinite(keys[order])]
        slots: NDArray[np.intp] = nodes[order]
        return slots
