"""Replay draws from kept rows; MixInReplay adds them to new samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from math import ceil, inf
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from juggler.learner.data.replay.column_storage import (
    ReplayLimits,
    any_leaf,
    bytes_of_step,
    count_of,
    must_be_rows,
    steps_of_row,
)
from juggler.learner.data.replay.table import (
    EpisodeTable,
    FrameTable,
    ReplayTable,
    Slots,
    episodes_of_rows,
    living_rows,
    resized,
    ring,
    rows_of_episodes,
    size_of,
)
from juggler.learner.data.sources import NEW_STEPS, Columns, DataSource, Sums, alone
from juggler.runtime.connectors.contexts import FRAMES
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree

#: A column [B] of a drawn sample: weight of each row in a loss.
IMPORTANCE_WEIGHTS: Final = "importance_weights"

_FORMAT, _EARLIER_FORMAT = 5, 4  # of `state`
_NONE = np.zeros(0, np.intp)


class _Keeper(DataSource):
    """A source that keeps rows in one table.

    Its random numbers depend on a seed, the number of times that it has discarded all rows, and the
    learner's rank in its group. A state has the first two. So a resumed run, whose processes have
    other seeds, makes the same draws as an uninterrupted run.

    Attributes:
        table: the rows. Its capacity is 0 before the first rows, which determine it.
    """

    _marks: tuple[str, ...] = ()  # names of the table's marks
    _counts: type[Any]  # dataclass of numbers that a checkpoint has too

    def __init__(self, room: ReplayLimits, alpha: float, seed: int, *, episodes: bool) -> None:
        self._room, self._alpha, self._saved, self._episodes = room, alpha, room.saved, episodes
        self._seed, self._beginnings, self._rank = seed, 0, 0
        self._forget()

    def _forget(self) -> None:
        """Discard all rows, and restart the draws."""
        self._step_bytes, self._began, self._pace = 0.0, False, self._counts()
        seeds = [self._seed, self._beginnings]
        self._generator = apart(np.random.Generator(np.random.PCG64(seeds)), self._rank)
        self.table = self._table(0, self._generator, framed=False)

    def draw_apart(self, rank: int) -> None:
        self._rank = rank
        if self._began:
            apart(self._generator, rank)
        else:
            self._forget()

    def clear(self) -> None:
        if not self._saved:
            self._discard()

    def state(self) -> dict[str, Tree]:
        """Return rows, if saved, and the draws' state after `clear`."""
        whole = self._saved and self._began
        beginnings = self._beginnings + (self._began and not whole)
        seeds: dict[str, Tree] = {"seed": np.array(self._seed), "beginnings": np.array(beginnings)}
        if not whole:
            return seeds
        pace, step_bytes = np.array(astuple(self._pace), np.float64), np.array(self._step_bytes)
        kept = {**self.table.state(), "step_bytes": step_bytes, "pace": pace}
        place = json.dumps(self._generator.bit_generator.state).encode()
        return {
            **seeds,
            "format": np.array(_FORMAT),
            "generator": np.frombuffer(place, np.uint8),
            "modules": {DEFAULT_MODULE: kept},
        }

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        if not state:
            return self._discard()
        own: dict[str, Any] = {}
        generator, step_bytes = np.random.Generator(np.random.PCG64()), 0.0
        # Everything is read before the first change: a wrong state leaves this source as it is.
        try:
            # A checkpoint before the first update may have fewer entries.
            seeds = int(state.get("seed", self._seed)), int(state.get("beginnings", 0))
            if self._saved and "modules" in state:
                if (found := int(state.get("format", 1))) not in (_EARLIER_FORMAT, _FORMAT):
                    raise ValueError(
                        f"the checkpoint's replay table is of format {found}, and this version of "
                        f"Juggler reads format {_FORMAT}: resume with save_replay = false "
                        "(--no-save-replay), which begins with an empty one and saves none"
                    )
                # The draws continue where they were, in a table like the saved one.
                generator.bit_generator.state = json.loads(state["generator"].tobytes())
                own = state["modules"][DEFAULT_MODULE]
                own = _from_earlier(own) if found == _EARLIER_FORMAT else own
                step_bytes, pace = float(own["step_bytes"]), self._counts(*own["pace"].tolist())
                steps = self._room.steps_of(step_bytes) if step_bytes else 0
                table = self._table(steps, generator, framed=FRAMES in own)
                if step_bytes:
                    table.prepare(own)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"the checkpoint holds no replay table: {error!r}") from None
        # From here on, nothing can fail but memory.
        self._seed, self._beginnings = seeds
        self._forget()  # memory cannot hold both the old and the new rows
        if own:
            if step_bytes:
                table.restore(own, device)
            self._generator, self.table, self._step_bytes = generator, table, step_bytes
            self._began, self._pace = True, pace

    def _discard(self) -> None:
        """Discard all rows, and start a new sequence of draws."""
        if self._began:
            self._beginnings += 1
            self._forget()

    def _make_table(self, rows: dict[str, Any]) -> None:
        """Make a table for rows like these, unless it exists."""
        if self._step_bytes:
            return
        self._room.taken_by(rows)
        each = bytes_of_step(rows)
        steps = self._room.steps_of(each, steps_of_row(rows))
        self.table = self._table(steps, self._generator, framed=FRAMES in rows)
        self._step_bytes = each

    def _table(self, steps: int, generator: np.random.Generator, *, framed: bool) -> ReplayTable:
        kind = FrameTable if framed else EpisodeTable if self._episodes else ReplayTable
        return kind(steps, self._alpha, generator, self._room.directory, self._marks)


