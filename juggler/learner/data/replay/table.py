"""Tables of rows: which slots new rows take, which rows are drawn, and which leave.

A table keeps rows of one size. A frame table keeps each frame of stacked observations once, and an
episode table keeps whole rows of episodes, which may become longer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.learner.data.replay.episode_rows import LAST, WITHOUT_STEPS, Size, resized, size_of
from juggler.learner.data.replay.memory import Columns, any_leaf, count_of, runs_of, unlike
from juggler.learner.data.replay.rules import Rules
from juggler.learner.data.replay.slot_trees import LeastTree, SumTree
from juggler.runtime.connectors.frame_stack import FRAMES
from juggler.runtime.connectors.leaves import at, replaced
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_leaves, tree_map
from juggler.runtime.wire.trees import Path, Tree

Slots: TypeAlias = NDArray[np.intp]

_NONE = np.zeros(0, np.intp)
_BYTES_AT_ONCE = 2**26  # of rows that are restored together
_FRAMES_AT_ONCE, _EPISODES_AT_ONCE = 4096, 64  # that are copied together

#: Of a row that was learned from: with a priority of 0 it would never be drawn again, and its error
#: would stay that of weights from long ago.
_MIN_PRIORITY = 1e-6

#: The keys of rows by the orders that they may be in, of which the least comes first: of their
#: generations and of their weights.
_ORDERS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "fifo": lambda generations, weights: generations,
    "lifo": lambda generations, weights: -generations,
    "lowest_priority": lambda generations, weights: weights,
}


class Drawn(NamedTuple):
    """Rows that were drawn.

    Attributes:
        rows: by name, tensors [B, ...] or trees of them.
        slots: [B]
        generations: [B] of these slots; 0: the row left with this draw, its last one. [0] without
            priorities, which alone need them.
        shares: [B] how likely each was to be drawn, up to a factor; none: all were alike.
    """

    rows: dict[str, Any]
    slots: Slots
    generations: NDArray[np.int64]
    shares: NDArray[np.float64] | None = None


class Table:
    """Keeps rows in slots, and draws them by rules.

    New rows take slots that were freed, then those that were never used, then those of rows that
    leave for them. As long as nothing is freed and the oldest rows leave, slots form a ring.

    Args:
        capacity: the most rows.
        rules: how rows are drawn and leave.
        generator: of what is random.
        directory: where the rows lie on disk; "": in memory.
        marks: names of numbers that the caller keeps for each row.

    Attributes:
        capacity: as given.
        row_steps: steps in each row.
        size: rows in the table.
        used: slots that were ever used, the first ones.
        generations: int64 [capacity], the number of the row in each slot, counted from 1 as they
            came; 0: there is none. A slot that has another generation than it had when it was drawn
            holds another row by now, or none.
        times: [capacity] how often the row was drawn; without a limit, whether it was.
        marks: by name, int64 [capacity].
        came_rows: rows that came.
        drawn_rows: those of them that were drawn at least once.
        unused_rows: those that left without, or found no room.
    """

    def __init__(
        self,
        capacity: int,
        rules: Rules,
        generator: np.random.Generator,
        directory: str = "",
        marks: Collection[str] = (),
    ) -> None:
        self._rules, self._generator, self._directory = rules, generator, directory
        self._alpha, self._most = rules.priority_exponent, rules.max_times_sampled
        self.row_steps = 1
        self.came_rows = self.drawn_rows = self.unused_rows = 0
        self._highest = 1.0  # of all priorities that were given
        self._came = 0  # generations so far
        self._columns: Columns | None = None
        self.marks: dict[str, NDArray[np.int64]] = dict.fromkeys(marks, _NONE)
        self._empty(capacity)

    def insert(self, rows: dict[str, Any]) -> Slots:
        """Copy rows into the table, for which others may leave -> the slots [n] that they took.

        Of more rows than the table can hold, the last ones are taken. A new row has the largest
        priority that any row was given.

        Args:
            rows: by name, tensors [n, ...] or trees of them; the same names every time.

        Raises:
            ValueError: the rows are unlike earlier ones.
        """
        came = count_of(rows)
        count = min(came, self.capacity)
        if count < came:
            rows = tree_map(lambda x: x[-count:], rows)
        if self._columns is None:
            self._columns = Columns(rows, self.capacity, self._directory)
        self._columns.check(rows)
        slots = self._slots_for(count)
        runs = runs_of(slots)
        here = runs[0] if len(runs) == 1 else slots  # a slice is faster
        # Until its row is whole, a slot has none: whatever fails here, half a row is never drawn.
        held = self.generations[here] > 0  # [n]
        self._leave(slots if held.all() else slots[held])
        self._columns.write(slots, runs, rows)
        self.generations[here] = np.arange(self._came + 1, self._came + count + 1)
        self._came += count
        self.size += count
        self.came_rows += came
        self.unused_rows += came - count  # there was no room for these
        self.times[here] = 0
        self._set(slots, self._highest**self._alpha)
        return slots

    def may_draw(self) -> float:
        """How many rows can be drawn now."""
        if not self._most:
            return np.inf if self.size else 0
        return self._most * self.size - self._times_sum

    def sample(self, count: int) -> Drawn:
        """Draw rows, no more than `may_draw`. Rows that were drawn as often as they may leave."""
        shares = None
        if self._rules.selector != "random":
            slots = self._orders[self._rules.selector].least(count)  # [b]
            slots = slots.repeat(self._most - self.times[slots])[:count]  # [B]
            self._note(slots)
        elif self._weights is None:
            slots = self._generator.integers(self.size, size=count)  # [B]
            self._note(slots)
        else:
            slots, shares = self._by_weight(self._weights, count)  # [B] both
        rows = self.rows(slots)
        if self._most:
            self._free_spent(slots)
        generations = self.generations[slots] if self._alpha else _NONE
        return Drawn(rows, slots, generations, shares)

    def update_priorities(self, drawn: Drawn, priorities: NDArray[np.float64]) -> int:
        """Give drawn rows priorities [B]. Those that are no numbers are ignored, as are those of
        rows that have left. Of the latter, this returns how many left since they were drawn, and
        not by being drawn."""
        if not self._alpha:
            return 0
        stayed = drawn.generations > 0  # [B]
        here = stayed & (self.generations[drawn.slots] == drawn.generations)  # [B]
        usable = here & np.isfinite(priorities)  # [B]
        slots = drawn.slots[usable]  # [b]
        if len(slots):
            values = np.maximum(priorities[usable], _MIN_PRIORITY)  # [b]
            self._highest = max(self._highest, float(values.max()))
            self._set(slots, values**self._alpha)
        return int((stayed & ~here).sum())

    def rows(self, slots: Slots) -> dict[str, Any]:
        """Copies of the rows in slots [B] -> by name, tensors [B, ...]."""
        assert self._columns is not None  # there are slots only if there are rows
        return self._columns.take(slots)

    def oldest_first(self) -> Slots:
        """The slots [size] in the order in which their rows came."""
        slots = np.flatnonzero(self.generations[: self.used])  # [size]
        return slots[np.argsort(self.generations[slots])]

    def state(self) -> dict[str, Tree]:
        """All rows as arrays on the host, and how they are drawn and leave."""
        slots = self.oldest_first()  # [size]
        table = {
            "columns": self._columns.first(self.used) if self._columns and self.used else {},
            "generations": self.generations[: self.used].copy(),  # [u]
            "free": self._free.copy(),
            "counts": np.array([self._came, self._next]),
        }
        selection = {
            "times": self.times[slots],
            # With this run's exponent.
            "weights": np.zeros(0) if self._weights is None else self._weights[slots],
            "numbers": np.array([self._alpha, self._highest]),
            "rows": np.array([self.came_rows, self.drawn_rows, self.unused_rows]),
        }
        marks = {name: each[: self.used].copy() for name, each in self.marks.items()}  # [u]
        return {"table": table, "selection": selection, **marks}

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Check that this empty table can have a saved state, before it takes memory for it.

        Raises:
            ValueError: it is not the state of such a table, as KeyErrors and the like say, too.
        """
        table, selection = state["table"], state.get("selection")
        generations, free = table["generations"], table["free"]  # [u], [f]
        (came, following), used = table["counts"].tolist(), len(generations)
        empty = np.flatnonzero(generations == 0)  # [f]
        whole = (
            all(len(x) == used for _, x in tree_leaves(table["columns"]))
            and bool(table["columns"]) == bool(used)
            and used <= self.capacity
            and np.array_equal(np.sort(free), empty)
            and len(np.unique(generations)) == used - len(empty) + bool(len(empty))
            and 0 <= generations.min(initial=0) <= generations.max(initial=0) <= came
            and 0 <= following <= min(used, self.capacity - 1)
        )
        if not whole:
            raise ValueError(
                f"the checkpoint's replay table has {used} rows, and cannot go on in one of "
                f"{self.capacity}: set replay_capacity and replay_memory as they were, or "
                "save_replay = false"
            )
        size = used - len(free)
        shapes = dict.fromkeys(self.marks, (used,))
        found = {name: state[name].shape for name in shapes}
        if selection is not None or not self.marks:  # older versions saved none beside marks
            shapes |= {"times": (size,), "weights": (size,), "numbers": (2,), "rows": (3,)}
            found |= {name: state["selection"][name].shape for name in shapes if name not in found}
        if found != shapes and found != {**shapes, "weights": (0,)}:  # 0: without priorities
            raise ValueError(f"the checkpoint's replay has other numbers than those of {size} rows")

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Have the rows of a saved state, for which this was prepared, on a device. They are copied
        a part at a time. They may have left a table of another capacity, and by other rules."""
        table, selection = state["table"], state.get("selection")
        columns, used = table["columns"], len(table["generations"])
        each = sum(x.nbytes for _, x in tree_leaves(columns)) // max(1, used)  # bytes of a row
        at_once = max(1, _BYTES_AT_ONCE // max(1, each))
        for first in range(0, used, at_once):
            rows = tree_map(partial(_part, slice(first, first + at_once), device), columns)
            if self._columns is None:
                self._columns = Columns(rows, self.capacity, self._directory)
            slots = np.arange(first, min(first + at_once, used))
            self._columns.write(slots, runs_of(slots), rows)
        self.generations[:used] = table["generations"]
        self._free, self.used = table["free"].astype(np.intp), used
        self.size = used - len(self._free)
        self._came, self._next = table["counts"].tolist()
        self._index()
        for name in self.marks:
            self.marks[name][:used] = state[name]
        slots, weights = self.oldest_first(), 1.0  # [size]
        if selection is not None:
            before, self._highest = selection["numbers"].tolist()
            self.came_rows, self.drawn_rows, self.unused_rows = selection["rows"].tolist()
            # Without a limit they are of a type with less room, of which 256 would be 0.
            self.times[slots] = np.minimum(selection["times"], np.iinfo(self.times.dtype).max)
            weights = self._highest**self._alpha
            if self._alpha and before:  # else rows had no priorities
                weights = selection["weights"] ** (self._alpha / before)  # [size]
        self._times_sum = int(self.times[slots].sum())
        self._set(slots, weights)
        if self._most:  # they may have been drawn too often for a limit that is a new one
            self._free_spent(slots)

    def _empty(self, capacity: int) -> None:
        """Have no rows, and slots for so many."""
        self.capacity, self.size, self.used = capacity, 0, 0
        self.generations: NDArray[np.int64] = np.zeros(capacity, np.int64)  # [capacity]
        self._next = 0  # behind the slot of the last row, in a ring
        self._free = _NONE  # slots that were freed, and not used again
        self.marks = {name: np.zeros(capacity, np.int64) for name in self.marks}
        self._index()

    def _index(self) -> None:
        """Make trees over the rows that are there, which have neither draws nor weights yet: no
        more trees than the rules need."""
        capacity, rules = self.capacity, self._rules
        # Of a ring, the oldest rows are known.
        places = self._next - self.size + np.arange(self.size)  # [size]
        self._is_ring = (
            rules.remover == "fifo"
            and not self._most
            and self.size == self.used
            and np.array_equal(self.oldest_first(), places % max(1, capacity))
        )
        self.times: NDArray[Any] = np.zeros(capacity, np.int32 if self._most else np.uint8)
        self._times_sum = 0  # of all rows in the table
        # Draws by weight pass over slots without a row.
        gaps = self._most > 0 or self.size < self.used
        by_weight = self._alpha > 0 or (rules.selector == "random" and gaps)
        self._weights = SumTree(capacity) if by_weight else None
        wanted = {rules.selector, *([] if self._is_ring else [rules.remover])}
        self._orders = {name: LeastTree(capacity) for name in sorted(wanted & _ORDERS.keys())}

    def _set(self, slots: Slots, weights: Any) -> None:
        """Rows in slots [n] have these weights [n], or this one."""
        if self._weights is not None:
            self._weights[slots] = weights
        for name, order in self._orders.items():
            order[slots] = _ORDERS[name](self.generations[slots], weights)

    def _slots_for(self, count: int) -> Slots:
        """Slots [count] for new rows; those whose rows leave are still in use."""
        parts: list[Slots] = []
        freed = min(count, len(self._free))
        if freed:
            keep = len(self._free) - freed
            parts.append(self._free[keep:])
            self._free = self._free[:keep]
        new = min(count - freed, self.capacity - self.used)
        if new:
            parts.append(np.arange(self.used, self.used + new))
            self.used += new
            self._next = self.used % self.capacity
        if short := count - freed - new:
            parts.append(self._leaving(short))
            if self._is_ring:
                self._next = (self._next + short) % self.capacity
        return parts[0] if len(parts) == 1 else np.concatenate([_NONE, *parts])

    def _leaving(self, count: int) -> Slots:
        """Different slots [count] of the rows that leave first."""
        if self._is_ring:
            oldest: Slots = (self._next - self.used + np.arange(count)) % self.capacity
            return oldest
        if self._rules.remover != "random":
            return self._orders[self._rules.remover].least(count)
        empty = self.used - self.size
        slots = self._generator.choice(self.used, count + empty, replace=False)  # [count + empty]
        return slots[self.generations[slots] > 0][:count]

    def _leave(self, slots: Slots) -> None:
        """Have no rows in different slots [n] any more."""
        times = self.times[slots]  # [n]
        self.unused_rows += len(slots) - int(np.count_nonzero(times))
        if self._most:
            self._times_sum -= int(times.sum())
        self.generations[slots] = 0
        self.size -= len(slots)

    def _free_spent(self, slots: Slots) -> None:
        """Free those of the slots [B] whose rows were drawn as often as they may."""
        free = np.unique(slots[self.times[slots] >= self._most])  # [n]
        self._leave(free)
        self._free = np.concatenate([self._free, free])
        if self._weights is not None:
            self._weights[free] = 0.0
        for order in self._orders.values():
            order[free] = np.inf

    def _note(self, slots: Slots) -> None:
        """Note draws of the rows in slots [B]."""
        first = slots[self.times[slots] == 0]  # [b], some of them more than once
        if len(first):
            first.sort()
            self.drawn_rows += 1 + int(np.count_nonzero(first[1:] != first[:-1]))
        if self._most:
            np.add.at(self.times, slots, 1)
            self._times_sum += len(slots)
        else:
            self.times[slots] = 1

    def _by_weight(self, weights: SumTree, count: int) -> tuple[Slots, NDArray[np.float64]]:
        """Draw slots in proportion to their weights -> slots [B], and their shares [B]."""
        found: list[Slots] = []
        shares: list[NDArray[np.float64]] = []
        while count:
            slots = weights.find(self._generator.random(count) * weights.total)  # [b]
            if self._most:
                # As if rows were drawn one by one: a row that has had all its draws is skipped.
                slots = slots[self.times[slots] + _earlier(slots) < self._most]
            found.append(slots)
            shares.append(weights[slots] / weights.total)
            self._note(slots)
            if self._most:
                weights[slots[self.times[slots] >= self._most]] = 0.0
            count -= len(slots)
        return np.concatenate(found), np.concatenate(shares)


class FrameTable(Table):
    """Keeps transitions, whose stacks share frames with those of their neighbours.

    Rows come with FRAMES [P, ...], and with the numbers of k frames in place of each stack. They
    are drawn as frames [n, 1, k, ...] and [n, k, ...]. A frame is kept as long as any row has it in
    a stack.
    """

    #: What rows observe: before each step [n, 1, ...], and after the last [n, ...].
    _OBSERVED = (c.OBSERVATIONS, c.LAST_OBSERVATIONS)

    def __init__(self, capacity: int, *given: Any, **keys: Any) -> None:
        self._stacks = np.zeros((capacity, 0), np.int64)  # [capacity, 2 k] slots of frames
        self._frames: Columns | None = None
        self._holds = np.zeros(max(1, capacity + capacity // 4), np.int32)  # by how many stacks
        self._frames_used, self._frames_free = 0, _NONE
        super().__init__(capacity, *given, **keys)

    def insert(self, rows: dict[str, Any]) -> Slots:
        rest = dict(rows)
        if (frames := rest.pop(FRAMES, None)) is None:
            raise unlike(f"only one side has {[FRAMES]}")
        paths = [path for path, _ in tree_leaves(frames)]
        numbers = [at(rest[name], paths[0]).flatten(1).cpu().numpy() for name in self._OBSERVED]
        for name in self._OBSERVED:  # they stay apart, since they count other slots in the table
            empty = dict.fromkeys(paths, at(rest[name], paths[0])[..., :0])
            rest[name] = replaced(rest[name], empty)
        stacks = np.concatenate(numbers, 1)[-self.capacity :]  # [n, 2 k]
        if not self._stacks.shape[1]:
            self._stacks = np.zeros((self.capacity, stacks.shape[1]), np.int64)
        kept = self._keep(frames, stacks, any_leaf(rows).device)  # [n, 2 k]
        slots = super().insert(rest)
        self._stacks[slots] = kept
        return slots

    def rows(self, slots: Slots) -> dict[str, Any]:
        assert self._frames is not None
        found, named = super().rows(slots), self._stacks[slots]  # [B, 2 k]
        frames, k = self._frames.take(named.ravel())[FRAMES], named.shape[1] // 2
        stacks = {path: x.view(named.shape + x.shape[1:]) for path, x in tree_leaves(frames)}
        before: dict[Path, Tensor] = {path: x[:, None, :k] for path, x in stacks.items()}
        after: dict[Path, Tensor] = {path: x[:, k:] for path, x in stacks.items()}
        for name, leaves in zip(self._OBSERVED, (before, after), strict=True):
            found[name] = replaced(found[name], leaves)  # [B, 1, k, ...] or [B, k, ...]
        return found

    def state(self) -> dict[str, Tree]:
        found: dict[str, Any] = super().state()
        frames = {} if self._frames is None else self._frames.first(self._frames_used)[FRAMES]
        table = {**found["table"], "stacks": self._stacks[: self.used].copy(), FRAMES: frames}
        return {**found, "table": table}

    def prepare(self, state: Mapping[str, Any]) -> None:
        table = state["table"]
        stacks, count = table["stacks"], len(any_leaf({FRAMES: table[FRAMES]}))
        if stacks.shape[:1] != table["generations"].shape or not np.all(
            (stacks >= 0) & (stacks < count)
        ):
            raise ValueError("the checkpoint's replay table names frames that it does not hold")
        super().prepare(state)

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        stacks, frames = state["table"]["stacks"], state["table"][FRAMES]
        live = np.flatnonzero(state["table"]["generations"])  # [size]
        self._stacks = np.zeros((self.capacity, stacks.shape[1]), np.int64)
        self._stacks[live] = self._keep(tree_map(torch.from_numpy, frames), stacks[live], device)
        super().restore(state, device)

    def _keep(self, frames: Any, stacks: NDArray[np.int64], device: torch.device) -> Any:
        """Keep, on a device, those of the frames [P, ...] that stacks [n, w] name -> their slots
        [n, w]. They are copied a part at a time: those of a checkpoint may be most of the memory.
        """
        held = np.bincount(stacks.ravel(), minlength=len(any_leaf({FRAMES: frames})))  # [P]
        wanted = held.nonzero()[0]  # [f]
        slots = self._slots_of_frames(len(wanted))  # [f]
        for first in range(0, len(wanted), _FRAMES_AT_ONCE):
            part = slice(first, first + _FRAMES_AT_ONCE)
            chosen = partial(_chosen, torch.from_numpy(wanted[part]), device)
            rows = {FRAMES: tree_map(chosen, frames)}
            if self._frames is None:
                self._frames = Columns(rows, len(self._holds), self._directory)
            self._frames.check(rows)
            self._frames.write(slots[part], runs_of(slots[part]), rows)
        self._holds[slots] = held[wanted]
        places = np.zeros(len(held), np.int64)  # [P]
        places[wanted] = slots
        return places[stacks]

    def _slots_of_frames(self, count: int) -> Slots:
        """Slots [count] for new frames, of which there may be more than usual."""
        keep = max(0, len(self._frames_free) - count)
        slots, self._frames_free = self._frames_free[keep:], self._frames_free[:keep]
        new = np.arange(self._frames_used, self._frames_used + count - len(slots))
        self._frames_used += len(new)
        if self._frames_used > len(self._holds):
            more = self._frames_used + self._frames_used // 4
            self._holds = np.concatenate([self._holds, np.zeros(more - len(self._holds), np.int32)])
            if self._frames is not None:
                self._frames.grow(more)
        return np.concatenate([slots, new])

    def _leave(self, slots: Slots) -> None:
        super()._leave(slots)
        named = self._stacks[slots].ravel()  # [n w]
        np.subtract.at(self._holds, named, 1)
        free = np.unique(named[self._holds[named] == 0])
        self._frames_free = np.concatenate([self._frames_free, free])


class EpisodeTable(Table):
    """Keeps rows of episodes, as `rows_of_episodes` makes them.

    All rows take the memory of the longest one so far. When a longer one comes, all get room for as
    much, and fewer of them fit.

    Args:
        steps: the most steps, each row's counted as those of the longest one.
        given: as of a `Table`.
        keys: likewise.
    """

    def __init__(self, steps: int, *given: Any, **keys: Any) -> None:
        self._steps, self._size = steps, Size(0, 0, 0)
        super().__init__(steps, *given, **keys)

    def insert(self, rows: dict[str, Any]) -> Slots:
        """As of a `Table`.

        Raises:
            Exception: there is no memory for longer rows. All rows stay if there is none for the
                largest column, which is made first; else all leave.
        """
        size = self._size.covering(size_of(rows))
        if size.steps > self._size.steps:
            self._lengthen(size)
        elif size != self._size:  # rows stay where they are: these columns are little of the memory
            names = list(c.FINALS if size.finals > self._size.finals else ())
            names += c.SEGMENTS if size.segments > self._size.segments else ()
            slots = self.oldest_first()
            self._remake(names, size, slots, slots, self.capacity)
        return super().insert(resized(rows, self._size, size_of(rows)))

    def prepare(self, state: Mapping[str, Any]) -> None:
        if state["table"]["columns"]:
            self._size = size_of(state["table"]["columns"])
            self.row_steps = self._size.steps
            self._empty(self._capacity_for(self._size))
        super().prepare(state)

    def _capacity_for(self, size: Size) -> int:
        return max(1, self._steps // max(1, size.steps))

    def _lengthen(self, size: Size) -> None:
        """Have room for more steps in each row, and for fewer rows: they go to the first slots."""
        capacity, kept = self._capacity_for(size), self.oldest_first()  # [size]
        gone = _NONE
        if self.size > capacity:
            gone = self._leaving(self.size - capacity)  # [g]
            kept = kept[~np.isin(kept, gone)]  # [n]
        slots = np.arange(len(kept))  # [n]
        self._remake((), size, kept, slots, capacity)
        self._leave(gone)
        times, marks = self.times[kept], self.marks  # [n]
        weights: Any = 1.0 if self._weights is None else self._weights[kept]  # [n]
        self.row_steps = size.steps
        self._empty(capacity)
        self.size = self.used = len(kept)
        self._next = self.used % capacity
        # Other numbers than before: what was drawn by then is in no slot any more.
        self.generations[slots] = self._came + 1 + slots
        self._came += len(kept)
        self._index()
        self.times[slots], self._times_sum = times, int(times.sum())
        for name, each in self.marks.items():
            each[slots] = marks[name][kept]
        self._set(slots, weights)

    def _remake(
        self, names: Collection[str], size: Size, slots: Slots, places: Slots, capacity: int
    ) -> None:
        """Make columns of these names, or (): all, with room for so much in each row, and with the
        rows of slots [n] in places [n]: one after the other, the largest first as far as possible,
        so that no more than one is there twice."""
        tree = {} if self._columns is None else self._columns.tree
        sizes = {name: _bytes_of(tree[name]) for name in (names or tree) if name in tree}
        begun = False
        # Steps that are added need what was observed last.
        for name in sorted(sizes, key=lambda name: (name in WITHOUT_STEPS, -sizes[name])):
            if not sizes[name]:
                continue
            try:
                tree[name] = self._remade(name, size, slots, places, capacity)
            except BaseException:
                if begun:
                    self._leave(self.oldest_first())
                    self._columns = None
                    self._empty(self.capacity)
                raise
            begun = True
        self._size = size

    def _remade(self, name: str, size: Size, slots: Slots, places: Slots, capacity: int) -> Columns:
        columns, needed = self._columns, {name, LAST.get(name, name)}
        assert columns is not None

        def rows(some: Slots) -> dict[str, Any]:
            return {name: resized(columns.take(some, needed), size, self._size)[name]}

        made = Columns(rows(_NONE), capacity, self._directory)
        for first in range(0, len(slots), _EPISODES_AT_ONCE):  # those on disk may be too many
            part = slice(first, first + _EPISODES_AT_ONCE)
            made.write(places[part], runs_of(places[part]), rows(slots[part]))
        found: Columns = made.tree[name]
        return found


def _bytes_of(column: Any) -> int:
    """The bytes of a row in a column, or in a tree of them; 0: it has none."""
    return sum(max(1, prod(x.shape) * x.dtype.itemsize) for _, x in tree_leaves(column))


def _part(part: slice, device: torch.device, column: NDArray[Any]) -> Tensor:
    """Rows of a column of a checkpoint, which torch may write to."""
    return torch.from_numpy(column[part].copy()).to(device)


def _chosen(index: Tensor, device: torch.device, frames: Tensor) -> Tensor:
    """Some of the frames [P, ...], on a device."""
    return frames.index_select(0, index.to(frames.device)).to(device)


def _earlier(slots: Slots) -> NDArray[np.intp]:
    """How often each of some slots [B] stands before it among them, [B]."""
    order = slots.argsort(kind="stable")  # [B]
    ordered = slots[order]  # [B]
    places = np.arange(len(slots))
    starts = np.where(np.append(True, ordered[1:] != ordered[:-1]), places, 0)  # [B]
    found = np.empty(len(slots), np.intp)
    found[order] = places - np.maximum.accumulate(starts)
    return found
