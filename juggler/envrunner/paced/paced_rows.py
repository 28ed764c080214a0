"""Rows of T steps that fill step by step, and become batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.runtime.episodes.batch import STEP_COLUMNS, EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.structures import grown, put, room_for, take, tree_map, zeros
from juggler.runtime.wire.trees import Tree

_LogProbabilities = Callable[[NDArray[np.float32], Tree], NDArray[np.float32]]
#: Columns of batches that rows fill; which steps are live shows at the end.
_FILLED = tuple(name for name in STEP_COLUMNS if name != "live")

Where = NDArray[np.intp] | slice


class Rows:
    """Memory for rows, each filled by one agent at a time.

    Columns are [P, T + 1, ...], and are written directly as rows fill up. The observation after a
    row's last step is at the step behind it. The index of a step among the steps of all rows is
    row * `width` + step.

    Args:
        observation_space: of the observations in batches.
        steps: T.
        blank_inputs: of the policy's distribution [D].
        first_rows: initial number of rows.

    Attributes:
        width: T + 1.
        complete: rows that are ready, in order.
        by_step: the columns with a value for each step, as views [P * (T + 1), ...].
    """

    def __init__(
        self,
        observation_space: Space[Any],
        steps: int,
        blank_inputs: NDArray[np.float32],
        first_rows: int,
    ) -> None:
        self.steps, self.width = steps, steps + 1
        self.complete: list[int] = []
        self._space = observation_space
        self._places = SlotAllocator(first_rows)
        shape = (first_rows, self.width)
        self.columns: dict[str, Any] = {
            "observations": zeros(observation_space, shape),
            **{name: np.zeros(shape, STEP_COLUMNS[name]) for name in _FILLED},
            # Where a row or an episode begins: the episode, its number of earlier steps, and the
            # generation and the update of the weights that act.
            "beginnings": np.zeros((*shape, 4), np.uint64),
            "lengths": np.zeros(first_rows, np.intp),  # steps of a complete row
            "places": np.zeros(first_rows, np.intp),  # of the agent
            "states": {},
            # Log-probabilities came with the steps.
            "recorded": np.zeros(first_rows, np.bool_),
            "inputs": np.zeros((*shape, *blank_inputs.shape), np.float32),
        }
        self.by_step: dict[str, Any] = {}
        self._view_by_step()
        self._finals: dict[int, list[tuple[int, Tree]]] = defaultdict(list)  # step, observation

    @property
    def begun(self) -> int:
        """Number of rows that are neither free nor complete."""
        return self._places.used - len(self.complete)

    @property
    def first_updates(self) -> NDArray[np.uint64]:
        """Updates [P] of the weights that acted first in each row."""
        updates: NDArray[np.uint64] = self.columns["beginnings"][:, 0, 3]
        return updates

    def begin(
        self, states: dict[str, Tree], count: int, recorded: bool = False
    ) -> NDArray[np.intp]:
        """Begin new rows [B].

        Args:
            states: before their first steps [B, ...].
            count: B.
            recorded: log-probabilities come with the steps.
        """
        if self._places.grow(count):
            self.columns = grown(self.columns, self._places.capacity)
            self._view_by_step()
        places = np.array(self._places.allocate(count), np.intp)
        self.put_states(places, states)
        self.columns["recorded"][places] = recorded
        for name in ("terminated", "truncated"):
            self.columns[name][places] = False
        return places

    def put_states(self, rows: NDArray[np.intp], states: dict[str, Tree]) -> None:
        """Keep the states [B, ...] before the first steps of rows [B]."""
        if states and not self.columns["states"]:
            self.columns["states"] = room_for(states, self._places.capacity)
        if states:
            put(self.columns["states"], rows, states)

    def begin_episodes(self, at: NDArray[np.intp], beginnings: NDArray[np.uint64]) -> None:
        """Write beginnings [B, 4] of rows or episodes at steps [B]."""
        self.by_step["beginnings"][at] = beginnings

    def act(self, at: NDArray[np.intp], actions: Tree, inputs: NDArray[np.float32]) -> None:
        """Write the actions chosen at steps [B]."""
        if "actions" not in self.columns:
            self.make_room_for(actions)
        put(self.by_step["actions"], at, actions)
        put(self.by_step["inputs"], at, inputs)

    def record(self, row: int, step: int, steps: int, **columns: Any) -> None:
        """Write L steps of a row.

        Args:
            row: begun with `recorded`.
            step: the first.
            steps: L.
            columns: [L, ...], or one value for all.
        """
        if "actions" not in self.columns:
            self.make_room_for(columns["actions"])
        for name, values in columns.items():
            put(self.columns[name], (row, slice(step, step + steps)), values)

    def finish(self, rows: NDArray[np.intp], steps: NDArray[np.intp]) -> None:
        """Complete rows [B] of these numbers of steps [B]."""
        self.columns["lengths"][rows] = steps
        self.complete += rows.tolist()

    def release(self, row: int) -> None:
        """Free a row without a batch."""
        self._finals.pop(row, None)
        self._places.release(row)

    def ended_with(self, row: int, step: int, observation: Tree) -> None:
        """Keep the last observation of a truncated episode."""
        self._finals[row].append((step, observation))

    def move_steps(self, at: NDArray[np.intp], states: dict[str, Tree]) -> NDArray[np.intp]:
        """Begin new rows [B] with other rows' steps, and states."""
        new = self.begin(states, len(at))
        self.columns["places"][new] = self.columns["places"][at // self.width]
        for column in ("observations", "actions", "inputs"):
            values = take(self.by_step[column], at)
            put(self.by_step[column], new * self.width, values)
        return new

    def batch(self, count: int, log_probabilities: _LogProbabilities) -> EpisodeBatch:
        """Make a batch of the first N complete rows, and free them."""
        taken, self.complete = self.complete[:count], self.complete[count:]
        rows = np.array(taken, np.intp)  # [N]
        lengths = self.columns["lengths"][rows]  # [N]
        last_observations = take(self.columns["observations"], (rows, lengths))  # [N, ...]
        finals = [(n, *final) for n, row in enumerate(taken) for final in self._finals.pop(row, ())]
        # A slice, if possible, since fancy indexing takes several times as long.
        within: Any = (where(rows), slice(self.steps))
        kept: dict[str, Any] = {
            name: _copied(column, within) if name in self.by_step else take(column, rows)
            for name, column in self.columns.items()
        }  # [N, T, ...] or [N, ...]
        kept["lengths"] = lengths
        live = np.arange(self.steps) < lengths[:, None]  # [N, T]
        if not live.all():
            _fill_up(kept, live, last_observations)
        # From here on, all columns are copies.
        self._places.release(*taken)
        # Simulators that act by themselves have told theirs.
        action_logp = kept["action_logp"]  # [N, T]
        # Where the policy here has acted.
        ours = ~kept["recorded"]  # [N]
        if ours.any():
            actions = take(kept["actions"], ours)  # [O, T, ...]
            action_logp[ours] = log_probabilities(kept["inputs"][ours], actions)
        action_logp[~live] = 0
        # Rows that were cut are as long as others, with dead steps.
        return EpisodeBatch(
            observations=kept["observations"],
            actions=kept["actions"],
            **{name: kept[name] for name in _FILLED},
            live=live,
            last_observations=last_observations,
            states=kept["states"],
            final_observations=self._stacked([final[2] for final in finals]),
            final_rows=np.array([final[0] for final in finals], np.int32),
            final_steps=np.array([final[1] for final in finals], np.int32),
            **_segments(kept, live),
        )

    def _view_by_step(self) -> None:
        apart = ("lengths", "places", "states", "recorded")  # one value per row
        self.by_step = {
            name: tree_map(_flat, column)
            for name, column in self.columns.items()
            if name not in apart
        }

    def make_room_for(self, actions: Tree) -> None:
        """Add the column of actions, like the first ones [B, ...]."""
        self.columns["actions"] = tree_map(
            lambda one: np.zeros((self._places.capacity, self.width, *one.shape[1:]), one.dtype),
            actions,
        )
        self._view_by_step()

    def _stacked(self, observations: Sequence[Tree]) -> Tree:
        stacked: Tree = zeros(self._space, (len(observations),))  # [K, ...]
        for k, observation in enumerate(observations):
            put(stacked, k, observation)
        return stacked


def _flat(column: NDArray[Any]) -> NDArray[Any]:
    """View a column [P, T + 1, ...] step by step."""
    rows, width, *rest = column.shape
    return column.reshape(rows * width, *rest)  # not -1, because the rest may be of size 0


def _copied(tree: Any, within: tuple[Any, Any]) -> Any:
    """Copy some rows and steps [N, T, ...]."""
    if isinstance(within[0], slice):
        return tree_map(lambda array: array[within].copy(), tree)
    return take(tree, within)


def where(rows: NDArray[np.intp]) -> Where:
    """Return rows [B], as a slice if consecutive, which is written faster."""
    first, count = int(rows[0]), len(rows)
    follow = int(rows[-1]) - first == count - 1 and bool((np.diff(rows) == 1).all())
    return slice(first, first + count) if follow else rows


def oldest_version(batch: EpisodeBatch) -> Version:
    """Return the oldest weights that acted in a batch."""
    generations, updates = batch.segment_generations, batch.segment_updates
    return Version(*min(zip(generations.tolist(), updates.tolist(), strict=True)))


def _fill_up(kept: dict[str, Any], live: NDArray[np.bool_], last_observations: Tree) -> None:
    """Fill short rows with their last observation, their last action, and zeros."""
    rows, steps = np.nonzero(~live)  # [D] both
    put(kept["observations"], (rows, steps), take(last_observations, rows))
    last = np.maximum(kept["lengths"][rows] - 1, 0)  # [D]
    put(kept["actions"], (rows, steps), take(kept["actions"], (rows, last)))
    kept["inputs"][rows, steps] = kept["inputs"][rows, last]
    for name in _FILLED:
        kept[name][~live] = 0


def segments_of(
    live: NDArray[np.bool_], done: NDArray[np.bool_]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Find the segments of rows -> rows, first and last steps [S].

    Args:
        live: [N, T]
        done: [N, T], the last step of an episode.
    """
    first, last = live.copy(), live.copy()  # [N, T] both
    first[:, 1:] &= done[:, :-1] | ~live[:, :-1]
    last[:, :-1] &= done[:, :-1] | ~live[:, 1:]
    starts, ends = first.ravel().nonzero()[0], last.ravel().nonzero()[0]  # [S] both, of all steps
    rows = starts // live.shape[1]  # [S]
    return rows, starts - rows * live.shape[1], ends - rows * live.shape[1]


def _segments(kept: dict[str, Any], live: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    """Return the segments of rows, each with the oldest weights that acted.

    A segment is a stretch of one episode. It is not split where weights change, because a sequence
    model must see it whole.
    """
    rows, starts, ends = segments_of(live, kept["terminated"] | kept["truncated"])  # [S] each
    beginnings = kept["beginnings"][rows, starts]  # [S, 4]
    return {
        "segment_episodes": beginnings[:, 0].copy(),
        "segment_rows": rows.astype(np.int32),
        "segment_starts": starts.astype(np.int32),
        "segment_lengths": (ends - starts + 1).astype(np.int32),
        "segment_offsets": beginnings[:, 1].astype(np.int32),
        "segment_generations": beginnings[:, 2].copy(),
        "segment_updates": beginnings[:, 3].copy(),
    }


class SlotAllocator:
    """Allocates numbers from 0, the lowest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def grow(self, more: int) -> bool:
        """Ensure that this many are free. True: the capacity has grown."""
        before = self.capacity
        while len(self._free) < more:
            new = range(self.capacity, 2 * self.capacity)
            self._free = [*reversed(new), *self._free]
            self.capacity *= 2
        return self.capacity != before

    def allocate(self, count: int) -> list[int]:
        """Take this many places, which `grow` has ensured."""
        left = len(self._free) - count
        taken = self._free[left:]
        del self._free[left:]
        return taken[::-1]

    def release(self, *places: int) -> None:
        self._free += places[::-1]
