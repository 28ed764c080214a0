"""Sources that keep what arrives: `Replay`, which draws from it, and `MixInReplay`, which adds old
rows to what another source gives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from math import ceil, inf
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.learner.data.replay.episode_rows import (
    episodes_of_rows,
    living_rows,
    resized,
    rows_of_episodes,
    size_of,
)
from juggler.learner.data.replay.memory import (
    Room,
    any_leaf,
    bytes_of_step,
    count_of,
    must_be_rows,
    steps_of_row,
)
from juggler.learner.data.replay.rules import Remover, Rules, Selector
from juggler.learner.data.replay.table import Drawn, EpisodeTable, FrameTable, Slots, Table
from juggler.learner.data.sources import NEW_STEPS, Columns, DataSource, Sums, alone
from juggler.runtime.connectors.frame_stack import FRAMES
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree

#: A column of a drawn sample: the weight of each row in a loss [B].
IMPORTANCE_WEIGHTS: Final = "importance_weights"

_FORMAT = 3  # of `state`
_WORD = (1 << 64) - 1
_NONE = np.zeros(0, np.intp)


class Draws:
    """The random numbers of a replay, which begin anew whenever it discards all rows.

    They follow from a seed, from how often they have begun, and from the learner's rank in its
    group. A state has the first two. So a run that is resumed, whose processes have other seeds,
    draws what the run that continued draws.

    Attributes:
        generator: of the numbers; another one each time that they begin.
    """

    generator: np.random.Generator

    def __init__(self, seed: int, beginnings: int = 0, rank: int = 0) -> None:
        self._seed, self._beginnings, self._rank = seed, beginnings, rank
        self._begin()

    def begin_anew(self) -> None:
        """Begin with other numbers than each time before."""
        self._beginnings += 1
        self._begin()

    def draw_apart(self, rank: int, *, going_on: bool) -> None:
        """Draw other numbers than learners of other ranks: from here on, or from the beginning
        where nothing was drawn yet."""
        self._rank = rank
        if going_on:
            draw_apart(self.generator, rank)
        else:
            self._begin()

    def state(self, *, anew: bool) -> dict[str, Tree]:
        """What `restored` needs; `anew`: it is to begin as after `begin_anew`."""
        return {"seed": np.array(self._seed), "beginnings": np.array(self._beginnings + anew)}

    def restored(self, state: Mapping[str, Any]) -> Draws:
        """Those of such a state, for a learner of this rank; older versions say less in it."""
        seed = int(state.get("seed", self._seed))
        return Draws(seed, int(state.get("beginnings", 0)), self._rank)

    def words(self) -> NDArray[np.uint64]:
        """Where the generator, a PCG64, is in its sequence: numbers [6]."""
        found: Any = self.generator.bit_generator.state
        state, increment = found["state"]["state"], found["state"]["inc"]
        words = [state & _WORD, state >> 64, increment & _WORD, increment >> 64]
        return np.array([*words, found["has_uint32"], found["uinteger"]], np.uint64)

    def resume(self, words: NDArray[np.uint64]) -> None:
        """Continue where the generator was when it gave these `words`."""
        low, high, increment_low, increment_high, has_uint32, uinteger = map(int, words)
        self.generator.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": high << 64 | low, "inc": increment_high << 64 | increment_low},
            "has_uint32": has_uint32,
            "uinteger": uinteger,
        }

    def _begin(self) -> None:
        self.generator = np.random.Generator(np.random.PCG64([self._seed, self._beginnings]))
        draw_apart(self.generator, self._rank)


def draw_apart(generator: np.random.Generator, rank: int) -> None:
    """Have a PCG64 continue elsewhere in its sequence: as far apart for each rank, so that those
    that had one state do not draw alike. That of rank 0 continues as it would."""
    found: Any = generator.bit_generator
    if rank:  # a jump, even by nothing, would discard half of a number that is left from a draw
        found.state = found.jumped(rank).state


class _Keeper(DataSource):
    """A source that keeps rows in one table.

    Attributes:
        table: the rows; of no capacity before the first ones, which say how many there may be.
    """

    _marks: tuple[str, ...] = ()  # of the table
    _oldest_format = 1  # of states that do not name theirs

    def __init__(self, room: Room, rules: Rules, seed: int, *, episodes: bool) -> None:
        self._room, self._rules, self._draws = room, rules, Draws(seed)
        self._saved, self._episodes = room.saved, episodes
        self._forget()

    def _forget(self) -> None:
        """Have no rows."""
        self._step_bytes, self._began = 0.0, False
        self.table = self._table(0, framed=False, draws=self._draws)

    @abstractmethod
    def _own_state(self) -> dict[str, Tree]:
        """What a checkpoint holds beside the table."""

    @abstractmethod
    def _read(self, own: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
        """The same, of a checkpoint, and of the rest of its state."""

    @abstractmethod
    def _resume(self, read: Any) -> None:
        """Continue from what was read."""

    def draw_apart(self, rank: int) -> None:
        self._draws.draw_apart(rank, going_on=self._began)

    def clear(self) -> None:
        if not self._saved:
            self._discard()

    def state(self) -> dict[str, Tree]:
        """Without rows, a source that continues from here draws as this one does after `clear`."""
        if not self._saved or not self._began:
            return self._draws.state(anew=self._began)
        kept = {**self.table.state(), "step_bytes": np.array(self._step_bytes), **self._own_state()}
        return {
            **self._draws.state(anew=False),
            "format": np.array(_FORMAT),
            "generator": self._draws.words(),
            "modules": {DEFAULT_MODULE: kept},
        }

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        if not state:
            return self._discard()
        try:
            own: dict[str, Any] = {}
            draws, read = self._draws.restored(state), None
            table, step_bytes = self._table(0, framed=False, draws=draws), 0.0
            if self._saved and "modules" in state:
                found = int(state["format"]) if "format" in state else self._oldest_format
                if found != _FORMAT:
                    raise ValueError(
                        f"the checkpoint's replay table is of format {found}, and this version of "
                        f"Juggler reads format {_FORMAT}: resume with save_replay = false, which "
                        "begins with an empty one"
                    )
                draws.resume(state["generator"])
                own = next(iter(state["modules"].values()), {})
            if own:
                if step_bytes := float(own["step_bytes"]):
                    steps, framed = self._room.steps_of(step_bytes), FRAMES in own["table"]
                    table = self._table(steps, framed=framed, draws=draws)
                    table.prepare(own)
                read = self._read(own, state)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"the checkpoint holds no replay table: {error!r}") from None
        self._draws = draws
        self._forget()  # there is no memory for rows from before as well
        if own:
            if step_bytes:
                table.restore(own, device)
            self.table, self._step_bytes, self._began = table, step_bytes, True
            self._resume(read)

    def _discard(self) -> None:
        """Keep no rows, and draw others than from those that were kept."""
        if self._began:
            self._draws.begin_anew()
            self._forget()

    def _make_table(self, rows: dict[str, Any]) -> None:
        """Have a table for rows like these, if there is none."""
        if self._step_bytes:
            return
        self._room.taken_by(rows)
        each = bytes_of_step(rows)
        steps = self._room.steps_of(each, steps_of_row(rows))
        self.table = self._table(steps, framed=FRAMES in rows, draws=self._draws)
        self._step_bytes = each

    def _table(self, steps: int, *, framed: bool, draws: Draws) -> Table:
        kind = FrameTable if framed else EpisodeTable if self._episodes else Table
        return kind(steps, self._rules, draws.generator, self._room.directory, self._marks)


@dataclass
class _Pace:
    """How many rows are due, and what was counted."""

    due: float = 0.0  # rows that are still to be drawn for those that arrived
    new_steps: float = 0.0  # at all learners, that no draw has had
    waiting: float = 0.0  # steps that arrived, also before the first draw
    # Since draws may begin: rows that arrived, as this learner's share of those at all learners of
    # a group; steps that arrived at all of them; rows drawn, and samples.
    rows: float = 0.0
    steps: float = 0.0
    drawn: float = 0.0
    samples: float = 0.0


class Replay(_Keeper):
    """Keeps rows in a table, and draws samples from it at a fixed ratio to what arrives.

    Samples arrive as fast as they are learned from. So the ratio holds exactly, and nothing is
    thrown away for it. What is left of an arrival that is no whole sample is carried over to the
    next one. Only if each row may be drawn a limited number of times, and no row is left, are draws
    not made up for later.

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
        saved: whether `state` holds the table. Else a restored replay begins with an empty one.
        seed: of the draws.
        episodes: whether `rows` gives what `rows_of_episodes` makes; then samples are episodes.
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
        episodes: bool = False,
        directory: str = "",
        memory: float | None = None,
    ) -> None:
        rules = Rules(selector, remover, max_times_sampled, priority_exponent)
        rules.check()
        for name, count in (("capacity", capacity), ("size", size)):
            if count < 1:
                raise ValueError(f"{name} = {count} of a replay: must be at least 1")
        if not 0 < ratio < inf:
            raise ValueError(f"ratio = {ratio} of a replay: must be above 0 and finite")
        self._rows, self._size, self._ratio, self._beta = rows, size, ratio, importance_exponent
        self.keeps_frames, self.keeps_rows = not episodes, episodes
        # If draws remove rows, there may be fewer of them than learning began with.
        self._least_steps = begin if max_times_sampled else 0
        self._taken_in, self._is_trial = 0, False
        self._ones = torch.ones(size)  # [B]
        super().__init__(
            Room(capacity, memory, directory, begin, saved), rules, seed, episodes=episodes
        )

    def _forget(self) -> None:
        super()._forget()
        self._pace, self._stale = _Pace(), 0
        self._drawn = Drawn({}, _NONE, _NONE)

    def add(self, sample: Columns, sums: Sums = alone) -> Iterator[Columns]:
        """Take a sample, and draw others, each one when it is asked for: so each draw knows the
        priorities of those before it."""
        rows = self._rows_of(sample)
        self._began, count = True, count_of(rows)
        if count:
            self._make_table(rows)
        steps = np.count_nonzero(rows[c.LIVE].cpu().numpy()) if c.LIVE in rows else count
        told = [count, steps, 1.0, float(count > 0 or self.table.size > 0)]
        if sums is not alone:  # all learners of a group make the same number of steps
            device = any_leaf(sample).device
            told = sums(torch.tensor(told, dtype=torch.float64, device=device)).tolist()
        arrived, live, learners, filled = told
        if count:  # not before the others have answered: a learner that loses them keeps nothing
            self.table.insert(rows)
            self._taken_in += self._saved
        pace = self._pace
        pace.new_steps += round(live)
        pace.waiting += round(live)
        # None draws before all can.
        if filled == learners and pace.waiting >= self._room.begin:
            pace.due += arrived / learners * self._ratio
            pace.rows += arrived / learners
            pace.steps += round(live)
        if self._is_trial:
            if there := min(self._size, self.table.may_draw()):
                yield self._draw(int(there))
            return
        while self._may_draw():
            yield self._draw(self._size)

    def try_out(self) -> None:
        self._is_trial = True

    def expect(self, sample: Columns) -> float:
        return self._room.taken_by(self._rows_of(sample))

    def update_priorities(self, priorities: Tensor | None) -> None:
        """Set the priorities [B] of the rows drawn last. Those of rows that have left since are
        ignored.

        Raises:
            ValueError: the replay is tried out and draws by priority, and the loss gave none, or
                such that rows cannot be drawn by.
        """
        if not self._rules.priority_exponent:
            return
        if self._is_trial and len(self._drawn.slots):
            self._check(priorities)
        if priorities is not None:
            values = priorities.detach().cpu().double().numpy()  # [B]
            self._stale += self.table.update_priorities(self._drawn, values)

    def _check(self, given: Tensor | None) -> None:
        """Those of a trial. A run ignores the ones that are no numbers."""
        if given is None:
            found = "no priorities"
        elif (wrong := given[~(given >= 0) | given.isinf()]).numel():
            found = f"the priority {wrong[0].item():.5g}"
        else:
            return
        raise ValueError(
            f"priority_exponent = {self._rules.priority_exponent:g}, and the loss gave {found}: "
            "return juggler.Loss(..., priorities=...) with a finite number of at least 0 for each "
            "row, such as its largest error, or set priority_exponent = 0"
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
        """What became of all rows that arrived: each was drawn, is waiting, or has left unused."""
        pace, table = self._pace, self.table
        if not self._began:
            return {}
        # The other learners of a group wait for the first row of each.
        missing = max(self._room.begin - pace.waiting, self._lacks(), not table.came_rows)
        return {
            "replay_rows": float(table.size),
            "replay_rows_drawn": float(table.drawn_rows),
            "replay_rows_waiting": float(table.came_rows - table.drawn_rows - table.unused_rows),
            "replay_rows_unused": float(table.unused_rows),
            "replay_steps_missing": float(missing),
            "stale_priorities": float(self._stale),
            "samples_per_insert": pace.drawn / max(pace.rows, 1),
            "updates_per_step": pace.samples / max(pace.steps, 1),
        }

    def _own_state(self) -> dict[str, Tree]:
        return {
            "counts": np.array(astuple(self._pace)),  # [7]
            "stale_priorities": np.array(self._stale),
        }

    def _read(self, own: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
        if own["counts"].shape != (7,):
            raise ValueError(f"the checkpoint's replay has {len(own['counts'])} counts, not 7")
        # Older ones do not say how many priorities were stale.
        return _Pace(*own["counts"].tolist()), int(own.get("stale_priorities", 0))

    def _resume(self, read: Any) -> None:
        self._pace, self._stale = read

    def _rows_of(self, columns: Columns) -> dict[str, Any]:
        """What is kept of columns; frames that come once stay as they are."""
        rest = {name: column for name, column in columns.items() if name != FRAMES}
        rows = self._rows(rest)
        must_be_rows(rows)
        return {**rows, FRAMES: columns[FRAMES]} if rows and FRAMES in columns else rows

    def _lacks(self) -> int:
        """How many steps are missing until there are as many as each draw needs, or no room."""
        table = self.table
        missing = self._least_steps - table.size * table.row_steps
        return 0 if table.size == table.capacity else max(0, missing)

    def _may_draw(self) -> bool:
        """Whether a sample is due, and there are enough rows."""
        self._pace.due = min(self._pace.due, self.table.may_draw())
        return self._pace.due >= self._size and not self._lacks()

    def _draw(self, size: int) -> dict[str, Any]:
        drawn, pace = self.table.sample(size), self._pace
        self._drawn = drawn._replace(rows={})
        rows = episodes_of_rows(drawn.rows) if self._episodes else drawn.rows
        pace.due -= size
        pace.drawn += size
        pace.samples += 1
        device = any_leaf(rows).device
        if drawn.shares is None:
            self._ones = self._ones.to(device)  # [size]
            weights = self._ones[:size]  # [B]
        else:
            of_rows = (drawn.shares.min() / drawn.shares) ** self._beta  # [B]
            weights = torch.from_numpy(of_rows.astype(np.float32)).to(device, non_blocking=True)
        rows[IMPORTANCE_WEIGHTS] = weights
        rows[NEW_STEPS] = torch.full((), int(pace.new_steps), device=device)  # []
        pace.new_steps = 0.0
        return rows


class MixInReplay(_Keeper):
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
        saved: whether `state` holds the table. Else a restored source begins with an empty one.
        seed: of the draws.
        directory: where kept rows lie on disk; "": in memory.
        memory: the most gigabytes that kept rows take; none: what `capacity` takes.
    """

    keeps_rows = True
    _marks = ("steps", "arrived")  # live steps; how many samples had arrived before
    _oldest_format = _FORMAT

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
            Room(capacity, memory, directory, saved=saved), Rules(), seed, episodes=True
        )

    def _forget(self) -> None:
        super()._forget()
        self._arrived = 0  # samples
        self._due = 0.0  # old steps that are still to be drawn; below 0: that were drawn too many
        self._told: dict[str, float] = {}

    def add(self, sample: Columns, sums: Sums = alone) -> Iterator[Columns]:
        """Take a sample, and give those that are due, with old rows added to each."""
        for due in self._source.add(sample, sums):
            new = sums(due[c.LIVE].sum().double()).round().long()  # [] at all learners
            yield {**self._mixed(due), NEW_STEPS: new}
        if rows := living_rows(sample):
            self._make_table(rows)
            slots, marks = self.table.insert(rows), self.table.marks
            marks["steps"][slots] = rows[c.LIVE].sum(1)[-len(slots) :].cpu().numpy()
            marks["arrived"][slots] = self._arrived
        self._arrived += 1
        self._began = True

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
        super().draw_apart(rank)

    def clear(self) -> None:
        self._source.clear()
        super().clear()

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        super().restore(state, device)
        self._source.clear()

    def state(self) -> dict[str, Tree]:
        found = super().state()
        return {**found, "arrived": np.array(self._arrived)} if "modules" in found else found

    def _own_state(self) -> dict[str, Tree]:
        return {"due": np.array(self._due)}

    def _read(self, own: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
        return float(own["due"]), int(state["arrived"])

    def _resume(self, read: Any) -> None:
        self._due, self._arrived = read

    def _mixed(self, columns: Columns) -> dict[str, Any]:
        if columns[c.LIVE].ndim != 2:
            raise ValueError(
                "replay_share: old rows cannot be mixed into samples that each member of a "
                "population has of its own; set it to 0"
            )
        self._due += int(columns[c.LIVE].sum()) * self._old_per_new
        slots, marks = self._slots_due(), self.table.marks  # [B]
        steps = marks["steps"][slots]  # [B]
        ages = (self._arrived - marks["arrived"][slots]) * steps  # [B]
        self._told = {
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
        """Slots [B] of different rows with as many live steps as are due, or a part of a row more;
        all that there are if these are fewer."""
        most = min(self.table.size, max(ceil(self._due), 0))  # a row has at least one live step
        slots = (
            self._draws.generator.choice(self.table.size, most, replace=False) if most else _NONE
        )
        sums = self.table.marks["steps"][slots].cumsum()  # [B]
        count = int(np.searchsorted(sums, self._due)) + 1
        if count > most:  # there are too few
            self._due = min(self._due, 0.0)
            return slots
        self._due -= int(sums[count - 1])
        return slots[:count]
