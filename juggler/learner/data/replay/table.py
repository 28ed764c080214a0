"""Ring buffers of rows, drawn uniformly or by priority.

A table keeps rows of one size. A frame table keeps each frame of stacked observations once, and an
episode table keeps rows of episodes, which may become longer. `rows_of_episodes` makes these from a
sample, and `episodes_of_rows` makes a sample from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.learner.data.replay.column_storage import ColumnStorage, any_leaf, count_of, unlike
from juggler.learner.data.sources import Columns
from juggler.runtime.connectors.contexts import FRAMES
from juggler.runtime.connectors.leaves import at, replaced
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_leaves, tree_map
from juggler.runtime.wire.trees import Path, Tree

#: Columns with an entry for each truncated episode or each segment. In a table they have W places
#: in each row, filled from the first. The column of counts [N] has the number of filled places.
_ENTRIES: Final = {
    c.FINAL_ROWS: ("final_counts", c.FINALS[1:]),
    c.SEGMENT_ROWS: ("segment_counts", c.SEGMENTS[1:]),
}
#: Columns [N, ...] of a table, without a dimension of steps.
WITHOUT_STEPS: Final = frozenset(
    {c.LAST_OBSERVATIONS, c.LAST_CRITIC_OBSERVATIONS, c.STATES}
    | {counts for counts, _ in _ENTRIES.values()}
)
#: Observations of added steps: the row's last observations.
LAST: Final = {
    c.OBSERVATIONS: c.LAST_OBSERVATIONS,
    c.CRITIC_OBSERVATIONS: c.LAST_CRITIC_OBSERVATIONS,
}


class Size(NamedTuple):
    """Capacity of a table's rows."""

    steps: int
    finals: int  # truncated episodes
    segments: int

    def covering(self, other: Size) -> Size:
        """Return the smallest size that has room for both."""
        return Size(*map(max, self, other))


def rows_of_episodes(columns: Columns) -> dict[str, Any]:
    """Convert a sample's N rows to table rows, trees [N, ...].

    The host waits for the device, as the maximum number of entries is a dimension of tensors.

    Args:
        columns: as `collate` makes them.
    """
    count = len(columns[c.LIVE])
    entries = {name for own, (_, names) in _ENTRIES.items() for name in (own, *names)}
    rows = {name: column for name, column in columns.items() if name not in entries}
    for own, (counts_name, names) in _ENTRIES.items():
        index = columns[own]  # [K]
        order = index.argsort(stable=True)  # [K] by row
        at_row = index[order]  # [K]
        counts = torch.bincount(index, minlength=count)  # [N]
        firsts = counts.cumsum(0) - counts  # [N]
        places = torch.arange(len(index), device=index.device) - firsts[at_row]  # [K]
        spread = partial(_spread, order, (at_row, places), (count, int(counts.max())))
        rows[counts_name] = counts  # [N]
        rows.update({name: tree_map(spread, columns[name]) for name in names if name in columns})
    return rows


def living_rows(columns: Columns) -> dict[str, Any]:
    """Convert rows with live steps as `rows_of_episodes` does; {}: none."""
    rows = rows_of_episodes(columns)
    living = rows[c.LIVE].any(1).nonzero().squeeze(1)  # [n]
    return tree_map(lambda x: x[living], rows) if len(living) else {}


def episodes_of_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `rows_of_episodes`; entries are in the order of their rows."""
    counted = {counts for counts, _ in _ENTRIES.values()}
    columns = {name: column for name, column in rows.items() if name not in counted}
    for own, (counts_name, names) in _ENTRIES.items():
        counts = rows[counts_name]  # [N]
        width = rows[names[0]].shape[1]  # W
        places = torch.arange(width, device=counts.device)  # [W]
        index = (places < counts.unsqueeze(1)).nonzero(as_tuple=True)  # [K] each
        columns[own] = index[0]
        for name in names:
            if name in rows:
                columns[name] = tree_map(lambda x, i=index: x[i], rows[name])  # [K, ...]
    return columns


def size_of(rows: Mapping[str, Any]) -> Size:
    """Return the capacity of a table's rows."""
    finals, segments = rows[c.FINAL_STEPS], rows[c.SEGMENT_STARTS]  # [N, F], [N, S]
    return Size(rows[c.LIVE].shape[1], finals.shape[1], segments.shape[1])


