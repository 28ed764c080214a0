"""EpisodeTable: a table of rows of episodes, which have room for the longest of them so far."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.learner.data.replay.episode_rows import Size, resized, size_of
from juggler.learner.data.replay.table import Leaving, Table

_AT_ONCE = 64  # rows that are copied together


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
        too_many = self.size - max(1, self._all_steps // size.steps)
        if too_many > 0:
            self._leave(leaving(too_many) if leaving else self.oldest_first()[:too_many])
        return self._begin_again(size)

    def put_in_order(self) -> NDArray[np.intp]:
        """Have the rows one behind the other as they came, as in a new table -> the slots [n] in
        which they were."""
        return self._begin_again(self._size)

    def _begin_again(self, size: Size) -> NDArray[np.intp]:
        """Have room for so much in each row -> the slots [n] of the rows, which are in slots
        0..n-1 from now on."""
        kept, came, before = self.oldest_first(), self._came, self._columns  # [n]
        self._begin(size)
        self._came = came  # what was drawn before is in no slot any more
        if before is not None:  # a table on disk may be larger than the memory
            for first in range(0, len(kept), _AT_ONCE):
                self.put(before.take(kept[first : first + _AT_ONCE]))
        return kept

    def put(self, rows: dict[str, Any], leaving: Leaving | None = None) -> NDArray[np.intp]:
        return super().put(resized(rows, self._size), leaving)

    def prepare(self, state: dict[str, Any]) -> int:
        if state["columns"]:
            self._begin(size_of(state["columns"]))
        return super().prepare(state)

    def _begin(self, size: Size) -> None:
        """An empty table whose rows have room for so much."""
        capacity, left = max(1, self._all_steps // max(1, size.steps)), self.left
        super().__init__(capacity, row_steps=size.steps, directory=self._directory)
        self._size, self.left = size, left