def apart(generator: np.random.Generator, rank: int) -> np.random.Generator:
    """Jump a PCG64 ahead by rank, so learners draw differently."""
    found: Any = generator.bit_generator
    if rank:  # even a jump by 0 would discard the half of a number that a draw has left
        found.state = found.jumped(rank).state
    return generator


def _from_earlier(own: Mapping[str, Any]) -> dict[str, Any]:
    """Convert rows and counts of the earlier format, without copying the rows.

    Raises:
        ValueError: the rows are not in the order of a ring.
    """
    table, selection = own["table"], own["selection"]
    weights, following = selection["weights"], int(table["counts"][1])
    order = np.argsort(table["generations"])  # [size] slots, the oldest row first
    if not np.array_equal(order, ring(following, len(order))):
        raise ValueError(
            "the checkpoint's replay table is not in the order of arrival: resume with "
            "save_replay = false"
        )
    # Columns and marks were saved by slot as now, but draws and weights by age.
    ranks = np.argsort(order)  # [size] by slot
    pace = ("due", "count") if "due" in own else ("counts", "stale_priorities")
    return {
        **own,
        **table,
        "counts": np.array([following, *selection["rows"]]),
        "drawn": np.minimum(selection["times"], 1)[ranks],  # once, draws were counted
        "weights": weights[ranks] if len(weights) else weights,  # none without priorities
        "numbers": selection["numbers"],
        "pace": np.hstack([own[name] for name in pace]),
    }


@dataclass
class _Pace:
    """Counts of arrivals and draws, and the rows due."""

    due: float = 0.0  # rows still to be drawn for past arrivals
    new_steps: float = 0.0  # at all learners, since the last draw
    waiting: float = 0.0  # steps that arrived, including before the first draw
    # Since draws may begin: mean rows that arrived per learner of a group; steps that arrived at
    # all of them; rows drawn, and samples.
    rows: float = 0.0
    steps: float = 0.0
    drawn: float = 0.0
    samples: float = 0.0
    stale: float = 0.0  # priorities of rows that had left


