"""EpisodeTable: a table of rows of episodes, which have room for the longest of them so far."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.learner.data.replay.episode_rows import (
    Size,
    entry_columns,
    one_by_one,
    resized,
    size_of,
)
from juggler.learner.data.replay.memory_columns import MemoryColumns, runs_of
from juggler.learner.data.replay.table import Leaving, Table

_AT_ONCE = 64  # rows that are copied together
_NONE = np.zeros(0, np.intp)


class EpisodeTable(Table):
    """Keeps the newest rows of episodes, as `rows_of_episodes` makes them.

    All rows take the memory of the longest one so far. When a longer one comes, all get room for as
    much, and fewer of them fit.

    Args:
        steps: the most steps, each row's counted as those of the longest one.
    """

    def __init__(self, steps: int, directory: str = "") -> None:
        self._all_steps = steps
        super().__init__(steps, directory=directory)
        self._size = Size(0, 0, 0)

    @property
    def steps(self) -> int:
        return self._all_steps

    def make_room(
        self, rows: dict[str, Any], leaving: Leaving | None = None
    ) -> NDArray[np.intp] | None:
        size = self._size.covering(size_of(rows))
        if size == self._size:
            return None
        if size.steps == self._size.steps:
            self._widen(size)
            return None
        gone, too_many = _NONE, self.size - self._capacity_for(size)
        if too_many > 0:
            gone = leaving(too_many) if leaving else self.oldest_first()[:too_many]
        return self._begin_again(size, gone)

    def put_in_order(self) -> NDArray[np.intp]:
        """Have the rows one behind the other as they came, as in a new table -> the slots [n] in
        which they were."""
        return self._begin_again(self._size, _NONE)

    def _widen(self, size: Size) -> None:
        """Have room for more entries in each row, which stay where they are: the columns of these
        entries alone are made anew, since the others may be nearly all of the memory."""
        if self._columns is not None:
            slots, names = self.oldest_first(), entry_columns(self._size, size)
            self._make_anew(names, size, slots, slots, self.capacity)
        self._size = size

    def _begin_again(self, size: Size, gone: NDArray[np.intp]) -> NDArray[np.intp]:
        """Have room for so much in each row, without those in slots [g] -> the slots [n] of the
        others, which are in slots 0..n-1 from now on."""
        kept = self.oldest_first()  # [n + g]
        kept, came = kept[~np.isin(kept, gone)], self._came
        if self._columns is not None:
            places, capacity = np.arange(len(kept)), self._capacity_for(size)
            self._make_anew(self._columns.names, size, kept, places, capacity)
        columns = self._columns
        self._leave(gone)
        self._begin(size)
        self._columns = columns
        self.size = self.used = len(kept)
        self._next = self.used % self.capacity
        self._came = came + len(kept)  # what was drawn before is in no slot any more
        self.generations[: self.used] = np.arange(came + 1, self._came + 1)
        return kept

    def _make_anew(
        self,
        names: Collection[str],
        size: Size,
        slots: NDArray[np.intp],
        places: NDArray[np.intp],
        capacity: int,
    ) -> None:
        """Make columns of these names anew, with room for so much in each row, and with the rows of
        slots [n] in `places` [n]: one after the other, so that no more than one is there twice.

        If there is no memory for the first, which is the largest, all rows stay. If there is none
        for another one, all leave.
        """
        assert self._columns is not None
        begun = False
        for name, needed in one_by_one(self._columns.only(names).take(_NONE)).items():
            try:
                made = self._made_anew(name, needed, size, slots, places, capacity)
            except BaseException:
                if begun:
                    self._leave(self.oldest_first())
                    self.clear()
                    self._columns = None
                raise
            self._columns = self._columns.replaced(made)
            begun = True

    def _made_anew(
        self,
        name: str,
        needed: Collection[str],
        size: Size,
        slots: NDArray[np.intp],
        places: NDArray[np.intp],
        capacity: int,
    ) -> MemoryColumns:
        """The column of this name, for which those that are `needed` are read."""
        assert self._columns is not None
        read = self._columns.only(needed)

        def rows(some: NDArray[np.intp]) -> dict[str, Any]:
            return {name: resized(read.take(some), size, self._size)[name]}

        made = MemoryColumns(rows(_NONE), capacity, self._directory)
        for first in range(0, len(slots), _AT_ONCE):  # on disk, they may be more than the memory
            part = slice(first, first + _AT_ONCE)
            made.write(places[part], runs_of(places[part]), made.checked(rows(slots[part])))
        return made

    def put(self, rows: dict[str, Any], leaving: Leaving | None = None) -> NDArray[np.intp]:
        return super().put(resized(rows, self._size, size_of(rows)), leaving)

    def prepare(self, state: dict[str, Any]) -> int:
        if state["columns"]:
            self._begin(size_of(state["columns"]))
        return super().prepare(state)

    def _begin(self, size: Size) -> None:
        """An empty table whose rows have room for so much."""
        left = self.left
        super().__init__(self._capacity_for(size), row_steps=size.steps, directory=self._directory)
        self._size, self.left = size, left

    def _capacity_for(self, size: Size) -> int:
        return max(1, self._all_steps // max(1, size.steps))
