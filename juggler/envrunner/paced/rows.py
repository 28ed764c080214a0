"""Rows of T steps, which fill up step by step and become batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.envrunner.paced.places import Places, grown, put, room_for, take
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree

_LogProbabilities = Callable[[NDArray[np.float32], Tree], NDArray[np.float32]]
_FIRST_ROWS = 32


class Rows:
    """Memory for rows, each filled by one agent at a time.

    Columns are [P, T, ...], and are written directly as rows fill up.

    Args:
        observation_space: of the observations in batches.
        steps: T.
        blank_inputs: of the policy's distribution [D].

    Attributes:
        complete: rows that are ready, in order.
    """

    def __init__(
        self, observation_space: Space[Any], steps: int, blank_inputs: NDArray[np.float32]
    ) -> None:
        self.steps = steps
        self.complete: list[int] = []
        self._space = observation_space
        self._places = Places(_FIRST_ROWS)
        shape = (_FIRST_ROWS, steps)
        self.columns: dict[str, Any] = {
            "observations": zeros(observation_space, shape),
            "rewards": np.zeros(shape, np.float32),
            "terminated": np.zeros(shape, np.bool_),
            "truncated": np.zeros(shape, np.bool_),
            "episodes": np.zeros(shape, np.uint64),
            "offsets": np.zeros(shape, np.int32),  # steps of the same episode before it
            "generations": np.zeros(shape, np.uint64),
            "updates": np.zeros(shape, np.uint64),
            "lengths": np.zeros(_FIRST_ROWS, np.intp),  # steps of a complete row
            "places": np.zeros(_FIRST_ROWS, np.intp),  # of the agent, where it acts here
            "last_observations": zeros(observation_space, (_FIRST_ROWS,)),
            "states": {},
            # Its log-probabilities came with its steps.
            "recorded": np.zeros(_FIRST_ROWS, np.bool_),
            "action_logp": np.zeros(shape, np.float32),
            "inputs": np.zeros((*shape, *blank_inputs.shape), np.float32),
        }
        self._finals: dict[int, list[tuple[int, Tree]]] = defaultdict(list)  # step, observation

    @property
    def begun(self) -> int:
        """Rows that are neither free nor complete."""
        return self._places.used - len(self.complete)

    def begin(
        self, states: dict[str, Tree], count: int, recorded: bool = False
    ) -> NDArray[np.intp]:
        """New rows [B].

        Args:
            states: before their first steps [B, ...].
            count: B.
            recorded: log-probabilities come with the steps.
        """
        if self._places.grow(count):
            self.columns = grown(self.columns, self._places.capacity)
        places = np.array([self._places.take() for _ in range(count)], np.intp)
        if states and not self.columns["states"]:
            self.columns["states"] = room_for(states, self._places.capacity)
        put(self.columns["states"], places, states)
        self.columns["recorded"][places] = recorded
        self.columns["terminated"][places] = False
        self.columns["truncated"][places] = False
        return places

    def act(
        self,
        rows: NDArray[np.intp],
        steps: NDArray[np.intp],
        actions: Tree,
        inputs: NDArray[np.float32],
        **columns: Any,
    ) -> None:
        """Write the actions chosen at steps [B] of rows [B]."""
        self._make_room_for(actions)
        put(self.columns["actions"], (rows, steps), actions)
        self.columns["inputs"][rows, steps] = inputs
        for name, values in columns.items():
            self.columns[name][rows, steps] = values

    def record(self, row: int, step: int, steps: int, **columns: Any) -> None:
        """Write L steps of a row.

        Args:
            row: which began as `recorded`.
            step: the first.
            steps: L.
            columns: [L, ...], or one value for all.
        """
        self._make_room_for(columns["actions"])
        for name, values in columns.items():
            put(self.columns[name], (row, slice(step, step + steps)), values)

    def finish(self, row: int, steps: int, last_observation: Tree) -> None:
        """Complete a row that has so many steps, with the observation after them."""
        self.columns["lengths"][row] = steps
        put(self.columns["last_observations"], row, last_observation)
        self.complete.append(row)

    def give_back(self, row: int) -> None:
        """Free a row without a batch."""
        self._finals.pop(row, None)
        self._places.give_back(row)

    def ended_with(self, row: int, step: int, observation: Tree) -> None:
        """Keep the last observation of a truncated episode."""
        self._finals[row].append((step, observation))

    def move_step(self, row: int, step: int, states: dict[str, Tree]) -> int:
        """A new row that begins with a step of another row, and with states [1, ...]."""
        (new,) = self.begin(states, 1).tolist()
        self.columns["places"][new] = self.columns["places"][row]
        for name, column in self.columns.items():
            if name not in ("lengths", "places", "last_observations", "states", "recorded"):
                put(column, (new, 0), take(column, (row, step)))
        self.columns["terminated"][new] = self.columns["truncated"][new] = False
        return int(new)

    def batch(self, count: int, log_probabilities: _LogProbabilities) -> EpisodeBatch:
        """A batch of the first N complete rows, which are free afterwards."""
        taken, self.complete = self.complete[:count], self.complete[count:]
        kept: dict[str, Any] = take(self.columns, np.array(taken, np.intp))  # [N, ...]
        live = np.arange(self.steps) < kept["lengths"][:, None]  # [N, T]
        if not live.all():
            _fill_up(kept, live)
        finals = [(n, *final) for n, row in enumerate(taken) for final in self._finals[row]]
        for row in taken:
            self.give_back(row)
        action_logp = kept["action_logp"]  # [N, T]
        ours = ~kept["recorded"]  # [N]
        if ours.any():
            actions = take(kept["actions"], ours)  # [O, T, ...]
            action_logp[ours] = log_probabilities(kept["inputs"][ours], actions)
        action_logp[~live] = 0
        return EpisodeBatch(
            observations=kept["observations"],
            actions=kept["actions"],
            rewards=kept["rewards"],
            terminated=kept["terminated"],
            truncated=kept["truncated"],
            live=live,
            action_logp=action_logp,
            last_observations=kept["last_observations"],
            states=kept["states"],
            final_observations=self._stacked([final[2] for final in finals]),
            final_rows=np.array([final[0] for final in finals], np.int32),
            final_steps=np.array([final[1] for final in finals], np.int32),
            **_segments(kept, live),
        )

    def _make_room_for(self, actions: Tree) -> None:
        """Add the column of actions, whose shapes are known from the first ones [B, ...]."""
        if "actions" not in self.columns:
            self.columns["actions"] = tree_map(
                lambda one: np.zeros(
                    (self._places.capacity, self.steps, *one.shape[1:]), one.dtype
                ),
                actions,
            )

    def _stacked(self, observations: Sequence[Tree]) -> Tree:
        stacked: Tree = zeros(self._space, (len(observations),))  # [K, ...]
        for k, observation in enumerate(observations):
            put(stacked, k, observation)
        return stacked


def oldest_version(batch: EpisodeBatch) -> Version:
    """The oldest weights that acted in a batch."""
    generations, updates = batch.segment_generations, batch.segment_updates
    return Version(*min(zip(generations.tolist(), updates.tolist(), strict=True)))


def _fill_up(kept: dict[str, Any], live: NDArray[np.bool_]) -> None:
    """Fill short rows with their last observation, their last action, and zeros."""
    rows, steps = np.nonzero(~live)  # [D] both
    put(kept["observations"], (rows, steps), take(kept["last_observations"], rows))
    last = kept["lengths"][rows] - 1  # [D]
    put(kept["actions"], (rows, steps), take(kept["actions"], (rows, last)))
    kept["inputs"][rows, steps] = kept["inputs"][rows, last]
    for name in ("rewards", "terminated", "truncated"):
        kept[name][~live] = 0


def _segments(kept: dict[str, Any], live: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    """Segments, each a stretch of one episode in a row, with the oldest weights that acted in it: a
    sequence model must see it whole, and weights may change in its middle."""
    episodes = kept["episodes"]  # [N, T]
    other = episodes[:, 1:] != episodes[:, :-1]  # [N, T - 1]
    first, last = live.copy(), live.copy()  # [N, T] both
    first[:, 1:] &= ~live[:, :-1] | other
    last[:, :-1] &= ~live[:, 1:] | other
    rows, starts = np.nonzero(first)  # [S] both
    ends = np.nonzero(last)[1]  # [S]
    return {
        "segment_episodes": episodes[rows, starts],
        "segment_rows": rows.astype(np.int32),
        "segment_starts": starts.astype(np.int32),
        "segment_lengths": (ends - starts + 1).astype(np.int32),
        "segment_offsets": kept["offsets"][rows, starts],
        "segment_generations": kept["generations"][rows, starts],
        "segment_updates": kept["updates"][rows, starts],
    }
