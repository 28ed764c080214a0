"""MixInReplay: a source that adds kept rows to every sample of another source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from juggler.learner.data.replay.episode_rows import (
    episodes_of_rows,
    joined,
    living_rows,
    resized,
    rows_of_episodes,
    size_of,
)
from juggler.learner.data.replay.episode_table import EpisodeTable
from juggler.learner.data.replay.memory_columns import bytes_of_step, must_fit
from juggler.learner.data.sources import NEW_STEPS, Columns, DataSource, Sample, Sums, alone
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.trees import Tree


class MixInReplay(DataSource):
    """Gives the samples of another source, each with older rows beside its own.

    A sample that arrives is given as that source gives it, and put into a table afterwards. So its
    steps are learned from once as new ones, before they are old. Old rows are drawn uniformly, each
    at most once for a sample, among those that arrived before. They are the given share of the
    steps, exactly in the long run: what one draw has too much is left out of the next. While the
    table has too few rows, there are fewer old ones, and none are added later to make up for it.

    Rows are kept as they arrived, with the behaviour policy's log-probabilities and the
    observations to bootstrap from (Wang et al. 2017, "Sample Efficient Actor-Critic with Experience
    Replay", section 3; Espeholt et al. 2018, "IMPALA", section 5.2.2).

    Args:
        source: decides which samples are learned from, and when.
        share: of old steps among all steps of a sample, from 0 to below 1.
        capacity: the most steps of a module that are kept.
        seed: of the draws.
    """

    def __init__(self, source: DataSource, *, share: float, capacity: int, seed: int = 0) -> None:
        self._source, self._capacity, self._seed = source, capacity, seed
        self._old_per_new = share / (1 - share)
        self._start()

    def add(self, sample: Sample, sums: Sums = alone) -> Iterator[Sample]:
        """Take a sample, and give those that are due, with old rows added to each."""
        for due in self._source.add(sample, sums):
            live = torch.stack([columns[c.LIVE].sum() for columns in due.values()])  # [M]
            new = sums(live.double()).round().long()  # [M] at all learners
            yield {
                module_id: {**self._mixed(module_id, columns), NEW_STEPS: new[place]}
                for place, (module_id, columns) in enumerate(due.items())
            }
        for module_id, columns in sample.items():
            if rows := living_rows(columns):
                self._kept(module_id).put(rows, self._arrived)
        self._arrived += 1

    def expect(self, sample: Sample) -> None:
        self._source.expect(sample)
        for columns in sample.values():
            must_fit(self._capacity, bytes_of_step(rows_of_episodes(columns)))

    def metrics(self) -> Mapping[str, Mapping[str, float]]:
        return self._told

    def clear(self) -> None:
        self._source.clear()
        self._start()

    def state(self) -> dict[str, Tree]:
        """Of the table nothing: who goes on from here fills one anew, with the same draws."""
        return {"seed": np.array(self._seed)}

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        try:
            self._seed = int(state.get("seed", self._seed))
        except TypeError as error:
            raise ValueError(f"the checkpoint holds no seed of old rows: {error}") from None
        self.clear()

    def _start(self) -> None:
        self._modules: dict[str, _Kept] = {}
        self._generator = np.random.Generator(np.random.PCG64(self._seed))
        self._arrived = 0  # samples
        self._told: dict[str, Mapping[str, float]] = {}

    def _kept(self, module_id: str) -> _Kept:
        if module_id not in self._modules:
            self._modules[module_id] = _Kept(self._capacity)
        return self._modules[module_id]

    def _mixed(self, module_id: str, columns: Columns) -> dict[str, Any]:
        if columns[c.LIVE].ndim != 2:
            raise ValueError(
                "replay_share: old rows cannot be mixed into samples that each member of a "
                "population has of its own; set it to 0"
            )
        kept = self._kept(module_id)
        kept.due += int(columns[c.LIVE].sum()) * self._old_per_new
        slots = kept.draw(self._generator)  # [B]
        steps = kept.steps[slots].sum()
        ages = (self._arrived - kept.arrived[slots]) * kept.steps[slots]  # [B]
        self._told[module_id] = {
            "replayed_steps": float(steps),
            "replay_age": float(ages.sum() / max(steps, 1)),
        }
        if not len(slots):
            return dict(columns)
        new, old = rows_of_episodes(columns), kept.table.rows(slots)
        size = size_of(new).covering(size_of(old))
        return episodes_of_rows(joined([resized(new, size), resized(old, size)]))


class _Kept:
    """What is kept of one module's rows.

    Attributes:
        table: the rows.
        steps: [C] live steps of the row in each slot.
        arrived: [C] how many samples had arrived before it.
        due: live steps of old rows that are still to be drawn; below 0: that were drawn too many.
    """

    table: EpisodeTable
    steps: NDArray[np.int64]
    arrived: NDArray[np.int64]

    def __init__(self, capacity: int) -> None:
        self.table = EpisodeTable(capacity)
        self.steps = self.arrived = np.zeros(self.table.capacity, np.int64)  # [C]
        self.due = 0.0

    def put(self, rows: dict[str, Any], arrived: int) -> None:
        """Keep some rows that each have a live step."""
        moved = self.table.make_room(rows)
        if moved is not None:
            self.steps, self.arrived = (
                self._moved(self.steps, moved),
                self._moved(self.arrived, moved),
            )
        slots = self.table.put(rows)  # [n]
        self.steps[slots] = rows[c.LIVE].sum(1)[-len(slots) :].cpu().numpy()
        self.arrived[slots] = arrived

    def draw(self, generator: np.random.Generator) -> NDArray[np.intp]:
        """Slots [B] of different rows with as many live steps as are due, or a part of a row more;
        all that there are if these are fewer."""
        most = min(self.table.size, max(ceil(self.due), 0))  # a row has at least one live step
        slots = generator.choice(self.table.size, most, replace=False) if most else _NONE
        sums = self.steps[slots].cumsum()  # [B]
        count = int(np.searchsorted(sums, self.due)) + 1
        if count > most:  # there are too few
            self.due = min(self.due, 0.0)
            return slots
        self.due -= int(sums[count - 1])
        return slots[:count]

    def _moved(self, numbers: NDArray[np.int64], slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """Numbers of rows [C] after those in slots [n] have moved to slots 0..n-1."""
        new = np.zeros(self.table.capacity, np.int64)  # [C]
        new[: len(slots)] = numbers[slots]
        return new


_NONE = np.zeros(0, np.intp)
