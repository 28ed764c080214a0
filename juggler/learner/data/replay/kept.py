"""What a replay keeps: its table, who is drawn from it, and its books."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from juggler.learner.data.replay.selection import Drawn, Selection
from juggler.learner.data.replay.table import Table
from juggler.runtime.wire.trees import Tree


class Kept:
    """The rows that are kept."""

    def __init__(self, table: Table, selection: Selection) -> None:
        self.table, self.selection, self._step_bytes = table, selection, 0.0
        self.due = 0.0  # rows that are still to be drawn for those that arrived
        self.new_steps = 0  # at all learners, that no draw has told of
        self.drawn = Drawn(np.zeros(0, np.intp))
        self.stale_priorities = 0  # that came too late, for rows that others had replaced
        self._waiting = 0  # steps that arrived, also before the first draw
        # Since draws may begin: rows that arrived, as this learner's share of those at all learners
        # of a group; steps that arrived at all of them; rows drawn, and samples.
        self._counts = [0.0] * 4

    def begin(self, table: Table, selection: Selection, step_bytes: float) -> None:
        """Keep rows in this table, which is empty, by this selection. Each step takes so much."""
        self.table, self.selection, self._step_bytes = table, selection, step_bytes

    def arrived(self, rows: float, steps: int, begin: float, ratio: float) -> None:
        """Note how many rows arrived, as this learner's share of those at all learners, and how
        many steps at all of them."""
        self.new_steps += steps
        self._waiting += steps
        if self._waiting >= begin:
            self.due += rows * ratio
            self._counts[0] += rows
            self._counts[1] += steps

    def may_draw(self, rows: int, least_steps: int) -> bool:
        """Whether a sample of so many rows is due, there are as many, and the table has so many
        steps, or is full."""
        self.due = min(self.due, self.selection.may_draw())
        return self.due >= rows and not self._lacks(least_steps)

    def took(self, rows: int) -> None:
        """Note that a sample of so many rows was drawn."""
        self.due -= rows
        self._counts[2] += rows
        self._counts[3] += 1

    def _lacks(self, least_steps: int) -> int:
        """How many steps are missing until the table has so many, or is full."""
        table = self.table
        missing = least_steps - table.size * table.row_steps
        return 0 if table.size == table.capacity else max(0, missing)

    def books(self, begin: int, least_steps: int) -> dict[str, float]:
        """What became of all rows that arrived: each was drawn, is waiting, or has left unused.

        Args:
            begin: how many steps must have arrived before the first draw.
            least_steps: how many must be there at each draw.
        """
        rows, steps, drawn, samples = self._counts
        selection = self.selection
        used, unused = selection.drawn_rows, selection.unused_rows
        # The other learners of a group wait for the first row of each.
        missing = max(begin - self._waiting, self._lacks(least_steps), not selection.came_rows)
        return {
            "replay_rows": float(self.table.size),
            "replay_rows_drawn": float(used),
            "replay_rows_waiting": float(selection.came_rows - used - unused),
            "replay_rows_unused": float(unused),
            "replay_steps_missing": float(missing),
            "stale_priorities": float(self.stale_priorities),
            "samples_per_insert": drawn / max(rows, 1),
            "updates_per_step": samples / max(steps, 1),
        }

    def state(self) -> dict[str, Tree]:
        return {
            "table": self.table.state(),
            "step_bytes": np.array(self._step_bytes),
            "selection": self.selection.state(),
            "counts": np.array([self.due, self.new_steps, self._waiting, *self._counts]),  # [7]
            "stale_priorities": np.array(self.stale_priorities),
        }

    def prepare(self, state: Mapping[str, Any]) -> None:
        """See that `restore` can go on from a saved state, before it takes memory for it.

        Raises:
            ValueError: it cannot, as a KeyError, TypeError, AttributeError or IndexError says, too.
        """
        if self.table.capacity:
            self.selection.prepare(state["selection"], self.table.prepare(state["table"]))
        if state["counts"].shape != (7,):
            raise ValueError(f"the checkpoint's replay has {len(state['counts'])} counts, not 7")

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a saved state, for which this was prepared."""
        if self.table.capacity:  # else no row had come
            self.table.restore(state["table"], device)
            self.selection.restore(state["selection"])
        self.due, new_steps, waiting, *self._counts = state["counts"].tolist()
        self.new_steps, self._waiting = int(new_steps), int(waiting)
        self.stale_priorities = int(state.get("stale_priorities", 0))  # older ones do not say
