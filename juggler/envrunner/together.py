"""Columns of rows that all act at once, and their episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from numpy.typing import NDArray

from juggler.envrunner.environments.accepted_vector import on_host
from juggler.runtime.acting.actor import Acted
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.structures import put, tree_map, zeros
from juggler.runtime.wire.trees import Tree

LogProbabilities = Callable[[Any, Tree], NDArray[np.float32]]
#: Row, step, and last observation of a truncated episode.
FinalObservation = tuple[int, int, Tree]


def running_episodes(rows: int) -> dict[str, NDArray[Any]]:
    """Return the state of new episodes, as arrays [N] by name."""
    return {
        "first": np.ones(rows, np.bool_),  # the next action begins an episode
        "episode": np.zeros(rows, np.uint64),
        "length": np.zeros(rows, np.int64),
        "return": np.zeros(rows, np.float64),
    }


class EpisodeIds:
    """Numbers episodes from 0."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, count: int) -> NDArray[np.uint64]:
        """Return the ids of new episodes."""
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.uint64)


class Segments(NamedTuple):
    """Stretches of episodes within rows."""

    rows: NDArray[np.intp]  # [S]
    starts: NDArray[np.intp]  # [S] first steps in their rows
    lengths: NDArray[np.intp]  # [S]
    episodes: NDArray[np.uint64]  # [S]
    offsets: NDArray[Any]  # [S] earlier steps of the same episodes

    def columns(self, versions: NDArray[np.uint64]) -> dict[str, NDArray[Any]]:
        """Return the columns of a batch.

        Args:
            versions: [S, 2] generations and updates of the weights that acted.
        """
        return {
            "segment_episodes": self.episodes.copy(),
            "segment_rows": self.rows.astype(np.int32),
            "segment_starts": self.starts.astype(np.int32),
            "segment_lengths": self.lengths.astype(np.int32),
            "segment_offsets": self.offsets.astype(np.int32),
            "segment_generations": versions[:, 0].copy(),
            "segment_updates": versions[:, 1].copy(),
        }


