"""Agents that act at their own pace, and the rows that they fill."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.envrunner.paced.rows import Places, Rows
from juggler.runtime.acting.actor import Actor
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.structures import grown, put, take
from juggler.runtime.wire.trees import Tree

_FIRST_PLACES = 64


class PacedSlots:
    """Slots, each with one agent of one environment, and a row while its steps are recorded.

    An agent that acts is followed by three calls, in this order: `take_rewards` with the reward of
    its action; `end` if that action was its last one in the episode; `observe` with the observation
    after it. A row with T steps is complete when that observation is known.

    Args:
        observation_space: of the observations in batches.
        policy: acts for the agents.
        steps: T, of a row.
        row_age: the most updates by which the weights of a row's first step may be behind the
            newest ones.

    Attributes:
        rows: filling and complete.
        ended: return and length of the episodes that ended since the caller emptied the list.
        counts: of events so far, by name.
        of: what is known of each place, as arrays by name.
        newest: [2] generation and update of the weights that act.
    """

    def __init__(
        self,
        observation_space: Space[Any],
        policy: Actor,
        steps: int,
        row_age: int,
    ) -> None:
        self.rows = Rows(observation_space, steps, policy.blank_inputs)
        self.ended: list[tuple[float, int]] = []
        self.counts: Counter[str] = Counter()
        policy.require_log_probabilities()
        self._policy = policy
        self._steps = steps
        self._row_age = row_age
        self._places = Places(_FIRST_PLACES)
        policy.grow(_FIRST_PLACES)
        self._next_episode = 0
        self.newest = np.zeros(2, np.uint64)
        self._any_stale = False  # an agent's step under way may be the first of a row and stale
        self.of: dict[str, NDArray[Any]] = {
            "row": np.full(_FIRST_PLACES, -1, np.intp),  # -1: none
            "step": np.zeros(_FIRST_PLACES, np.intp),  # complete steps of the row
            "acted": np.zeros(_FIRST_PLACES, np.bool_),  # the reward of an action is due
            "acted_at": np.zeros(_FIRST_PLACES),  # seconds
            # Generation and update of the weights that acted last.
            "version": np.zeros((_FIRST_PLACES, 2), np.uint64),
            "first": np.ones(_FIRST_PLACES, np.bool_),  # the next action begins an episode
            "episode": np.zeros(_FIRST_PLACES, np.uint64),
            "length": np.zeros(_FIRST_PLACES, np.int64),
            "return": np.zeros(_FIRST_PLACES, np.float64),
        }

    def __len__(self) -> int:
        return self._places.used

    def seat(self, count: int) -> list[int]:
        """Places for new agents."""
        before = self._places.capacity
        if self._places.grow(count):
            self.of = grown(self.of, self._places.capacity)
            self.of["row"][before:] = -1
            self._policy.grow(self._places.capacity)
        places = self._places.take(count)
        self.of["row"][places], self.of["acted"][places] = -1, False
        self.of["first"][places], self.of["length"][places] = True, 0
        self.of["return"][places] = 0
        return places

    def forget(self) -> None:
        """Drop all rows and running episodes; each place's next action begins an episode."""
        for row in [*self.of["row"][self.of["row"] >= 0].tolist(), *self.rows.complete]:
            self.rows.give_back(row)
        self.rows.complete.clear()
        self.ended.clear()
        self.of["row"][:], self.of["acted"][:], self.of["first"][:] = -1, False, True
        self.of["length"][:], self.of["return"][:] = 0, 0

    def new_episodes(self, count: int) -> NDArray[np.intp]:
        """The ids of new episodes."""
        self._next_episode += count
        return np.arange(self._next_episode - count, self._next_episode)

    # -- what becomes of actions -----------------------------------------------------------------

    def take_rewards(self, places: NDArray[np.intp], rewards: NDArray[np.floating[Any]]) -> None:
        """Take the rewards [B] of the last actions at places [B], whose steps are complete then."""
        of = self.of
        self.counts["steps"] += len(places)
        self._policy.rewarded(rewards, places)
        of["length"][places] += 1
        of["return"][places] += rewards
        of["acted"][places] = False
        rows = of["row"][places]  # [B]
        unrecorded = int(np.count_nonzero(rows < 0))
        self.counts["steps_unrecorded"] += unrecorded
        if self._any_stale:
            self.let_go_of_stale(places)
            rows = of["row"][places]
        if unrecorded or self._any_stale:
            recorded = rows >= 0  # [B]
            places, rewards, rows = places[recorded], rewards[recorded], rows[recorded]
        steps = of["step"][places]  # [B]
        self.rows.by_step["rewards"][rows * self.rows.width + steps] = rewards
        of["step"][places] = steps + 1

    def end(
        self,
        places: NDArray[np.intp],
        truncated: NDArray[np.bool_],
        final_observations: Tree,
    ) -> None:
        """End the episodes at places [B] with the steps that were last rewarded.

        Args:
            places: of the agents, whose next actions begin an episode.
            truncated: [B]; the others terminated.
            final_observations: [K, ...] of those that were truncated.
        """
        rows, last = self.of["row"][places], self.of["step"][places] - 1  # [B] both
        for name, which in (("terminated", ~truncated), ("truncated", truncated)):
            recorded = which & (rows >= 0)  # [B]
            self.rows.columns[name][rows[recorded], last[recorded]] = True
        for k, at in enumerate(truncated.nonzero()[0].tolist()):
            if rows[at] >= 0:
                self.rows.ended_with(int(rows[at]), int(last[at]), take(final_observations, k))
        self._end_episodes(places)

    def _end_episodes(self, places: NDArray[np.intp]) -> None:
        of = self.of
        self.ended += zip(of["return"][places].tolist(), of["length"][places].tolist(), strict=True)
        self._forget_episodes(places)

    def _forget_episodes(self, places: NDArray[np.intp]) -> None:
        """Start new episodes with the next actions at places [B]."""
        of = self.of
        of["return"][places], of["length"][places], of["first"][places] = 0, 0, True

    def observe(self, places: NDArray[np.intp], observations: Tree) -> None:
        """Take the observations [B, ...] after the last actions at places [B], in their rows."""
        of = self.of
        rows = of["row"][places]  # [B]
        if np.count_nonzero(rows < 0):
            recorded = rows >= 0  # [B]
            places, rows, observations = (
                places[recorded],
                rows[recorded],
                take(observations, recorded),
            )
        steps = of["step"][places]  # [B]
        put(self.rows.by_step["observations"], rows * self.rows.width + steps, observations)
        full = steps == self._steps  # [B]
        if np.count_nonzero(full):
            self.rows.finish(rows[full], steps[full])
            of["row"][places[full]] = -1

    def let_go_of_stale(self, places: NDArray[np.intp]) -> int:
        """Free the rows at places [B] whose first step, under way so far, took so long that it is
        stale -> how many."""
        if not self._any_stale:
            return 0
        places = places[self._is_stale(places)]
        for row in self.of["row"][places].tolist():
            self.rows.give_back(row)
        self.counts["steps_stale"] += len(places)
        self.of["row"][places] = -1
        return len(places)

    def _is_stale(self, places: NDArray[np.intp]) -> NDArray[np.bool_]:
        """[B] at which places [B] the step under way is the first of its row, and stale."""
        rows = self.of["row"][places]  # [B]
        stale: NDArray[np.bool_] = (rows >= 0) & (self.of["step"][places] == 0) & self._is_old(rows)
        return stale

    def steps_before(self, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """[B] complete steps of the rows at places [B]; -1: a step is under way that will be in no
        row."""
        of = self.of
        in_row = of["row"][places] >= 0  # [B]
        if self._any_stale:
            in_row &= ~self._is_stale(places)
        return np.where(in_row, of["step"][places], -of["acted"][places].astype(np.intp))

    # -- what is done there ----------------------------------------------------------------------

    def act(
        self, places: NDArray[np.intp], recording: NDArray[np.bool_], observations: Tree
    ) -> Any:
        """Let the policy act -> the actions for environments.

        Args:
            places: [B]
            recording: [B] whose steps are recorded.
            observations: [B, ...] as batches hold them.
        """
        of = self.of
        first = of["first"][places]  # [B]
        if np.count_nonzero(first):
            self._begin_episodes(places[first])
        sent, actions, inputs = self._policy.act(observations, places, first)
        of["acted"][places] = True
        of["version"][places] = self.newest
        if np.count_nonzero(recording) < len(recording):
            places, first, inputs = places[recording], first[recording], inputs[recording]
            observations, actions = take(observations, recording), take(actions, recording)
        rows = of["row"][places]  # [B]
        new = rows < 0  # [B]
        if np.count_nonzero(new):
            rows[new] = self.begin_rows(places[new], self._policy.states_before(places[new]))
            begun = rows[new] * self.rows.width
            put(self.rows.by_step["observations"], begun, take(observations, new))
            first |= new
        at = rows * self.rows.width + of["step"][places]  # [B]
        if np.count_nonzero(first):
            self.rows.begin_episodes(at[first], self._beginnings(places[first]))
        self.rows.act(at, actions, inputs)
        return sent

    def _begin_episodes(self, places: NDArray[np.intp]) -> None:
        self.of["episode"][places] = self.new_episodes(len(places))
        self.of["first"][places] = False

    def begin_rows(self, places: NDArray[np.intp], states: dict[str, Tree]) -> NDArray[np.intp]:
        """New rows [B] at places [B], with the states [B, ...] before their first steps."""
        rows = self.rows.begin(states, len(places))
        self.of["row"][places], self.of["step"][places] = rows, 0
        self.rows.columns["places"][rows] = places
        return rows

    def _beginnings(self, places: NDArray[np.intp]) -> NDArray[np.uint64]:
        """What `Rows` notes of steps [B] under way with which a row or an episode begins: [B, 4]"""
        of = self.of
        beginnings = np.empty((len(places), 4), np.uint64)
        beginnings[:, 0], beginnings[:, 1] = of["episode"][places], of["length"][places]
        beginnings[:, 2:] = of["version"][places]
        return beginnings

    # -- rows that are handed in short ------------------------------------------------------------

    def use(self, version: Version) -> None:
        """Stamp steps with newer weights from now on, and hand in rows that are too old by now."""
        self.newest[:] = version
        self.hand_in(self._is_old(self.of["row"]))

    def pause(self, places: NDArray[np.intp]) -> None:
        """Complete the rows of places [B] that have been observed, and whose next step is not
        recorded."""
        held = places[self.of["row"][places] >= 0]
        self.rows.finish(self.of["row"][held], self.of["step"][held])
        self.of["row"][held] = -1

    def _is_old(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """[B] which of rows [B] began with weights that are too old by now."""
        begun = self.rows.first_updates[rows]  # [B]
        old: NDArray[np.bool_] = begun + np.uint64(self._row_age) < self.newest[1]
        return old

    def hand_in(self, which: NDArray[np.bool_]) -> None:
        """Complete rows as they are, where they have a complete step.

        Args:
            which: [S] of all places. A step under way begins another row there.
        """
        of, rows = self.of, self.rows
        places = np.flatnonzero(which & (of["row"] >= 0) & (of["step"] > 0))  # [B]
        if len(places):
            self.counts["rows_cut"] += len(places)
        rows.finish(of["row"][places], of["step"][places])
        acted = places[of["acted"][places]]
        at = of["row"][acted] * rows.width + of["step"][acted]
        of["row"][places] = -1
        if len(acted):
            new = rows.move_steps(at, self._policy.states_before(acted))
            rows.begin_episodes(new * rows.width, self._beginnings(acted))
            of["row"][acted] = new
        of["step"][places] = 0
        standing = of["acted"] & (of["row"] >= 0) & (of["step"] == 0)
        self._any_stale = bool((standing & self._is_old(of["row"])).any())

    def drop_stale(self) -> int:
        """Free complete rows that are too old for a batch -> the steps in them."""
        rows = self.rows
        # A row that is full in time waits for at most as long again.
        oldest = int(self.newest[1]) - 2 * self._row_age
        if oldest <= 0 or not rows.complete:
            return 0
        complete = np.array(rows.complete, np.intp)
        old = complete[rows.first_updates[complete] < oldest]
        dropped = int(rows.columns["lengths"][old].sum())
        gone = set(old.tolist())
        rows.complete = [row for row in rows.complete if row not in gone]
        for row in old.tolist():
            rows.give_back(row)
        self.counts["steps_stale"] += dropped
        return dropped
