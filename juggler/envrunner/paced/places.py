"""Growing trees of arrays with a place for each agent or row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.structures import tree_map

#: So many places are written as items; for fewer of them, it takes longer to see them so.
_MANY = 128


def grown(tree: Any, capacity: int) -> Any:
    """A tree of arrays [S, ...], extended with zeros to [capacity, ...]."""

    def more(array: NDArray[Any]) -> NDArray[Any]:
        room = np.zeros((capacity, *array.shape[1:]), array.dtype)
        room[: len(array)] = array
        return room

    return tree_map(more, tree)


def room_for(tree: Any, capacity: int) -> Any:
    """Zeros [capacity, ...] for rows like those of a tree [B, ...]."""
    return tree_map(
        lambda array: np.zeros((capacity, *array.shape[1:]), array.dtype),
        tree,
    )


def take(tree: Any, places: Any) -> Any:
    """Copies of places [B] of a tree [S, ...] -> [B, ...]; views, if the places are a slice."""
    if isinstance(tree, np.ndarray):
        if isinstance(places, np.ndarray):  # this is several times as fast as tree[places]
            return tree.take(places.nonzero()[0] if places.dtype == np.bool_ else places, 0)
        return tree[places]
    return {key: take(branch, places) for key, branch in tree.items()}


def put(tree: Any, places: Any, values: Any) -> None:
    """Write [B, ...] into places [B] of a tree [S, ...]."""
    if isinstance(tree, np.ndarray):
        if tree.ndim > 1 and isinstance(places, np.ndarray) and len(places) >= _MANY:
            tree, values = _items(tree, values)
        tree[places] = values
    else:
        for key, branch in tree.items():
            put(branch, places, values[key])


def _items(tree: NDArray[Any], values: Any) -> tuple[NDArray[Any], Any]:
    """The same arrays, with one item [S] and [B] for everything at a place, where they can be seen
    so: NumPy writes many of these several times as fast."""
    if not (
        isinstance(values, np.ndarray)
        and values.dtype == tree.dtype
        and values.shape[1:] == tree.shape[1:]
        and tree.flags.c_contiguous
        and values.flags.c_contiguous
        and tree.size
        and values.size
    ):
        return tree, values
    item = f"V{tree.nbytes // len(tree)}"
    of_tree = tree.reshape(len(tree), -1).view(item)[:, 0]  # [S]
    return of_tree, values.reshape(len(values), -1).view(item)[:, 0]  # [B]


class Places:
    """Numbers from 0 that are taken and given back, the lowest first.

    Args:
        capacity: how many there are at first; see `grow`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def grow(self, more: int) -> bool:
        """Make sure that so many are free. True: the capacity has grown."""
        before = self.capacity
        while len(self._free) < more:
            new = range(self.capacity, 2 * self.capacity)
            self._free = [*reversed(new), *self._free]
            self.capacity *= 2
        return self.capacity != before

    def take(self, count: int) -> list[int]:
        """Take so many places; `grow` makes sure that they are there."""
        left = len(self._free) - count
        taken = self._free[left:]
        del self._free[left:]
        return taken[::-1]

    def give_back(self, *places: int) -> None:
        self._free += places
