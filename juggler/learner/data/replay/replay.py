"""Replay: a source that keeps what arrives, and draws from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from juggler.learner.data.replay.frame_table import FrameTable
from juggler.learner.data.replay.generators import Draws, go_on_from, words_of
from juggler.learner.data.replay.kept import Kept
from juggler.learner.data.replay.memory_columns import any_leaf, must_be_rows
from juggler.learner.data.replay.room import Room, bytes_of_step, steps_of_row
from juggler.learner.data.replay.rules import Remover, Rules, Selector
from juggler.learner.data.replay.selection import Selection
from juggler.learner.data.replay.table import Table
from juggler.learner.data.sources import NEW_STEPS, Columns, DataSource, Sums, alone
from juggler.runtime.connectors.frame_stack import FRAMES
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.trees import Tree

#: A column of a drawn sample: the weight of each row in a loss [B].
IMPORTANCE_WEIGHTS: Final = "importance_weights"

_FORMAT = 3  # of `state`


class MakeTable(Protocol):
    """Makes an empty table of so many steps, in a directory or, if that is "", in memory."""

    def __call__(self, steps: int, /, *, directory: str = "") -> Table: ...


class Replay(DataSource):
    """Keeps rows in a table, and draws samples from it at a fixed ratio to what arrives.

    Samples arrive as fast as they are learned from. So the ratio holds exactly, whoever is faster,
    and nothing is thrown away for it. What is left of an arrival that is no whole sample is carried
    over to the next one. Only where each row may be drawn a limited number of times, and no row is
    left, are draws not made up for later.

    At random, rows are drawn independently, with replacement: uniformly or, with a priority
    exponent α above 0, with probability P(i) = p_i^α / Σ p_k^α, where p is the priority that the
    last step gave a row (Schaul et al. 2016, "Prioritized Experience Replay"). A new row has the
    largest priority that was ever given. Importance weights are (N P(i))^-β, divided by the largest
    in the sample.

    With the oldest rows first, each of them once, it is a queue.

    Args:
        rows: what is kept of an arriving sample: by name, tensors [n, ...] or trees of them; {}:
            nothing.
        capacity: the most steps that are kept.
        size: B, rows in a drawn sample.
        ratio: how often a row is drawn on average, if it stays for long.
        begin: how many live steps must have arrived before the first draw, at all learners of a
            group; with `max_times_sampled`, also how many must be there at each draw, with those
            that are not live, unless the table is full.
        selector: which rows are drawn: at random, or the oldest ("fifo") or newest ("lifo") first.
        remover: which rows leave a full table: the oldest ("fifo"), the newest ("lifo"), any
            ("random"), or those of the lowest priority ("lowest_priority").
        max_times_sampled: how often a row is drawn before it leaves; 0: any number of times.
        priority_exponent: α.
        importance_exponent: β.
        saved: whether `state` holds the table. Else whoever restores it begins with an empty one.
        seed: of the draws.
        table: makes the table, of a capacity.
        columns: what is learned from, of drawn rows: the inverse of `rows`, if that is needed.
        directory: where kept rows lie on disk; "": in memory.
        memory: the most gigabytes that kept rows take; none: what `capacity` takes.

    Raises:
        ValueError: a number is out of range, such as size = 0, with which no draw would end.
    """

    def __init__(
        self,
        rows: Callable[[Columns], dict[str, Any]],
        *,
        capacity: int,
        size: int,
        ratio: float,
        begin: int = 0,
        selector: Selector = "random",
        remover: Remover = "fifo",
        max_times_sampled: int = 0,
        priority_exponent: float = 0.0,
        importance_exponent: float = 0.0,
        saved: bool = True,
        seed: int = 0,
        table: MakeTable = Table,
        columns: Callable[[dict[str, Any]], dict[str, Any]] = dict,
        directory: str = "",
        memory: float | None = None,
    ) -> None:
        self._rules = Rules(selector, remover, max_times_sampled, priority_exponent)
        self._rules.check()
        for name, count in (("capacity", capacity), ("size", size)):
            if count < 1:
                raise ValueError(f"{name} = {count} of a replay: must be at least 1")
        if not 0 < ratio < inf:
            raise ValueError(f"ratio = {ratio} of a replay: must be above 0 and finite")
        self._rows, self._columns, self._make_table = rows, columns, table
        self.keeps_frames, self.keeps_rows = table is Table, columns is not dict
        self._room = Room(capacity, memory, directory, begin, saved)
        self._size, self._ratio = size, ratio
        # Where draws let rows go, there may be fewer of them than learning began with.
        self._least_steps = begin if max_times_sampled else 0
        self._beta = importance_exponent
        self._saved, self._draws = saved, Draws(seed)
        self._taken_in, self._is_trial = 0, False
        self._ones = torch.ones(size)  # [B]
        self._kept: Kept | None = None  # once a sample has come

    def add(self, sample: Columns, sums: Sums = alone) -> Iterator[Columns]:
        """Take a sample, and draw others, each one when it is asked for: so each draw knows the
        priorities of those before it."""
        rows = self._rows_of(sample)
        if self._kept is None:
            self._kept = self._empty(self._draws)
        kept = self._kept
        count = len(rows[c.LIVE] if c.LIVE in rows else any_leaf(rows)) if rows else 0
        if count and not kept.table.capacity:
            self._room.taken_by(rows)
            each, framed = bytes_of_step(rows), FRAMES in rows
            self._begin(kept, self._draws, each, framed, steps_of_row(rows))
        steps = np.count_nonzero(rows[c.LIVE].cpu().numpy()) if c.LIVE in rows else count
        told = [count, steps, 1.0, float(count > 0 or kept.table.size > 0)]
        if sums is not alone:  # all learners of a group make the same number of steps
            device = any_leaf(sample).device
            told = sums(torch.tensor(told, dtype=torch.float64, device=device)).tolist()
        arrived, live, learners, filled = told
        if count:  # not before the others have answered: whoever loses them keeps nothing
            kept.selection.put(rows)
            self._taken_in += self._saved
        # None draws before all can.
        begin = self._room.begin if filled == learners else inf
        kept.arrived(arrived / learners, round(live), begin, self._ratio)
        if self._is_trial:
            if rows_there := kept.selection.may_draw():
                yield self._draw(kept, int(min(self._size, rows_there)))
            return
        while kept.may_draw(self._size, self._least_steps):
            yield self._draw(kept, self._size)

    def try_out(self) -> None:
        self._is_trial = True

    def expect(self, sample: Columns) -> float:
        return self._room.taken_by(self._rows_of(sample))

    def update_priorities(self, priorities: Tensor | None) -> None:
        """Take the priorities [B] of the rows drawn last. Those of rows that have left since are
        ignored.

        Raises:
            ValueError: the replay is tried out and draws by priority, and the loss gave none, or
                such that rows cannot be drawn by.
        """
        kept = self._kept
        if not self._rules.priority_exponent or kept is None:
            return
        if self._is_trial:
            self._check(priorities)
        if priorities is not None:
            values = priorities.detach().cpu().double().numpy()  # [B]
            kept.stale_priorities += kept.selection.prioritize(kept.drawn, values)

    def _check(self, priorities: Tensor | None) -> None:
        """Those of a trial. A run ignores the ones that are no numbers, and goes on."""
        found = "gave no priorities"
        if priorities is not None:
            wrong = priorities[~(priorities >= 0) | priorities.isinf()]
            if not len(wrong):
                return
            found = f"gave the priority {wrong[0].item():.5g}"
        raise ValueError(
            f"priority_exponent = {self._rules.priority_exponent:g}, and the loss {found}: return "
            "juggler.Loss(..., priorities=...) with a finite number of at least 0 for each row, "
            "such as its largest error, or set priority_exponent = 0"
        )

    def why_alone(self) -> str:
        if not (most := self._rules.max_times_sampled):
            return ""
        return (
            f"max_times_sampled = {most} with several learners: they would run out of steps at "
            "different times, but have to make every step of the optimizer together; set it to 0, "
            "or num_learners to 1"
        )

    def taken_in(self) -> int:
        return self._taken_in

    def metrics(self) -> Mapping[str, float]:
        return self.books()

    def books(self) -> Mapping[str, float]:
        if self._kept is None:
            return {}
        return self._kept.books(self._room.begin, self._least_steps)

    def draw_apart(self, rank: int) -> None:
        self._draws.draw_apart(rank, going_on=self._kept is not None)

    def clear(self) -> None:
        if not self._saved:
            self._discard()

    def state(self) -> dict[str, Tree]:
        """Without the table, who goes on from here draws what this replay does after `clear`."""
        if not self._saved or self._kept is None:
            return self._draws.state(anew=self._kept is not None)
        return {
            **self._draws.state(anew=False),
            "format": np.array(_FORMAT),
            "generator": words_of(self._draws.generator),
            "modules": {DEFAULT_MODULE: self._kept.state()},
        }

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        if not state:
            return self._discard()
        kept, saved = None, {}
        try:
            draws = self._draws.restored(state)
            if self._saved and "modules" in state:
                found = int(state["format"]) if "format" in state else 1
                if found != _FORMAT:
                    raise ValueError(
                        f"the checkpoint's replay table is of format {found}, and this version of "
                        f"Juggler reads format {_FORMAT}: resume with save_replay = false, which "
                        "begins with an empty one"
                    )
                saved = state["modules"][DEFAULT_MODULE]
                go_on_from(draws.generator, state["generator"])
                kept = self._prepared(saved, draws)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"the checkpoint holds no replay table: {error!r}") from None
        self._draws, self._kept = draws, None  # there is no memory for rows from before as well
        if kept is not None:
            kept.restore(saved, device)
        self._kept = kept

    def _discard(self) -> None:
        """Keep no rows, and draw others than from those that were kept."""
        if self._kept is not None:
            self._kept = None
            self._draws.begin_anew()

    def _empty(self, draws: Draws) -> Kept:
        none = Table(0)  # the first rows tell how many there may be
        return Kept(none, Selection(none, self._rules, draws.generator))

    def _prepared(self, state: Mapping[str, Any], draws: Draws) -> Kept:
        """What is to be restored from this state, and can be."""
        kept = self._empty(draws)
        if step_bytes := float(state["step_bytes"]):
            self._begin(kept, draws, step_bytes, FRAMES in state["table"])
        kept.prepare(state)
        return kept

    def _rows_of(self, columns: Columns) -> dict[str, Any]:
        """What is kept of columns; frames that come once stay as they are."""
        rest = {name: column for name, column in columns.items() if name != FRAMES}
        rows = self._rows(rest)
        must_be_rows(rows)
        return {**rows, FRAMES: columns[FRAMES]} if rows and FRAMES in columns else rows

    def _begin(
        self, kept: Kept, draws: Draws, step_bytes: float, frames: bool, row_steps: int = 1
    ) -> None:
        """Begin an empty table for rows whose steps take so many bytes, perhaps with frames."""
        steps = self._room.steps_of(step_bytes, row_steps)
        make = FrameTable if frames else self._make_table
        table = make(steps, directory=self._room.directory)
        kept.begin(table, Selection(table, self._rules, draws.generator), step_bytes)

    def _draw(self, kept: Kept, size: int) -> dict[str, Any]:
        drawn = kept.selection.draw(size)
        rows = self._columns(kept.table.rows(drawn.slots))
        kept.drawn = kept.selection.let_go(drawn)
        kept.took(size)
        device = any_leaf(rows).device
        if drawn.shares is None:
            self._ones = self._ones.to(device)  # [size]
            weights = self._ones[:size]  # [B]
        else:
            of_rows = (drawn.shares.min() / drawn.shares) ** self._beta  # [B]
            weights = torch.from_numpy(of_rows.astype(np.float32)).to(device, non_blocking=True)
        rows[IMPORTANCE_WEIGHTS] = weights
        rows[NEW_STEPS] = torch.full((), kept.new_steps, device=device)  # []
        kept.new_steps = 0
        return rows
