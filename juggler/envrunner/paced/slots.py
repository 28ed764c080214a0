"""Agents that act at their own pace, and the rows that they fill."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.envrunner.paced.gathered_policy import GatheredPolicy
from juggler.envrunner.paced.places import Places, grown, put, take
from juggler.envrunner.paced.rows import Rows
from juggler.runtime.episodes.version import Version
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
    """

    def __init__(
        self, observation_space: Space[Any], policy: GatheredPolicy, steps: int, row_age: int
    ) -> None:
        self.rows = Rows(observation_space, steps, policy.blank_inputs)
        self.ended: list[tuple[float, int]] = []
        self.counts: Counter[str] = Counter()
        self._policy = policy
        self._steps = steps
        self._row_age = row_age
        self._places = Places(_FIRST_PLACES)
        policy.grow(_FIRST_PLACES)
        self._next_episode = 0
        self._newest = Version(0, 0)  # weights
        self.of: dict[str, NDArray[Any]] = {
            "row": np.full(_FIRST_PLACES, -1, np.intp),  # -1: none
            "step": np.zeros(_FIRST_PLACES, np.intp),  # complete steps of the row
            "acted": np.zeros(_FIRST_PLACES, np.bool_),  # the reward of an action is due
            "acted_at": np.zeros(_FIRST_PLACES),  # seconds
            "first": np.ones(_FIRST_PLACES, np.bool_),  # the next action begins an episode
            "episode": np.zeros(_FIRST_PLACES, np.uint64),
            "length": np.zeros(_FIRST_PLACES, np.int64),
            "return": np.zeros(_FIRST_PLACES, np.float64),
        }

    def __len__(self) -> int:
        return self._places.used

    def seat(self, count: int) -> list[int]:
        """Places for new agents."""
        if self._places.grow(count):
            self.of = grown(self.of, self._places.capacity)
            self._policy.grow(self._places.capacity)
        places = [self._places.take() for _ in range(count)]
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

    def new_episode(self) -> int:
        """The id of a new episode."""
        self._next_episode += 1
        return self._next_episode - 1

    # -- what becomes of actions -----------------------------------------------------------------

    def take_rewards(self, places: NDArray[np.intp], rewards: NDArray[np.floating[Any]]) -> None:
        """Take the rewards [B] of the last actions at places [B], whose steps are complete then."""
        of, columns = self.of, self.rows.columns
        self.counts["steps"] += len(places)
        self._policy.rewarded(places, rewards.astype(np.float32))
        of["length"][places] += 1
        of["return"][places] += rewards
        of["acted"][places] = False
        self.counts["steps_unrecorded"] += int(np.count_nonzero(of["row"][places] < 0))
        self._let_go_of_old(places)
        recorded = of["row"][places] >= 0  # [B]
        if recorded.all():
            held = places
        else:
            held, rewards = places[recorded], rewards[recorded]
        columns["rewards"][of["row"][held], of["step"][held]] = rewards
        of["step"][held] += 1

    def end(self, place: int, final_observation: Tree | None) -> None:
        """End the episode at a place with the step that was last rewarded.

        Args:
            place: of the agent, whose next action begins an episode.
            final_observation: [...] of an episode that was truncated; None: it terminated.
        """
        row, last = int(self.of["row"][place]), int(self.of["step"][place]) - 1
        if row >= 0:
            name = "terminated" if final_observation is None else "truncated"
            self.rows.columns[name][row, last] = True
            if final_observation is not None:
                self.rows.ended_with(row, last, final_observation)
        self._end_episode(place)

    def _end_episode(self, place: int) -> None:
        self.ended.append((float(self.of["return"][place]), int(self.of["length"][place])))
        self.of["return"][place], self.of["length"][place] = 0, 0
        self.of["first"][place] = True

    def observe(self, places: NDArray[np.intp], observations: Tree) -> None:
        """Take the observations [B, ...] after the last actions at places [B], in their rows."""
        of = self.of
        recorded = of["row"][places] >= 0  # [B]
        held = places[recorded]
        full = of["step"][held] == self._steps  # [B]
        if recorded.all() and not full.any():
            put(
                self.rows.columns["observations"], (of["row"][held], of["step"][held]), observations
            )
            return
        going, after = held[~full], take(observations, np.flatnonzero(recorded)[~full])
        put(self.rows.columns["observations"], (of["row"][going], of["step"][going]), after)
        at_full = np.flatnonzero(recorded)[full]
        for at, place in zip(at_full.tolist(), held[full].tolist(), strict=True):
            self.rows.finish(int(of["row"][place]), self._steps, take(observations, at))
            of["row"][place] = -1

    def _let_go_of_old(self, places: NDArray[np.intp]) -> None:
        """Free rows whose first step took so long that it is stale."""
        begun = places[(self.of["row"][places] >= 0) & (self.of["step"][places] == 0)]
        if not len(begun):
            return
        for place in begun[self._is_old(self.of["row"][begun])].tolist():
            self.rows.give_back(int(self.of["row"][place]))
            self.of["row"][place] = -1
            self.counts["steps_stale"] += 1

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
        begun = places[first]
        of["episode"][begun] = np.arange(self._next_episode, self._next_episode + len(begun))
        self._next_episode += len(begun)
        sent, actions, inputs = self._policy.act(observations, places, first)
        of["first"][places] = False
        new = recording & (of["row"][places] < 0)  # [B]
        if new.any():
            at = places[new]
            rows = self.rows.begin(self._policy.states_before(at), len(at))
            of["row"][at], of["step"][at] = rows, 0
            self.rows.columns["places"][rows] = at
            put(self.rows.columns["observations"], (rows, 0), take(observations, new))
        if not recording.all():
            inputs, actions = inputs[recording], take(actions, recording)
        kept = places[recording]
        self.rows.act(
            of["row"][kept],
            of["step"][kept],
            actions,
            inputs,
            episodes=of["episode"][kept],
            offsets=of["length"][kept],
            generations=self._newest.generation,
            updates=self._newest.update,
        )
        of["acted"][places] = True
        return sent

    # -- rows that are handed in short ------------------------------------------------------------

    def use(self, version: Version) -> None:
        """Stamp steps with newer weights from now on, and hand in rows that are too old by now."""
        self._newest = version
        self.hand_in(self._is_old(self.of["row"]))

    def pause(self, places: list[int]) -> None:
        """Complete the rows of places that have been observed, and whose next step is not
        recorded."""
        for place in places:
            row, step = int(self.of["row"][place]), int(self.of["step"][place])
            if row >= 0:
                after = take(self.rows.columns["observations"], (row, step))
                self.rows.finish(row, step, after)
                self.of["row"][place] = -1

    def _is_old(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """[B] which of rows [B] began with weights that are too old by now."""
        begun = self.rows.columns["updates"][rows, 0]  # [B]
        old: NDArray[np.bool_] = begun + np.uint64(self._row_age) < self._newest.update
        return old

    def hand_in(self, which: NDArray[np.bool_]) -> None:
        """Complete rows as they are, where they have a complete step.

        Args:
            which: [S] of all places. A step under way begins another row there.
        """
        of = self.of
        for place in np.flatnonzero(which & (of["row"] >= 0) & (of["step"] > 0)).tolist():
            row, step = int(of["row"][place]), int(of["step"][place])
            new = -1
            if of["acted"][place]:
                states = self._policy.states_before(np.array([place]))
                new = self.rows.move_step(row, step, states)
            self.rows.finish(row, step, take(self.rows.columns["observations"], (row, step)))
            of["row"][place], of["step"][place] = new, 0
            self.counts["rows_cut"] += 1

    def drop_stale(self) -> int:
        """Free complete rows that are too old for a batch -> the steps in them."""
        rows, columns, dropped = self.rows, self.rows.columns, 0
        # A row that is full in time waits for at most as long again.
        oldest = self._newest.update - 2 * self._row_age
        for row in [row for row in rows.complete if int(columns["updates"][row, 0]) < oldest]:
            dropped += int(columns["lengths"][row])
            rows.complete.remove(row)
            rows.give_back(row)
        self.counts["steps_stale"] += dropped
        return dropped
