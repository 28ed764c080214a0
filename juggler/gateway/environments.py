"""The environments of simulators, and the rows that they fill."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.envrunner.paced.slots import PacedSlots
from juggler.gateway.evaluation import EVALUATED, LEFT, TRAINING, GreedyEpisodes
from juggler.gateway.shared_episodes import keep_newest
from juggler.gateway.step_batches import Steps
from juggler.runtime.acting.actor import Actor
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.structures import take
from juggler.runtime.wire.trees import Tree

#: A row whose simulator takes longer for a step is handed in short, so that no batch waits for it.
STALL_SECONDS = 1.0


class Environments(PacedSlots):
    """The environments of simulators, one agent in each place.

    Args:
        observation_space: of the observations in batches.
        policy: acts in them.
        steps: T, of a row.
        row_age: as in `PacedSlots`. A single step that takes this long is not trained on.

    Attributes:
        evaluation: plays some of their episodes; None: there is none now.
    """

    def __init__(
        self, observation_space: Space[Any], policy: Actor, steps: int, row_age: int
    ) -> None:
        # With several modules, a round leaves rows for the next round, even in synchronous runs.
        super().__init__(observation_space, policy, steps, max(1, row_age))
        policy.require_log_probabilities()
        self.of["playing"] = np.zeros(len(self.of["row"]), np.int8)  # as in `evaluation`
        self._evaluated = False  # episodes of an evaluation may be running
        self.evaluation: GreedyEpisodes | None = None
        self._parked = 0  # rows that stand still at their first step
        # Places with a row whose agent waits for its next episode, and since when.
        self._resting: dict[int, float] = {}

    # -- environments ---------------------------------------------------------------------------

    @property
    def rows_begun(self) -> int:
        """Rows that will be complete before long."""
        return self.rows.begun - self._parked

    def unseat(self, places: list[int]) -> None:
        """Remove environments. Their running episodes end as truncated at the last step.

        These episodes count as cut, because their return is unknown.
        """
        for place in places:
            self.cut(place)
            self.counts["episodes_cut"] += int(self.of["length"][place] > 0)
            self._forget_episodes(np.array([place]))
            self.of["acted"][place] = False
            if self.evaluation is not None and self.of["playing"][place] == EVALUATED:
                self.evaluation.lost()
            self.of["playing"][place] = TRAINING
            self._places.give_back(place)

    def ended_with(self, total: float, length: int) -> None:
        """Count an episode that has filled no place."""
        self.ended.append((total, length))
        self.counts["episodes_untold"] += keep_newest(self.ended)

    def _end_episodes(self, places: NDArray[np.intp]) -> None:
        if self._evaluated:
            playing = self.of["playing"][places]  # [B]
            if self.evaluation is not None:
                mine = places[playing == EVALUATED]
                self.evaluation.ended(self.of["return"][mine], self.of["length"][mine])
            self._forget_episodes(places[playing != TRAINING])
            self.of["playing"][places] = TRAINING
            places = places[playing == TRAINING]
        super()._end_episodes(places)
        self.counts["episodes_untold"] += keep_newest(self.ended)

    def pause(self, places: NDArray[np.intp]) -> None:
        """Complete rows, as `PacedSlots.pause` does."""
        for place in places.tolist():
            self._resting.pop(place, None)
        super().pause(places)

    def cut(self, place: int) -> None:
        """Complete its row, and truncate the episode at its end."""
        self._resting.pop(place, None)
        row, step = int(self.of["row"][place]), int(self.of["step"][place])
        columns = self.rows.columns
        if row >= 0 and step:
            after = take(columns["observations"], (row, step))
            # Otherwise the next episode has begun there, without a complete step.
            if not any(columns[name][row, step - 1] for name in ("terminated", "truncated")):
                columns["truncated"][row, step - 1] = True
                self.rows.ended_with(row, step - 1, after)
            self.rows.finish(np.array([row]), np.array([step]))
        elif row >= 0:
            self.rows.give_back(row)
        self.of["row"][place] = -1

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
        if self._resting:
            self._wake(slots, observations)
        acted = self.of["acted"][slots]  # [B]
        if not acted.any():
            return
        each = [reward for steps in arrivals for reward in steps.rewards]
        rewards = np.array(each, np.float32)  # [B]
        if not acted.all():
            slots, rewards = slots[acted], rewards[acted]
            observations = take(observations, acted)
        self.take_rewards(slots, rewards)
        if self.evaluation is not None:
            mine = self.of["playing"][slots] == EVALUATED  # [B]
            if mine.any():
                self.evaluation.rewarded(slots[mine], rewards[mine])
        for steps in arrivals:
            if over := [*steps.terminated, *steps.truncated]:
                truncated = np.arange(len(over)) >= len(steps.terminated)
                self.end(steps.slots[over], truncated, steps.final_observations)
                self.counts["episodes"] += len(over)
        self.observe(slots, observations)

    def rest(self, places: NDArray[np.intp]) -> None:
        """Keep the rows of agents for their next episodes."""
        held = places[self.of["row"][places] >= 0]
        self._resting.update(dict.fromkeys(held.tolist(), time.monotonic()))

    def _wake(self, slots: NDArray[np.intp], observations: Tree) -> None:
        """Begin the next episodes of resting agents, with observations [B, ...]."""
        back = [at for at, place in enumerate(slots.tolist()) if place in self._resting]
        for at in back:
            del self._resting[int(slots[at])]
        if back:
            self.observe(slots[back], take(observations, back))

    def seat(self, count: int) -> list[int]:
        places = super().seat(count)
        if self.evaluation is not None:
            self.evaluation.grow(len(self.of["row"]))
        return places

    def evaluate(self, evaluation: GreedyEpisodes) -> None:
        """Let episodes that begin from now on be played without exploration."""
        evaluation.grow(len(self.of["row"]))
        self.evaluation, self._evaluated = evaluation, True

    def take_evaluation(self, *, at_once: bool) -> GreedyEpisodes | None:
        """The evaluation, if it is over or is to end."""
        evaluation = self.evaluation
        if evaluation is None or not (at_once or evaluation.is_over):
            return None
        playing = self.of["playing"]
        playing[playing == EVALUATED] = LEFT
        self.evaluation = None
        return evaluation

    def evaluated(self, places: NDArray[np.intp]) -> NDArray[np.bool_]:
        """[B] the places whose next actions are those of the evaluation."""
        assert self.evaluation is not None
        # In the others, training goes on.
        chosen = self.evaluation.choose(places, self.of, max(1, len(self) // 2))
        self.pause(places[chosen])  # what was recorded before ends with the episode
        return chosen

    def act(
        self,
        places: NDArray[np.intp],
        recording: NDArray[np.bool_] | bool,
        observations: Tree,
        kept: Tree | None = None,
    ) -> Any:
        """Let the policy act, as `PacedSlots.act` does, and note the time."""
        sent = super().act(places, recording, observations, kept)
        self.of["acted_at"][places] = time.monotonic()
        return sent

    # -- rows that are handed in short ------------------------------------------------------------

    def hand_in_old(self, version: Version) -> None:
        """Hand in rows that began with weights too far behind the newest."""
        self.newest[:] = version
        old = self._is_old(self.of["row"])
        self.hand_in(old & self.of["acted"])
        resting = np.array([place for place in self._resting if old[place]], np.intp)  # [B]
        self.pause(resting)

    def hand_in_stalled(self) -> None:
        """Hand in rows of slow simulators. Called now and then."""
        of, since = self.of, time.monotonic() - STALL_SECONDS
        late = [place for place, at in self._resting.items() if at < since]
        self.pause(np.array(late, np.intp))
        stalled = of["acted_at"] < since
        self.hand_in(stalled & of["acted"])
        standing = of["acted"] & stalled & (of["row"] >= 0) & (of["step"] == 0)
        self._parked = int(np.count_nonzero(standing))