class Together:
    """T steps of N rows that all act at once.

    Columns are [N, T, ...], in their own memory, and become a batch as they are.

    Args:
        space: of observations in batches; None: only episodes are booked.

    Attributes:
        step: complete steps.
        acted: the rewards of actions are due.
        version: [2] generation and update of the weights that act.
        live: [N, T] false where a step only resets its environment, with reward 0 and no end.
        chosen: T x [N, ...]
        inputs: T x [N, D] of the actions' distribution; []: the module returns none.
        finals: of truncated episodes.
        seen: T + 1 x [N, ...] observations before each step and after the last, as views.
    """

    def __init__(self, space: Space[Any] | None, rows: int, steps: int) -> None:
        self.space, self.step, self.acted = space, 0, False
        self.version = np.zeros(2, np.uint64)
        shape = rows, steps
        # Float64, because returns are their sums.
        self.rewards = np.zeros(shape)
        self.terminated, self.truncated = np.zeros((2, *shape), np.bool_)
        self.live = np.ones(shape, np.bool_)
        self.states: dict[str, Tree] = {}  # [N, ...] before the first step
        self.chosen: list[Any] = []
        self.inputs: list[Any] = []
        self.finals: list[FinalObservation] = []
        self.segments: list[Segments] = []  # by `book`
        self._booked = 0  # steps whose episodes are booked
        if space is not None:
            self.observations: Any = zeros(space, shape)  # [N, T, ...]
            self.last_observations: Any = zeros(space, (rows,))  # [N, ...]
            # Policies read observations where they are stored.
            self.seen = [*_by_step(self.observations, steps), self.last_observations]

    def add(self, acted: Acted) -> None:
        """Add the actions of the next step."""
        self.chosen.append(acted.chosen)
        if acted.inputs is not None:
            self.inputs.append(acted.inputs)

    def book(
        self, running: dict[str, NDArray[Any]], new_ids: EpisodeIds
    ) -> tuple[list[float], list[int]]:
        """Book the episodes of the complete steps since the last call.

        Args:
            running: see `running_episodes`; advanced.

        Returns:
            The returns and lengths of the episodes that ended, by their last steps.
        """
        if self._booked == self.step:
            return [], []
        begun, self._booked = self._booked, self.step
        now = slice(begun, self.step)
        rewards, done = self.rewards[:, now], (self.terminated | self.truncated)[:, now]  # [N, t]
        rows, starts, ends = segments_of(self.live[:, now], done)  # [S] each
        last, leads = np.ones((2, len(rows)), np.bool_)  # [S] both, of their rows
        last[:-1] = leads[1:] = rows[1:] != rows[:-1]
        # The first segment of a row may belong to a running episode, all others to new ones.
        continues = leads & ~running["first"][rows]  # [S]
        episodes, lengths = running["episode"][rows], ends - starts + 1  # [S] both
        episodes[~continues] = new_ids(int(np.count_nonzero(~continues)))
        # An episode's returns and lengths include its steps in earlier calls.
        offsets = np.where(continues, running["length"][rows], 0)  # [S]
        self.segments.append(Segments(rows, starts + begun, lengths, episodes, offsets))
        # Sums from each start to the next one; steps between segments have reward 0.
        sums = np.add.reduceat(rewards.ravel(), rows * done.shape[1] + starts)  # [S]
        returns, lengths = np.where(continues, running["return"][rows], 0) + sums, offsets + lengths
        over = done[rows, ends]  # [S]
        at, ended = rows[last], over[last]  # of rows with a live step
        running["episode"][at], running["first"][at] = episodes[last], ended
        running["length"][at] = np.where(ended, 0, lengths[last])
        running["return"][at] = np.where(ended, 0, returns[last])
        # In the order of time, as a run reports them.
        order = np.flatnonzero(over)[np.argsort(ends[over], kind="stable")]  # [E]
        return returns[order].tolist(), lengths[order].tolist()

    def actions(self) -> Tree:
        """Return the chosen actions [N, T, ...]."""
        actions: Tree = tree_map(_over_steps, *self.chosen)
        return actions

    def batch(self, log_probabilities: LogProbabilities) -> EpisodeBatch:
        """Make a batch of steps that were booked at once."""
        assert self.space is not None
        (segments,) = self.segments
        actions, logp = self.actions(), np.zeros(self.rewards.shape, np.float32)  # [N, T, ...]
        if self.inputs:
            logp = log_probabilities(_over_steps(*self.inputs), actions)
        # Columns are not copied: nothing writes into them any more.
        return EpisodeBatch(
            observations=self.observations,
            actions=on_host(actions),
            rewards=self.rewards.astype(np.float32),
            terminated=self.terminated,
            truncated=self.truncated,
            live=self.live,
            action_logp=logp,
            last_observations=self.last_observations,
            states=self.states,
            **final_columns(self.space, self.finals),
            **segments.columns(np.tile(self.version, (len(segments.rows), 1))),
        )


def final_columns(space: Space[Any], finals: Sequence[FinalObservation]) -> dict[str, Any]:
    """Return a batch's columns of truncated episodes [K]."""
    observations = zeros(space, (len(finals),))  # [K, ...]
    for k, (*_, observation) in enumerate(finals):
        put(observations, k, observation)
    rows, steps = np.array([final[:2] for final in finals], np.int32).reshape(-1, 2).T.copy()
    return {"final_observations": observations, "final_rows": rows, "final_steps": steps}


def segments_of(
    live: NDArray[np.bool_], done: NDArray[np.bool_]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Find the segments of rows -> rows, first and last steps [S].

    Args:
        live: [N, T]
        done: [N, T], the last step of an episode.
    """
    first, last, dead = live.copy(), live.copy(), ~live  # [N, T] each
    first[:, 1:] &= done[:, :-1] | dead[:, :-1]
    last[:, :-1] &= done[:, :-1] | dead[:, 1:]
    starts, ends = first.ravel().nonzero()[0], last.ravel().nonzero()[0]  # [S] both, of all steps
    rows = starts // live.shape[1]  # [S]
    before = rows * live.shape[1]  # [S]
    return rows, starts - before, ends - before


def _over_steps(*leaves: Any) -> Any:
    """Stack T arrays or tensors [N, ...] to [N, T, ...]."""
    return np.stack(leaves, 1) if isinstance(leaves[0], np.ndarray) else torch.stack(leaves, 1)


def _by_step(columns: Any, steps: int) -> Any:
    """Split columns [N, T, ...] into views T x [N, ...]."""
    if isinstance(columns, np.ndarray):
        return columns.swapaxes(0, 1)
    branches = {key: _by_step(branch, steps) for key, branch in columns.items()}
    return [{key: views[t] for key, views in branches.items()} for t in range(steps)]
