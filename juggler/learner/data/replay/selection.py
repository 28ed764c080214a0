"""Which rows of a table are drawn, and which leave when it is full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakMethod

import numpy as np
from numpy.typing import NDArray

from juggler.learner.data.replay.memory_columns import any_leaf
from juggler.learner.data.replay.rules import Rules
from juggler.learner.data.replay.slot_trees import LeastTree, SumTree
from juggler.learner.data.replay.table import Leaving, Table
from juggler.runtime.wire.trees import Tree

Slots: TypeAlias = NDArray[np.intp]

#: Of a row that was learned from: with a priority of 0 it would never be drawn again, and its error
#: would stay that of weights from long ago.
_LEAST_PRIORITY = 1e-6

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
        slots: [B]
        generations: [B] of these slots; 0: the row left with this draw, its last one. None without
            priorities.
        shares: [B] how likely each was to be drawn, up to a factor; none: all were alike.
    """

    slots: Slots
    generations: NDArray[np.int64] | None = None
    shares: NDArray[np.float64] | None = None


class Selection:
    """Puts rows into a table and draws them by rules, with no more trees than these need.

    Args:
        table: it must be empty, and nobody else puts rows into it.
        rules: how.
        generator: of what is random.

    Attributes:
        came_rows: rows that came.
        drawn_rows: those of them that were drawn at least once.
        unused_rows: those that left without, or found no room.
    """

    def __init__(self, table: Table, rules: Rules, generator: np.random.Generator) -> None:
        self._table, self._rules, self._generator = table, rules, generator
        self._alpha, self._most = rules.priority_exponent, rules.max_times_sampled
        self.came_rows = self.drawn_rows = self.unused_rows = 0
        self._highest = 1.0  # of all priorities that were given
        # Two that refer to each other would have their memory until Python looks for garbage.
        left = WeakMethod(self._left)
        table.left = lambda slots: _tell(left(), slots)
        self._begin()

    def put(self, rows: dict[str, Any]) -> None:
        """Put rows into the table, for which others may leave. A new row has the largest priority
        that any row was given.

        Raises:
            Exception: the table has no room for their shape; it may have lost all rows over that.
        """
        try:
            moved = self._table.make_room(rows, self._given)
        except BaseException:
            if not self._table.size:
                self._follow(np.zeros(0, np.intp))
            raise
        if moved is not None:
            self._follow(moved)
        slots = self._table.put(rows, self._given)
        came = len(any_leaf(rows))
        self.came_rows += came
        self.unused_rows += came - len(slots)  # there was no room for these
        self.times[slots] = 0
        self._set(slots, self._highest**self._alpha)

    def may_draw(self) -> float:
        """How many rows can be drawn now."""
        if not self._most:
            return np.inf if self._table.size else 0
        return self._most * self._table.size - self._times_sum

    def draw(self, count: int) -> Drawn:
        """Draw rows, no more than `may_draw`. Those that were drawn as often as they may are still
        in the table until `let_go`."""
        shares = None
        if self._rules.selector != "random":
            slots = self._orders[self._rules.selector].least(count)  # [b]
            slots = slots.repeat(self._most - self.times[slots])[:count]  # [B]
            self._note(slots)
        elif self._weights is None:
            slots = self._generator.integers(self._table.size, size=count)  # [B]
            self._note(slots)
        else:
            slots, shares = self._by_weight(self._weights, count)  # [B] both
        if not self._alpha:
            return Drawn(slots)
        return Drawn(slots, self._table.generations[slots], shares)

    def let_go(self, drawn: Drawn) -> Drawn:
        """Let those of the rows go that were drawn as often as they may -> the same rows; those
        that are gone have no generation any more."""
        if not self._most:
            return drawn
        gone = self.times[drawn.slots] >= self._most  # [B]
        slots = np.unique(drawn.slots[gone])  # [n]
        self._table.free(slots)
        if self._weights is not None:
            self._weights[slots] = 0.0
        for order in self._orders.values():
            order[slots] = np.inf
        if drawn.generations is None:
            return drawn
        return drawn._replace(generations=np.where(gone, 0, drawn.generations))

    def prioritize(self, drawn: Drawn, priorities: NDArray[np.float64]) -> int:
        """Give drawn rows priorities [B]. Those that are no numbers are ignored, as are those of
        rows that have left. Of the latter, this returns how many left since they were drawn, and
        not by being drawn."""
        if drawn.generations is None:
            return 0
        stayed = drawn.generations > 0  # [B]
        here = stayed & (self._table.generations[drawn.slots] == drawn.generations)  # [B]
        usable = here & np.isfinite(priorities)  # [B]
        slots = drawn.slots[usable]  # [b]
        if len(slots):
            values = np.maximum(priorities[usable], _LEAST_PRIORITY)  # [b]
            self._highest = max(self._highest, float(values.max()))
            self._set(slots, values**self._alpha)
        return int((stayed & ~here).sum())

    def state(self) -> dict[str, Tree]:
        """What `restore` needs beside the state of the table."""
        slots = self._table.oldest_first()  # [size]
        weights = np.zeros(0) if self._weights is None else self._weights[slots]
        return {
            "times": self.times[slots],
            "weights": weights,  # with this run's exponent
            "numbers": np.array([self._alpha, self._highest]),
            "rows": np.array([self.came_rows, self.drawn_rows, self.unused_rows]),
        }

    def prepare(self, state: Mapping[str, Any], rows: int) -> None:
        """See that `restore` can go on from a saved state, for so many rows.

        Raises:
            ValueError: it is not a state of such rows.
        """
        shapes = {name: state[name].shape for name in ("times", "weights", "numbers", "rows")}
        weights = ((rows,), (0,))  # 0: without priorities
        if shapes.pop("weights") not in weights or shapes != {
            "times": (rows,),
            "numbers": (2,),
            "rows": (3,),
        }:
            raise ValueError(f"the checkpoint's replay has other numbers than those of {rows} rows")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, with the rows that the table has got by now. They may have left
        a table of another capacity, and by other rules."""
        self._begin()
        slots = self._table.oldest_first()  # [size]
        before, self._highest = state["numbers"].tolist()
        self.came_rows, self.drawn_rows, self.unused_rows = state["rows"].tolist()
        # Without a limit they are of a type with less room, of which 256 would be 0.
        self.times[slots] = np.minimum(state["times"], np.iinfo(self.times.dtype).max)
        self._times_sum = int(self.times[slots].sum())
        weights: Any = self._highest**self._alpha
        if self._alpha and before:  # else rows had no priorities
            weights = state["weights"] ** (self._alpha / before)  # [size]
        self._set(slots, weights)
        self.let_go(Drawn(slots))  # if they were drawn too often for a limit that is a new one

    def _begin(self) -> None:
        """Follow the table as it is; its rows have neither draws nor weights yet."""
        capacity = self._table.capacity
        # Of a ring, the table knows the oldest.
        ring = self._rules.remover == "fifo" and not self._most and self._table.is_ring
        self._is_ring = ring
        #: How often the row in each slot was drawn; where that is not limited, whether it was.
        self.times: NDArray[Any] = np.zeros(capacity, np.int32 if self._most else np.uint8)
        self._times_sum = 0  # of all rows in the table
        # Draws by weight pass over slots without a row.
        gaps = self._most > 0 or self._table.size < self._table.used
        by_weight = self._alpha > 0 or (self._rules.selector == "random" and gaps)
        self._weights = SumTree(capacity) if by_weight else None
        wanted: set[str] = {self._rules.selector}
        if not ring:
            wanted.add(self._rules.remover)
        self._orders = {name: LeastTree(capacity) for name in sorted(wanted & _ORDERS.keys())}

    def _follow(self, moved: Slots) -> None:
        """The table has moved the rows in slots [n] to 0..n-1; others are there no more."""
        times = self.times[moved]  # [n]
        weights: Any = 1.0 if self._weights is None else self._weights[moved]  # [n]
        self._begin()
        slots = np.arange(len(moved))  # [n]
        self.times[slots] = times
        self._times_sum = int(times.sum())
        self._set(slots, weights)

    def _set(self, slots: Slots, weights: Any) -> None:
        """Rows in slots [n] have these weights [n], or this one."""
        if self._weights is not None:
            self._weights[slots] = weights
        for name, order in self._orders.items():
            order[slots] = _ORDERS[name](self._table.generations[slots], weights)

    def _left(self, slots: Slots) -> None:
        """Rows in slots [n] have left the table."""
        times = self.times[slots]  # [n]
        self.unused_rows += len(slots) - int(np.count_nonzero(times))
        if self._most:
            self._times_sum -= int(times.sum())

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
            self.times[slots] = 1  # nobody asks how often it was

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

    @property
    def _given(self) -> Leaving | None:
        """Which rows leave a full table; None: the oldest ones, as the table knows."""
        if self._is_ring:
            return None
        return (
            self._leaving_at_random if self._rules.remover == "random" else self._leaving_by_order
        )

    def _leaving_by_order(self, count: int) -> Slots:
        return self._orders[self._rules.remover].least(count)

    def _leaving_at_random(self, count: int) -> Slots:
        """Different slots [count], of those that hold a row."""
        used = self._table.used
        empty = used - self._table.size
        slots = self._generator.choice(used, count + empty, replace=False)  # [count + empty]
        return slots[self._table.generations[slots] > 0][:count]


def _tell(hears: Callable[[Slots], None] | None, slots: Slots) -> None:
    if hears is not None:  # else nobody draws from the table any more
        hears(slots)


def _earlier(slots: Slots) -> NDArray[np.intp]:
    """How often each of some slots [B] stands before it among them, [B]."""
    order = slots.argsort(kind="stable")  # [B]
    ordered = slots[order]  # [B]
    places = np.arange(len(slots))
    starts = np.where(np.append(True, ordered[1:] != ordered[:-1]), places, 0)  # [B]
    found = np.empty(len(slots), np.intp)
    found[order] = places - np.maximum.accumulate(starts)
    return found