def resized(rows: Mapping[str, Any], size: Size, before: Size) -> dict[str, Any]:
    """Enlarge rows.

    Added steps are padding as in `collate`: not live, with the row's last observation and action.

    Args:
        rows: all columns, or some of them with the columns in `LAST`.
        size: the new capacity.
        before: the old capacity.
    """
    if before == size:
        return dict(rows)
    fills = {name: rows.get(last) for name, last in LAST.items()}
    fills[c.ACTIONS] = tree_map(lambda x: x[:, -1], rows.get(c.ACTIONS, {}))  # [N, ...]
    steps, finals, segments = (new - old for new, old in zip(size, before, strict=True))
    # Entries and steps grow apart: most samples only have more truncations.
    found: dict[str, Any] = {}
    for name, column in rows.items():
        if name in WITHOUT_STEPS:
            found[name] = column
            continue
        more = finals if name in c.FINALS else segments if name in c.SEGMENTS else steps
        fill = fills.get(name)
        if fill is None:
            fill = tree_map(lambda x: x.new_zeros((len(x), *x.shape[2:])), column)  # [N, ...]
        found[name] = tree_map(lambda x, y, n=more: _padded(x, n, y), column, fill)
    return found


def _spread(
    order: Tensor, places: tuple[Tensor, Tensor], shape: tuple[int, int], x: Tensor
) -> Tensor:
    """Scatter entries x [K, ...] into zeros [N, W, ...]."""
    return x.new_zeros(shape + x.shape[1:]).index_put_(places, x[order])  # [N, W, ...]


def _padded(x: Tensor, count: int, fill: Tensor) -> Tensor:
    """Append `count` entries `fill` to each row of x [N, W, ...]."""
    if not count:
        return x
    more = fill.unsqueeze(1).expand(len(x), count, *x.shape[2:])  # [N, count, ...]
    return torch.cat([x, more], 1)  # [N, W + count, ...]


Slots: TypeAlias = NDArray[np.intp]

_NONE = np.zeros(0, np.intp)
_BYTES_AT_ONCE = 2**26  # of rows restored together
_FRAMES_AT_ONCE, _EPISODES_AT_ONCE = 4096, 64  # copied together

#: Smallest priority: with 0 a row would never be drawn again, nor its error updated.
_MIN_PRIORITY = 1e-6

#: Children of an inner node. NumPy adds up sixteen in little more time than two, and a million
#: slots need five levels instead of twenty.
_WIDTH = 16