class Replay(_Keeper):
    """Keeps rows in a table, and samples them at a fixed ratio.

    Samples arrive as fast as they are learned from. So the ratio holds exactly, without discarding
    anything. Fractions of a sample are carried over to the next arrival.

    Rows are drawn independently, with replacement: uniformly or, with a priority exponent α above
    0, with probability P(i) = p_i^α / Σ p_k^α, where p is a row's priority from the last
    update with it (Schaul et al. 2016, "Prioritized Experience Replay"). A new row has the largest
    priority so far. Importance weights are (N P(i))^-β, divided by the largest in the sample.

    Args:
        rows: returns the kept rows of an arriving sample: by name, tensors [n, ...] or trees of
            them; {}: none.
        capacity: maximum number of kept steps.
        size: B, rows in a drawn sample.
        ratio: average number of times that a row is drawn, if it stays long enough.
        begin: number of live steps that must have arrived before the first draw, over all learners
            of a group.
        priority_exponent: α.
        importance_exponent: β.
        saved: whether `state` holds the table. If not, a restored replay starts empty.
        seed: seed of the draws.
        episodes: whether `rows` returns results of `rows_of_episodes`; then samples are episodes.
        directory: directory for kept rows on disk; "": memory.
        memory: maximum gigabytes of kept rows; none: only `capacity` is a limit.

    Raises:
        ValueError: a number is out of range, such as size = 0, with which draws would never end.
    """

    _counts = _Pace

    def __init__(
        self,
        rows: Callable[[Columns], dict[str, Any]],
        *,
        capacity: int,
        size: int,
        ratio: float,
        begin: int = 0,
        priority_exponent: float = 0.0,
        importance_exponent: float = 0.0,
        saved: bool = True,
        seed: int = 0,
        episodes: bool = False,
        directory: str = "",
        memory: float | None = None,
    ) -> None:
        for name, count in (("capacity", capacity), ("size", size)):
            if count < 1:
                raise ValueError(f"{name} = {count} of a replay: must be at least 1")
        if not 0 < ratio < inf:
            raise ValueError(f"ratio = {ratio} of a replay: must be above 0 and finite")
        self._rows, self._size, self._ratio, self._beta = rows, size, ratio, importance_exponent
        self.keeps_frames, self.keeps_rows = not episodes, episodes
        self._taken_in, self._is_trial = 0, False
        self._ones = torch.ones(size)  # [B]
        room = ReplayLimits(capacity, memory, directory, begin, saved)
        super().__init__(room, priority_exponent, seed, episodes=episodes)

    def _forget(self) -> None:
        super()._forget()
        self._drawn = _NONE  # slots of the last draw

    def add(self, sample: Columns, sums: Sums = alone) -> Iterator[Columns]:
        """Insert a sample and yield draws, each with current priorities."""
        rows = self._rows_of(sample)
        self._began, count = True, count_of(rows)
        if count:
            self._make_table(rows)
        steps = np.count_nonzero(rows[c.LIVE].cpu().numpy()) if c.LIVE in rows else count
        totals = [count, steps, 1.0, float(count > 0 or self.table.size > 0)]
        if sums is not alone:  # all learners of a group make the same number of steps
            device = any_leaf(sample).device
            totals = sums(torch.tensor(totals, dtype=torch.float64, device=device)).tolist()
        # Rows arrive at each learner, but all of them draw at the pace of their mean.
        arrived, live, learners, filled = totals
        if count:  # only after the sums: a learner that loses its group inserts nothing
            self.table.insert(rows)
            self._taken_in += self._saved
        pace = self._pace
        pace.new_steps += round(live)
        pace.waiting += round(live)
        # Learners draw only when all of them can.
        if filled == learners and pace.waiting >= self._room.begin:
            pace.due += arrived / learners * self._ratio
            pace.rows += arrived / learners
            pace.steps += round(live)
        if self._is_trial:
            if self.table.size:
                yield self._draw()
            return
        while self.table.size and pace.due >= self._size:
            yield self._draw()

    def try_out(self) -> None:
        self._is_trial = True

    def expect(self, sample: Columns) -> float:
        return self._room.taken_by(self._rows_of(sample))

    def update_priorities(self, priorities: Tensor | None) -> None:
        """Set the priorities [B] of the last draw's remaining rows.

        Raises:
            ValueError: in a trial, the loss gave no priorities or unusable ones.
        """
        if not self._alpha:
            return
        if self._is_trial and len(self._drawn):
            self._check(priorities)
        if priorities is not None:
            values = priorities.detach().cpu().double().numpy()  # [B]
            self._pace.stale += self.table.update_priorities(self._drawn, values)

    def _check(self, given: Tensor | None) -> None:
        """Check a trial's priorities. A run ignores infinite ones and NaN."""
        if given is None:
            found = "no priorities"
        elif (wrong := given[~(given >= 0) | given.isinf()]).numel():
            found = f"the priority {wrong[0].item():.5g}"
        else:
            return
        raise ValueError(
            f"priority_exponent = {self._alpha:g}, and the loss gave {found}: "
            "return juggler.Loss(..., priorities=...) with a finite number of at least 0 for each "
            "row, such as its largest error, or set priority_exponent = 0"
        )

    def taken_in(self) -> int:
        return self._taken_in

    def metrics(self) -> Mapping[str, float]:
        return self.books()

    def books(self) -> Mapping[str, float]:
        """Return counts of rows: drawn, waiting, and dropped unused."""
        pace, table = self._pace, self.table
        if not self._began:
            return {}
        # Learners of a group wait until each of them has a row.
        missing = max(self._room.begin - pace.waiting, 0, not table.came_rows)
        return {
            "replay_rows": float(table.size),
            "replay_rows_drawn": float(table.drawn_rows),
            "replay_rows_waiting": float(table.came_rows - table.drawn_rows - table.unused_rows),
            "replay_rows_unused": float(table.unused_rows),
            "replay_steps_missing": float(missing),
            "stale_priorities": pace.stale,
            "samples_per_insert": pace.drawn / max(pace.rows, 1),
            "updates_per_step": pace.samples / max(pace.steps, 1),
        }

    def _rows_of(self, columns: Columns) -> dict[str, Any]:
        """Convert columns to table rows; frames stay deduplicated."""
        rest = {name: column for name, column in columns.items() if name != FRAMES}
        rows = self._rows(rest)
        must_be_rows(rows)
        return {**rows, FRAMES: columns[FRAMES]} if rows and FRAMES in columns else rows

    def _draw(self) -> dict[str, Any]:
        drawn, pace = self.table.sample(self._size), self._pace
        self._drawn = drawn.slots
        rows = episodes_of_rows(drawn.rows) if self._episodes else drawn.rows
        pace.due -= self._size
        pace.drawn += self._size
        pace.samples += 1
        device = any_leaf(rows).device
        # Weights are divided by the largest one, so they only make steps smaller.
        if drawn.shares is None:
            weights = self._ones = self._ones.to(device)  # [B]
        else:
            of_rows = (drawn.shares.min() / drawn.shares) ** self._beta  # [B]
            weights = torch.from_numpy(of_rows.astype(np.float32)).to(device, non_blocking=True)
        rows[IMPORTANCE_WEIGHTS] = weights
        rows[NEW_STEPS] = torch.full((), int(pace.new_steps), device=device)  # []
        pace.new_steps = 0.0
        return rows


