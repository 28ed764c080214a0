"""EpisodeTable: a table of rows of episodes, which have room for the longest of them so far."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from juggler.learner.data.replay.episode_rows import Size, resized, size_of
from juggler.learner.data.replay.table import Table


class EpisodeTable(Table):
    """Keeps the newest rows of episodes, as `rows_of_episodes` makes them.

    All rows take the memory of the longest one so far. When a longer one comes, all get room for as
    much, and fewer of them fit.

    Args:
        steps: the most steps, each row's counted as those of the longest one.
    """

    def __init__(self, steps: int) -> None:
        self._all_steps = steps
        super().__init__(steps)
        self._size = Size(0, 0, 0)

    def make_room(self, rows: dict[str, Any]) -> NDArray[np.intp] | None:
        size = self._size.covering(size_of(rows))
        if size == self._size:
            return None
        kept = self.oldest_first()[-max(1, self._all_steps // size.steps) :]  # [n]
        held = self.rows(kept) if len(kept) else {}
        written = int(self.generations.max())
        self._begin(size)
        self.generations += written  # what was drawn before is in no slot any more
        if held:
            self.put(held)
        return kept

    def put(self, rows: dict[str, Any]) -> NDArray[np.intp]:
        return super().put(resized(rows, self._size))

    def restore(self, state: dict[str, Any], device: torch.device) -> None:
        if state["columns"]:
            self._begin(size_of(state["columns"]))
        super().restore(state, device)

    def _begin(self, size: Size) -> None:
        """An empty table whose rows have room for so much."""
        super().__init__(max(1, self._all_steps // max(1, size.steps)), row_steps=size.steps)
        self._size = size