class SumTree:
    """Weights by slot, as leaves of a tree of sums.

    The sum of an inner node is recomputed whenever a child changes, so rounding errors do not
    accumulate. All methods take arrays of slots, and cost the logarithm of the capacity.

    Args:
        capacity: number of slots, with initial weights 0.
    """

    def __init__(self, capacity: int) -> None:
        self._levels: list[NDArray[np.float64]] = []  # [n] each; the last is the root
        count = max(1, capacity)
        while count > 1 or not self._levels:
            count = -(-count // _WIDTH)  # parent nodes
            self._levels.append(np.zeros(count * _WIDTH))  # memory is allocated as slots are used
        self._levels.append(np.zeros(1))

    def __getitem__(self, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the weights [B] of slots [B]."""
        return self._levels[0][slots]

    def __setitem__(self, slots: NDArray[np.intp], weights: NDArray[np.float64] | float) -> None:
        """Set weights [B] of slots [B]; a repeated slot's last weight counts."""
        self._levels[0][slots] = weights
        nodes, of_runs = slots, True
        for below, level in pairwise(self._levels):
            nodes = nodes // _WIDTH  # [b]
            if of_runs:  # successive slots have the same parents
                differs = np.ones(len(nodes), np.bool_)  # [b]
                np.not_equal(nodes[1:], nodes[:-1], out=differs[1:])
                before, nodes = len(nodes), nodes[differs]
                of_runs = len(nodes) < before
            children = below.reshape(-1, _WIDTH).take(nodes, 0)  # [b, W]
            level[nodes] = np.add.reduce(children.T.copy(), axis=0)  # faster than axis 1

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._levels[-1][0])

    def find(self, sums: NDArray[np.float64]) -> NDArray[np.intp]:
        """Find the slots [B] of running sums [B] in [0, total).

        A slot without weight is never found, if any slot has weight.
        """
        rest, rows = sums.copy(), np.arange(len(sums))  # [B] both
        nodes = np.zeros(len(sums), np.intp)  # [B]
        running = np.zeros((_WIDTH + 1, len(sums)))  # [W + 1, B] sums of the children before each
        for level in reversed(self._levels[:-1]):
            children = level.reshape(-1, _WIDTH).take(nodes, 0).T  # [W, B]
            for place in range(_WIDTH):  # faster than `cumsum`
                np.add(running[place], children[place], out=running[place + 1])
            places = (running[1:] <= rest).sum(0)  # [B]
            # Rounding may leave a rest beyond the last child: the last one with weight counts.
            for row in np.flatnonzero(places == _WIDTH):
                places[row] = np.flatnonzero(children[:, row])[-1:].sum()
            rest -= running[places, rows]
            nodes = nodes * _WIDTH + places
        return nodes


class Drawn(NamedTuple):
    """Drawn rows.

    Attributes:
        rows: by name, tensors [B, ...] or trees of them.
        slots: [B]
        shares: [B] probability of each row to be drawn, up to a factor; none: all were equal.
    """

    rows: dict[str, Any]
    slots: Slots
    shares: NDArray[np.float64] | None = None


class ReplayTable:
    """Keeps the newest rows in a ring, and draws from them.

    Args:
        capacity: maximum number of rows.
        alpha: exponent of priorities; 0: all rows are equally likely.
        generator: random generator of the draws.
        directory: directory on disk; "": memory.
        marks: names of numbers that the caller keeps for each row.

    Attributes:
        capacity: maximum number of rows.
        size: number of rows, which are in the first slots.
        drawn: [capacity] uint8, 1: the row was drawn.
        marks: by name, int64 [capacity].
        came_rows: number of rows that arrived.
        drawn_rows: number of them that were drawn at least once.
        unused_rows: number of them that left undrawn, or did not fit.
    """

    def __init__(
        self,
        capacity: int,
        alpha: float,
        generator: np.random.Generator,
        directory: str = "",
        marks: Collection[str] = (),
    ) -> None:
        self._alpha, self._generator, self._directory = alpha, generator, directory
        self.came_rows = self.drawn_rows = self.unused_rows = 0
        self.size = self._next = self._inserted = 0  # see `_empty`
        self._highest = 1.0  # of all priorities so far
        self._columns: ColumnStorage | None = None
        self.marks: dict[str, NDArray[np.int64]] = dict.fromkeys(marks, _NONE)
        self._empty(capacity)

    def insert(self, rows: dict[str, Any]) -> Slots:
        """Copy rows in, evicting the oldest; return their slots [n].

        If not all rows fit, the last ones are inserted. A new row gets the largest priority so far.

        Args:
            rows: by name, tensors [n, ...] or trees of them; the same names every time.

        Raises:
            ValueError: the rows differ from earlier ones in columns, shapes or dtypes.
        """
        came = count_of(rows)
        count = min(came, self.capacity)
        if count < came:
            rows = tree_map(lambda x: x[-count:], rows)
        if self._columns is None:
            self._columns = ColumnStorage(rows, self.capacity, self._directory)
        self._columns.check(rows)
        # Rows go into the slots after the newest row, over the oldest rows.
        slots = (self._next + np.arange(count)) % self.capacity  # [n]
        try:
            self._columns.write(slots, rows)
        except BaseException:  # half a row is never drawn
            self._discard_all()
            raise
        self._leave(slots[slots < self.size])
        # A new row is undrawn, and has the largest priority so that it is drawn soon.
        self.drawn[slots] = 0
        self._next = (self._next + count) % self.capacity
        self.size = min(self.size + count, self.capacity)
        self._inserted += count
        self.came_rows += came
        self.unused_rows += came - count  # there was no room for these
        if self._weights is not None:
            self._weights[slots] = self._highest**self._alpha
        return slots

    def sample(self, count: int) -> Drawn:
        """Draw rows with replacement; the table must have some."""
        shares = None
        if self._weights is None:
            slots = self._generator.integers(self.size, size=count)  # [B]
        else:
            total = self._weights.total
            slots = self._weights.find(self._generator.random(count) * total)  # [B]
            shares = self._weights[slots] / total  # [B]
        first = slots[self.drawn[slots] == 0]  # [b], with repetitions
        if len(first):
            first.sort()
            self.drawn_rows += 1 + int(np.count_nonzero(first[1:] != first[:-1]))
            self.drawn[first] = 1
        self._inserted = 0
        return Drawn(self.rows(slots), slots, shares)

    def update_priorities(self, slots: Slots, priorities: NDArray[np.float64]) -> int:
        """Set priorities [B] of the last draw; return how many rows left.

        Priorities of rows that have left, or that are not finite, are ignored.

        Args:
            slots: [B], of the last draw.
            priorities: [B]
        """
        if self._weights is None:
            return 0
        ages = (self._next - 1 - slots) % self.capacity  # [B] 0: the newest row
        here = ages >= self._inserted  # [B]
        usable = here & np.isfinite(priorities)  # [B]
        if usable.any():
            values = np.maximum(priorities[usable], _MIN_PRIORITY)  # [b]
            self._highest = max(self._highest, float(values.max()))
            self._weights[slots[usable]] = values**self._alpha
        return int((~here).sum())

    def rows(self, slots: Slots) -> dict[str, Any]:
        """Copy the rows in slots [B], by name."""
        assert self._columns is not None  # slots exist only if rows do
        return self._columns.take(slots)

    def oldest_first(self) -> Slots:
        """Return the slots [size] in the order in which their rows arrived."""
        return ring(self._next, self.size)

    def state(self) -> dict[str, Tree]:
        """Return all rows as host arrays, and the state of the draws."""
        size, weights = self.size, self._weights
        counts = [self._next, self.came_rows, self.drawn_rows, self.unused_rows]
        return {
            "columns": self._columns.first(size) if self._columns and size else {},
            "counts": np.array(counts),
            "drawn": self.drawn[:size].copy(),  # [size]
            # With this run's exponent.
            "weights": np.zeros(0) if weights is None else weights[np.arange(size)],
            "numbers": np.array([self._alpha, self._highest]),
            **{name: each[:size].copy() for name, each in self.marks.items()},  # [size]
        }

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Check that this empty table fits a saved state, before allocation.

        Raises:
            ValueError: the state is not this table's. KeyError and similar errors mean the same.
        """
        if missing := self.state().keys() - state.keys():
            raise KeyError(min(missing))
        # The arrays are as they were saved: checkpoints have digests.
        if (size := len(state["drawn"])) > self.capacity:
            raise ValueError(
                f"the checkpoint's replay table has {size} rows, and cannot continue in one of "
                f"{self.capacity}: set replay_capacity and replay_memory as they were, or "
                "save_replay = false"
            )

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore the prepared state's rows on a device, part by part."""
        columns, (order, slots) = state["columns"], self._placed(state)  # [size] both
        size = len(order)
        each = sum(x.nbytes for _, x in tree_leaves(columns)) // max(1, size)  # bytes of a row
        at_once = max(1, _BYTES_AT_ONCE // max(1, each))
        # In parts: the rows and their copy on a device may not both fit into memory.
        for first in range(0, size, at_once):
            part = slice(first, first + at_once)
            rows = tree_map(partial(_part, order[part], device), columns)
            if self._columns is None:
                self._columns = ColumnStorage(rows, self.capacity, self._directory)
            self._columns.write(slots[part], rows)
        following, self.came_rows, self.drawn_rows, self.unused_rows = state["counts"].tolist()
        self.size, self._next = size, (following if size == self.capacity else size) % self.capacity
        self.drawn[slots] = state["drawn"][order]
        for name in self.marks:
            self.marks[name][slots] = state[name][order]
        # Saved weights have the exponent of the run that saved them.
        before, self._highest = state["numbers"].tolist()
        if self._weights is not None:
            self._weights[slots] = self._highest**self._alpha
            if before:  # otherwise rows had no priorities
                self._weights[slots] = state["weights"][order] ** (self._alpha / before)

    def _placed(self, state: Mapping[str, Any]) -> tuple[Slots, Slots]:
        """Return a saved state's rows, the oldest first, and their slots here.

        Rows keep their slots if they are a ring here too, so that draws find the same rows.
        """
        order = ring(int(state["counts"][0]), len(state["drawn"]))  # [size]
        return order, order if len(order) == self.capacity else np.arange(len(order))

    def _empty(self, capacity: int) -> None:
        """Discard all rows, and allocate this number of slots."""
        self.capacity, self.size = capacity, 0
        self._next = 0  # the slot of the next row
        self._inserted = capacity  # rows since the last draw: none of its rows is here
        self.drawn: NDArray[np.uint8] = np.zeros(capacity, np.uint8)  # [capacity]
        self.marks = {name: np.zeros(capacity, np.int64) for name in self.marks}
        self._weights: SumTree | None = SumTree(capacity) if self._alpha else None

    def _discard_all(self) -> None:
        """Discard all rows and their memory."""
        self._leave(np.arange(self.size))
        self._columns = None
        self._empty(self.capacity)

    def _leave(self, slots: Slots) -> None:
        """Count the rows in different slots [n] that leave undrawn."""
        self.unused_rows += len(slots) - int(np.count_nonzero(self.drawn[slots]))


class FrameTable(ReplayTable):
    """Keeps transitions, whose stacks share frames with their neighbours'.

    Rows arrive with FRAMES [P, ...], and with the numbers of k frames instead of each stack. They
    are drawn as frames [n, 1, k, ...] and [n, k, ...]. A frame is kept as long as a row's stack
    contains it.
    """

    #: Observations of rows: before each step [n, 1, ...], and after the last [n, ...].
    _OBSERVED = (c.OBSERVATIONS, c.LAST_OBSERVATIONS)

    def __init__(self, capacity: int, *given: Any, **keys: Any) -> None:
        self._stacks = np.zeros((capacity, 0), np.int64)  # [capacity, 2 k] slots of frames
        self._frames: ColumnStorage | None = None
        self._holds = np.zeros(max(1, capacity + capacity // 4), np.int32)  # stacks per frame
        self._frames_used, self._frames_free = 0, _NONE
        super().__init__(capacity, *given, **keys)

    def insert(self, rows: dict[str, Any]) -> Slots:
        rest = dict(rows)
        if (frames := rest.pop(FRAMES, None)) is None:
            raise unlike(f"only one side has {[FRAMES]}")
        paths = [path for path, _ in tree_leaves(frames)]
        numbers = [at(rest[name], paths[0]).flatten(1).cpu().numpy() for name in self._OBSERVED]
        for name in self._OBSERVED:  # kept separately, as slots of frames
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
        frames = {} if self._frames is None else self._frames.first(self._frames_used)[FRAMES]
        return {**super().state(), "stacks": self._stacks[: self.size].copy(), FRAMES: frames}

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        stacks, (order, slots) = state["stacks"], self._placed(state)  # [size, 2 k], [size] both
        self._stacks = np.zeros((self.capacity, stacks.shape[1]), np.int64)
        if len(order):
            frames = tree_map(torch.from_numpy, state[FRAMES])
            self._stacks[slots] = self._keep(frames, stacks[order], device)
        super().restore(state, device)

    def _keep(self, frames: Any, stacks: NDArray[np.int64], device: torch.device) -> Any:
        """Insert the frames in stacks [n, w]; return the stacks as slots.

        Frames are copied in parts: a checkpoint's may fill most of the memory.
        """
        held = np.bincount(stacks.ravel(), minlength=len(any_leaf({FRAMES: frames})))  # [P]
        wanted = held.nonzero()[0]  # [f]
        slots = self._slots_of_frames(len(wanted))  # [f]
        for first in range(0, len(wanted), _FRAMES_AT_ONCE):
            part = slice(first, first + _FRAMES_AT_ONCE)
            chosen = partial(_chosen, torch.from_numpy(wanted[part]), device)
            rows = {FRAMES: tree_map(chosen, frames)}
            if self._frames is None:
                self._frames = ColumnStorage(rows, len(self._holds), self._directory)
            self._frames.check(rows)
            self._frames.write(slots[part], rows)
        self._holds[slots] = held[wanted]
        places = np.zeros(len(held), np.int64)  # [P]
        places[wanted] = slots
        return places[stacks]

    def _slots_of_frames(self, count: int) -> Slots:
        """Return slots [count] for new frames, growing the memory if needed."""
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


class EpisodeTable(ReplayTable):
    """Keeps rows of episodes, as `rows_of_episodes` makes them.

    All rows take the memory of the longest one so far. When a longer one arrives, all rows are
    enlarged, and fewer of them fit.

    Args:
        steps: maximum number of steps, if all rows have the length of the longest one.
        given: positional arguments of `ReplayTable`.
        keys: keyword arguments of `ReplayTable`.
    """

    def __init__(self, steps: int, *given: Any, **keys: Any) -> None:
        self._steps, self._size = steps, Size(0, 0, 0)
        super().__init__(steps, *given, **keys)

    def insert(self, rows: dict[str, Any]) -> Slots:
        """Insert rows as `ReplayTable.insert` does.

        Raises:
            Exception: there is not enough memory for larger rows; all rows are discarded.
        """
        size = self._size.covering(size_of(rows))
        if size != self._size:
            try:
                self._enlarge(size)
            except BaseException:
                self._discard_all()
                raise
        return super().insert(resized(rows, size, size_of(rows)))

    def prepare(self, state: Mapping[str, Any]) -> None:
        if state["columns"]:
            self._size = size_of(state["columns"])
            self._empty(self._capacity_for(self._size))
        super().prepare(state)

    def _capacity_for(self, size: Size) -> int:
        return max(1, self._steps // max(1, size.steps))

    def _enlarge(self, size: Size) -> None:
        """Enlarge rows, column by column, so that at most one exists twice.

        They move to the first slots, the oldest first. Fewer rows fit if they become longer.
        """
        capacity, ordered = self._capacity_for(size), self.oldest_first()  # [size]
        dropped, kept = np.split(ordered, [max(0, len(ordered) - capacity)])  # [g], [n]
        tree = {} if self._columns is None else self._columns.tree
        for name in sorted(tree, key=WITHOUT_STEPS.__contains__):  # added steps need the last ones
            if next(tree_leaves(tree[name]), None):
                tree[name] = self._rebuilt(name, size, kept, capacity)
        # The ring restarts: priorities of earlier draws match no slot.
        self._leave(dropped)
        self._size, drawn, marks = size, self.drawn[kept], self.marks  # [n]
        weights = None if self._weights is None else self._weights[kept]  # [n]
        self._empty(capacity)
        self.size, self._next = len(kept), len(kept) % capacity
        self.drawn[: self.size] = drawn
        for name, each in self.marks.items():
            each[: self.size] = marks[name][kept]
        if self._weights is not None and weights is not None:
            self._weights[np.arange(self.size)] = weights

    def _rebuilt(self, name: str, size: Size, slots: Slots, capacity: int) -> ColumnStorage:
        """Copy some slots of a column into a larger column."""
        columns, needed = self._columns, {name, LAST.get(name, name)}
        assert columns is not None

        def rows(some: Slots) -> dict[str, Any]:
            return {name: resized(columns.take(some, needed), size, self._size)[name]}

        made = ColumnStorage(rows(_NONE), capacity, self._directory)
        for first in range(0, len(slots), _EPISODES_AT_ONCE):  # all of them may exceed the memory
            some = slots[first : first + _EPISODES_AT_ONCE]
            made.write(first + np.arange(len(some)), rows(some))
        found: ColumnStorage = made.tree[name]
        return found


def ring(following: int, size: int) -> Slots:
    """Return the slots [size] of a ring, the oldest row first.

    Args:
        following: slot of the next row; it is `size` while the ring fills.
        size: number of rows.
    """
    return (following + np.arange(size)) % max(1, size)


def _part(slots: Slots, device: torch.device, column: NDArray[Any]) -> Tensor:
    """Copy rows of a checkpoint's column to a device."""
    return torch.from_numpy(column[slots]).to(device)


def _chosen(index: Tensor, device: torch.device, frames: Tensor) -> Tensor:
    """Copy some of the frames [P, ...] to a device."""
    return frames.index_select(0, index.to(frames.device)).to(device)
