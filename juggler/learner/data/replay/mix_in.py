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
from juggler.learner.data.replay.generators import Draws, go_on_from, words_of
from juggler.learner.data.replay.room import Room, bytes_of_step, steps_of_row
from juggler.learner.data.sources import NEW_STEPS, Columns, DataSource, Sums, alone
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.trees import Tree

_NONE = np.zeros(0, np.intp)


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
        source: decides which samples are learned from, and when. It keeps none of them in a
            checkpoint.
        share: of old steps among all steps of a sample, from 0 to below 1.
        capacity: the most steps that are kept.
        saved: whether `state` holds the table. Else whoever restores it begins with an empty one.
        seed: of the draws.
        directory: where kept rows lie on disk; "": in memory.
        memory: the most gigabytes that kept rows take; none: what `capacity` takes.
    """

    keeps_rows = True

    def __init__(
        self,
        source: DataSource,
        *,
        share: float,
        capacity: int,
        saved: bool = False,
        seed: int = 0,
        directory: str = "",
        memory: float | None = None,
    ) -> None:
        self._source, self._saved, self._draws = source, saved, Draws(seed)
        self._room = Room(capacity, memory, directory, saved=saved)
        self._old_per_new = share / (1 - share)
        self._kept = _Kept(self._room)
        self._arrived = 0  # samples
        self._told: Mapping[str, float] = {}

    def add(self, sample: Columns, sums: Sums = alone) -> Iterator[Columns]:
        """Take a sample, and give those that are due, with old rows added to each."""
        for due in self._source.add(sample, sums):
            live = due[c.LIVE].sum().double()  # []
            new = sums(live).round().long()  # [] at all learners
            yield {**self._mixed(due), NEW_STEPS: new}
        if rows := living_rows(sample):
            self._kept.put(rows, self._arrived)
        self._arrived += 1

    def expect(self, sample: Columns) -> float:
        return self._source.expect(sample) + self._room.taken_by(rows_of_episodes(sample))

    def try_out(self) -> None:
        self._source.try_out()

    def why_alone(self) -> str:
        return self._source.why_alone()

    def taken_in(self) -> int:
        return self._source.taken_in()

    def metrics(self) -> Mapping[str, float]:
        return self._told

    def draw_apart(self, rank: int) -> None:
        self._source.draw_apart(rank)
        self._draws.draw_apart(rank, going_on=self._arrived > 0)

    def clear(self) -> None:
        self._source.clear()
        if not self._saved:
            self._discard()

    def state(self) -> dict[str, Tree]:
        """Without the table, who goes on from here draws what this source does after `clear`."""
        if not self._saved:
            return self._draws.state(anew=self._arrived > 0)
        return {
            **self._draws.state(anew=False),
            "generator": words_of(self._draws.generator),
            "arrived": np.array(self._arrived),
            "modules": {DEFAULT_MODULE: self._kept.state()} if self._arrived else {},
        }

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        if not state:
            self._source.clear()
            return self._discard()
        kept, saved = _Kept(self._room), None
        try:
            draws, arrived = self._draws.restored(state), 0
            if self._saved and "modules" in state:
                saved, arrived = state["modules"].get(DEFAULT_MODULE), int(state["arrived"])
                go_on_from(draws.generator, state["generator"])
            if saved is not None:
                kept.prepare(saved)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"the checkpoint holds no table of old rows: {error!r}") from None
        self._source.clear()
        self._draws, self._arrived, self._told = draws, arrived, {}
        self._kept = _Kept(self._room)  # there is no memory for rows from before as well
        if saved is not None:
            kept.restore(saved, device)
        self._kept = kept

    def _discard(self) -> None:
        """Keep no rows, and draw others than from those that were kept."""
        if self._arrived:
            self._kept, self._told, self._arrived = _Kept(self._room), {}, 0
            self._draws.begin_anew()

    def _mixed(self, columns: Columns) -> dict[str, Any]:
        if columns[c.LIVE].ndim != 2:
            raise ValueError(
                "replay_share: old rows cannot be mixed into samples that each member of a "
                "population has of its own; set it to 0"
            )
        kept = self._kept
        kept.due += int(columns[c.LIVE].sum()) * self._old_per_new
        slots = kept.draw(self._draws.generator)  # [B]
        steps = kept.steps[slots].sum()
        ages = (self._arrived - kept.arrived[slots]) * kept.steps[slots]  # [B]
        self._told = {
            "replayed_steps": float(steps),
            "replay_age": float(ages.sum() / max(steps, 1)),
        }
        if not len(slots):
            return dict(columns)
        new, old = rows_of_episodes(columns), kept.table.rows(slots)
        sizes = size_of(new), size_of(old)
        size = sizes[0].covering(sizes[1])
        parts = [resized(rows, size, had) for rows, had in zip((new, old), sizes, strict=True)]
        return episodes_of_rows(joined(parts))


class _Kept:
    """The rows that are kept.

    Attributes:
        table: the rows.
        steps: [C] live steps of the row in each slot.
        arrived: [C] how many samples had arrived before it.
        due: live steps of old rows that are still to be drawn; below 0: that were drawn too many.
    """

    table: EpisodeTable
    steps: NDArray[np.int64]
    arrived: NDArray[np.int64]

    def __init__(self, room: Room) -> None:
        self._room = room
        self._begin(0, 0.0)  # the first rows tell how many there may be
        self.due = 0.0

    def put(self, rows: dict[str, Any], arrived: int) -> None:
        """Keep some rows that each have a live step."""
        if not self.table.steps:
            self._room.taken_by(rows)
            each = bytes_of_step(rows)
            self._begin(self._room.steps_of(each, steps_of_row(rows)), each)
        moved = self.table.make_room(rows)
        if moved is not None:
            self._follow(moved)
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

    def state(self) -> dict[str, Tree]:
        used = self.table.used
        return {
            "table": self.table.state(),
            "step_bytes": np.array(self._step_bytes),
            "steps": self.steps[:used].copy(),  # [u]
            "arrived": self.arrived[:used].copy(),  # [u]
            "due": np.array(self.due),
        }

    def prepare(self, state: Mapping[str, Any]) -> None:
        """See that `restore` can go on from a saved state, before it takes memory for it.

        Raises:
            ValueError: it is not the state of such rows, or has more of them than have room.
        """
        self.due = float(state["due"])
        if not (step_bytes := float(state["step_bytes"])):
            return
        self._begin(self._room.steps_of(step_bytes), step_bytes)
        self.table.prepare(state["table"])
        used = len(state["table"]["generations"])
        if not state["steps"].shape == state["arrived"].shape == (used,):
            raise ValueError(f"the checkpoint's table of old rows has other numbers than {used}")

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a saved state, for which this was prepared."""
        if not self._step_bytes:
            return
        self.table.restore(state["table"], device)
        self.steps = np.zeros(self.table.capacity, np.int64)  # [C]
        self.arrived = np.zeros(self.table.capacity, np.int64)  # [C]
        self.steps[: self.table.used] = state["steps"]
        self.arrived[: self.table.used] = state["arrived"]
        if not self.table.is_ring:  # there is more room than there was
            self._follow(self.table.put_in_order())

    def _begin(self, steps: int, step_bytes: float) -> None:
        """Keep rows in an empty table of so many steps, each of so many bytes."""
        self.table, self._step_bytes = EpisodeTable(steps, self._room.directory), step_bytes
        self.steps = self.arrived = np.zeros(self.table.capacity, np.int64)  # [C]

    def _follow(self, slots: NDArray[np.intp]) -> None:
        """The table has moved the rows in slots [n] to 0..n-1."""
        self.steps, self.arrived = self._moved(self.steps, slots), self._moved(self.arrived, slots)

    def _moved(self, numbers: NDArray[np.int64], slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """Numbers of rows [C] after those in slots [n] have moved to slots 0..n-1."""
        new = np.zeros(self.table.capacity, np.int64)  # [C]
        new[: len(slots)] = numbers[slots]
        return new
