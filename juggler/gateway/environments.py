"""The environments of simulators, and the rows that they fill."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.gateway.gathered_policy import GatheredPolicy
from juggler.gateway.places import Places, grown, put, take
from juggler.gateway.rows import Rows
from juggler.gateway.step_batches import Steps
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree

#: A row whose simulator takes longer for a step is handed in short, so that no batch waits for it.
STALL_SECONDS = 1.0
#: A row that began so many updates ago is handed in short, before its batch becomes stale. A single
#: step that took as long is not learned from.
_MOST_UPDATES = 3

_FIRST_PLACES = 64


class Environments:
    """Each has a place, and a row to fill while its steps are recorded.

    Args:
        observation_space: of the observations in batches.
        policy: acts in them.
        steps: T, of a row.

    Attributes:
        rows: filling and complete.
        ended: return and length of the episodes that ended since the last batch.
        counts: of events so far, by name.
    """

    def __init__(self, observation_space: Space[Any], policy: GatheredPolicy, steps: int) -> None:
        self.rows = Rows(observation_space, steps, policy.blank_inputs)
        self.ended: list[tuple[float, int]] = []
        self.counts: Counter[str] = Counter()
        self._policy = policy
        self._steps = steps
        self._places = Places(_FIRST_PLACES)
        policy.grow(_FIRST_PLACES)
        self._next_episode = 0
        self._parked = 0  # rows that stand still at their first step
        self._newest = Version(0, 0)  # weights
        # Of each place: its row or -1, its step in it, and where its episode is.
        self.of: dict[str, NDArray[Any]] = {
            "row": np.full(_FIRST_PLACES, -1, np.intp),
            "step": np.zeros(_FIRST_PLACES, np.intp),
            "acted": np.zeros(_FIRST_PLACES, np.bool_),  # the result of an action is due
            "acted_at": np.zeros(_FIRST_PLACES),  # seconds
            "first": np.ones(_FIRST_PLACES, np.bool_),
            "episode": np.zeros(_FIRST_PLACES, np.uint64),
            "length": np.zeros(_FIRST_PLACES, np.int64),
            "return": np.zeros(_FIRST_PLACES, np.float64),
        }

    # -- who is there ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._places.used

    @property
    def rows_begun(self) -> int:
        """Rows that will be complete before long."""
        return self.rows.begun - self._parked

    def seat(self, count: int) -> list[int]:
        """Places for new environments."""
        if self._places.grow(count):
            self.of = grown(self.of, self._places.capacity)
            self._policy.grow(self._places.capacity)
        places = [self._places.take() for _ in range(count)]
        self.of["row"][places], self.of["acted"][places] = -1, False
        self.of["first"][places], self.of["length"][places] = True, 0
        self.of["return"][places] = 0
        return places

    def unseat(self, places: list[int]) -> None:
        """Remove environments. Episodes that are running end as truncated at their last steps."""
        for place in places:
            self.cut(place)
            if self.of["length"][place]:
                self.counts["episodes_cut"] += 1
                self._end(place)
            self.of["acted"][place] = False
            self._places.give_back(place)

    def cut(self, place: int) -> None:
        """Complete its row, and truncate the episode at its end."""
        row, step = int(self.of["row"][place]), int(self.of["step"][place])
        columns = self.rows.columns
        if row >= 0 and step:
            after = take(columns["observations"], (row, step))
            # Else the next episode has begun there, without a complete step.
            if not any(columns[name][row, step - 1] for name in ("terminated", "truncated")):
                columns["truncated"][row, step - 1] = True
                self.rows.ended_with(row, step - 1, after)
            self.rows.finish(row, step, after)
        elif row >= 0:
            self.rows.give_back(row)
        self.of["row"][place] = -1

    def new_episode(self) -> int:
        """The id of a new episode."""
        self._next_episode += 1
        return self._next_episode - 1

    # -- what becomes of actions -----------------------------------------------------------------

    def take_results(
        self, arrivals: list[Steps], slots: NDArray[np.intp], observations: Tree
    ) -> None:
        """Take the results of the last actions.

        Args:
            arrivals: of different environments.
            slots: [B] the places of their rows, in order.
            observations: [B, ...] after those actions, as batches hold them.
        """
        of, columns = self.of, self.rows.columns
        acted = of["acted"][slots]  # [B]
        if not acted.any():
            return
        each = [reward for steps in arrivals for reward in steps.rewards]
        rewards = np.array(each, np.float32)  # [B]
        if not acted.all():
            slots, rewards = slots[acted], rewards[acted]
            observations = take(observations, acted)
        self.counts["steps"] += len(slots)
        self._policy.rewarded(slots, rewards)
        of["length"][slots] += 1
        of["return"][slots] += rewards
        of["acted"][slots] = False
        self.counts["steps_unrecorded"] += int(np.count_nonzero(of["row"][slots] < 0))
        self._let_go_of_old(slots)
        recorded = of["row"][slots] >= 0  # [B]
        held = slots[recorded]
        columns["rewards"][of["row"][held], of["step"][held]] = rewards[recorded]
        self._take_ends(arrivals)
        of["step"][held] += 1
        full = of["step"][held] == self._steps  # [B]
        going, after = held[~full], take(observations, np.flatnonzero(recorded)[~full])
        put(columns["observations"], (of["row"][going], of["step"][going]), after)
        places = np.flatnonzero(recorded)[full]
        for at, place in zip(places.tolist(), held[full].tolist(), strict=True):
            self.rows.finish(int(of["row"][place]), self._steps, take(observations, at))
            of["row"][place] = -1

    def _let_go_of_old(self, slots: NDArray[np.intp]) -> None:
        """Free rows whose first step took so long that it is stale."""
        rows = self.of["row"][slots]  # [B]
        old = (rows >= 0) & (self.of["step"][slots] == 0) & self._is_old(rows)
        for place in slots[old].tolist():
            self.rows.give_back(int(self.of["row"][place]))
            self.of["row"][place] = -1
            self.counts["steps_stale"] += 1

    def _take_ends(self, arrivals: list[Steps]) -> None:
        """Take the ends of episodes from steps that have just come."""
        for steps in arrivals:
            if not (steps.terminated or steps.truncated):
                continue
            for name, ended in (("terminated", steps.terminated), ("truncated", steps.truncated)):
                for at in ended:
                    place = int(steps.slots[at])
                    row, step = int(self.of["row"][place]), int(self.of["step"][place])
                    if row >= 0:
                        self.rows.columns[name][row, step] = True
                        if name == "truncated":
                            final = take(steps.final_observations, steps.truncated.index(at))
                            self.rows.ended_with(row, step, final)
                    self._end(place)
            self.counts["episodes"] += len(steps.terminated) + len(steps.truncated)

    def _end(self, place: int) -> None:
        """End an episode: the environment's next observation is the first of another."""
        self.ended.append((float(self.of["return"][place]), int(self.of["length"][place])))
        self.of["return"][place], self.of["length"][place] = 0, 0
        self.of["first"][place] = True

    def pause(self, places: list[int]) -> None:
        """Complete the rows of environments in which no episode goes on."""
        for place in places:
            row, step = int(self.of["row"][place]), int(self.of["step"][place])
            if row >= 0:
                after = take(self.rows.columns["observations"], (row, step))
                self.rows.finish(row, step, after)
                self.of["row"][place] = -1

    # -- what is done there ----------------------------------------------------------------------

    def act(
        self,
        places: NDArray[np.intp],
        recording: NDArray[np.bool_],
        observations: Tree,
    ) -> Any:
        """Let the policy act -> the actions that simulators get.

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
        of["acted"][places], of["acted_at"][places] = True, time.monotonic()
        return sent

    # -- rows that are handed in short ------------------------------------------------------------

    def hand_in_old(self, version: Version) -> None:
        """Hand in rows that began with weights too far behind the newest."""
        self._newest = version
        self._hand_in(self._is_old(self.of["row"]))

    def hand_in_stalled(self) -> None:
        """Hand in rows of simulators that take long for a step. To be called now and then."""
        of = self.of
        stalled = of["acted_at"] < time.monotonic() - STALL_SECONDS
        self._hand_in(stalled)
        standing = of["acted"] & stalled & (of["row"] >= 0) & (of["step"] == 0)
        self._parked = int(np.count_nonzero(standing))

    def _is_old(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """[B] which of rows [B] began with weights that are too old by now."""
        begun = self.rows.columns["updates"][rows, 0]  # [B]
        old: NDArray[np.bool_] = begun + np.uint64(_MOST_UPDATES) < self._newest.update
        return old

    def _hand_in(self, which: NDArray[np.bool_]) -> None:
        """Complete rows as they are; the step under way begins another row."""
        of = self.of
        for place in np.flatnonzero(which & of["acted"] & (of["row"] >= 0) & (of["step"] > 0)):
            row, step = int(of["row"][place]), int(of["step"][place])
            states = self._policy.states_before(np.array([place]))
            new = self.rows.move_step(row, step, states)
            self.rows.finish(row, step, take(self.rows.columns["observations"], (row, step)))
            of["row"][place], of["step"][place] = new, 0
            self.counts["rows_cut"] += 1