@dataclass
class _Mixing:
    """Counts of arrivals, and the old steps due."""

    due: float = 0.0  # old steps still to be drawn; below 0: excess of earlier draws
    arrived: float = 0.0  # samples


class MixInReplay(_Keeper):
    """Adds old rows to each sample of another source.

    An arriving sample is yielded first, and then inserted into a table, so its steps are learned
    from first as new steps. Old rows are drawn uniformly among earlier arrivals, each at most once
    per sample. They are the given share of the steps, exactly in the long run: an excess is
    subtracted from the next draw. While the table has too few rows, fewer are drawn, and later
    draws do not compensate.

    Rows are kept as they arrived, with the behaviour policy's log-probabilities and the
    observations to bootstrap from (Wang et al. 2017, "Sample Efficient Actor-Critic with Experience
    Replay", section 3; Espeholt et al. 2018, "IMPALA", section 5.2.2).

    Args:
        source: decides which samples are learned from, and when. It saves none of them in a
            checkpoint.
        share: share of old steps in a sample, at least 0 and below 1.
        capacity: maximum number of kept steps.
        saved: whether `state` holds the table. If not, a restored source starts empty.
        seed: seed of the draws.
        directory: directory for kept rows on disk; "": memory.
        memory: maximum gigabytes of kept rows; none: only `capacity` is a limit.
    """

    keeps_rows = True
    _counts = _Mixing
    _marks = ("steps", "arrived")  # live steps; number of earlier samples

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
        self._source, self._old_per_new = source, share / (1 - share)
        super().__init__(
            ReplayLimits(capacity, memory, directory, saved=saved), 0.0, seed, episodes=True
        )

    def _forget(self) -> None:
        super()._forget()
        self._metrics: dict[str, float] = {}

    def add(self, sample: Columns, sums: Sums = alone) -> Iterator[Columns]:
        """Insert a sample; yield due samples with old rows added."""
        for due in self._source.add(sample, sums):
            new = sums(due[c.LIVE].sum().double()).round().long()  # [] at all learners
            yield {**self._mixed(due), NEW_STEPS: new}
        if rows := living_rows(sample):
            self._make_table(rows)
            slots, marks = self.table.insert(rows), self.table.marks
            marks["steps"][slots] = rows[c.LIVE].sum(1)[-len(slots) :].cpu().numpy()
            marks["arrived"][slots] = self._pace.arrived
        self._pace.arrived += 1
        self._began = True

    def expect(self, sample: Columns) -> float:
        return self._source.expect(sample) + self._room.taken_by(rows_of_episodes(sample))

    def try_out(self) -> None:
        self._source.try_out()

    def taken_in(self) -> int:
        return self._source.taken_in()

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def draw_apart(self, rank: int) -> None:
        self._source.draw_apart(rank)
        super().draw_apart(rank)

    def clear(self) -> None:
        self._source.clear()
        super().clear()

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        super().restore(state, device)
        self._source.clear()

    def _mixed(self, columns: Columns) -> dict[str, Any]:
        if columns[c.LIVE].ndim != 2:
            raise ValueError(
                "replay_share: old rows cannot be mixed into samples that each member of a "
                "population has of its own; set it to 0"
            )
        self._pace.due += int(columns[c.LIVE].sum()) * self._old_per_new
        # Drawn before this sample is inserted: its own rows are not old yet.
        slots, marks = self._slots_due(), self.table.marks  # [B]
        steps = marks["steps"][slots]  # [B]
        ages = (self._pace.arrived - marks["arrived"][slots]) * steps  # [B]
        self._metrics = {
            "replayed_steps": float(steps.sum()),
            "replay_age": float(ages.sum() / max(steps.sum(), 1)),
        }
        if not len(slots):
            return dict(columns)
        parts = rows_of_episodes(columns), self.table.rows(slots)
        sizes = [size_of(rows) for rows in parts]
        size = sizes[0].covering(sizes[1])
        both = (resized(rows, size, had) for rows, had in zip(parts, sizes, strict=True))
        return episodes_of_rows(tree_map(lambda *xs: torch.cat(xs), *both))

    def _slots_due(self) -> Slots:
        """Draw slots [B] of different rows with the due live steps.

        The last row may exceed them; all rows are drawn if they have fewer.
        """
        most = min(
            self.table.size, max(ceil(self._pace.due), 0)
        )  # a row has at least one live step
        slots = self._generator.choice(self.table.size, most, replace=False) if most else _NONE
        sums = self.table.marks["steps"][slots].cumsum()  # [B]
        count = int(np.searchsorted(sums, self._pace.due)) + 1
        if count > most:  # too few rows
            self._pace.due = min(self._pace.due, 0.0)
            return slots
        self._pace.due -= int(sums[count - 1])
        return slots[:count]
