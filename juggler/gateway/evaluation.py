"""Evaluates a checkpoint in whole episodes of simulators, without exploration."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.evaluation import Goal
from juggler.runtime.acting.actor import Actor
from juggler.runtime.wire.trees import Tree

#: Purpose of the episode at a place. An evaluation leaves episodes that take too long, or that are
#: running when it ends: they are not counted.
TRAINING, EVALUATED, LEFT = 0, 1, 2


class GreedyEpisodes:
    """The evaluation of a checkpoint in the environments of simulators.

    It takes the first episodes to begin, because the first episodes to end would be the short ones.
    They are neither trained on nor counted in training.

    Args:
        actor: the policy and connectors of the checkpoint.
        episodes: number of episodes.
        most_steps: maximum steps of an episode, which then counts with its return so far; 0: no
            limit.
        goal: the evaluation ends once it is out of reach; None: no goal.

    Attributes:
        returns: undiscounted returns of the episodes so far.
        lengths: their numbers of steps.
        given_up: the driver has cancelled the evaluation.
    """

    def __init__(self, actor: Actor, episodes: int, most_steps: int, goal: Goal | None) -> None:
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self._actor, self._episodes = actor, episodes
        self._most_steps, self._goal = most_steps, goal
        self._running = 0
        self.given_up = False

    @property
    def is_over(self) -> bool:
        """Whether it is complete, cancelled, or cannot reach its goal."""
        returns, goal = self.returns, self._goal
        in_vain = goal is not None and returns and goal.out_of_reach(returns, self._episodes)
        return self.given_up or bool(in_vain) or len(returns) >= self._episodes

    def choose(
        self, places: NDArray[np.intp], of: dict[str, NDArray[Any]], most: int
    ) -> NDArray[np.bool_]:
        """Choose episodes to evaluate; return which places [B] it plays.

        Args:
            places: places where an action is due.
            of: columns of `PacedSlots`, by name.
            most: maximum number of running episodes.
        """
        playing = of["playing"]
        if self._most_steps:
            long = places[
                (playing[places] == EVALUATED) & (of["length"][places] >= self._most_steps)
            ]
            self.ended(of["return"][long], of["length"][long])
            playing[long] = LEFT
        more = min(self._episodes - len(self.returns), most) - self._running
        if more > 0 and not self.is_over:
            begin = places[of["first"][places]][:more]
            playing[begin] = EVALUATED
            self._running += len(begin)
        chosen: NDArray[np.bool_] = playing[places] == EVALUATED
        return chosen

    def act(self, places: NDArray[np.intp], first: NDArray[np.bool_], shown: Tree) -> Any:
        """Choose the best actions for observations [B, ...] of simulators."""
        connectors = self._actor.connectors
        assert connectors is not None
        return self._actor.act(connectors(shown), places, first, explore=False).sent

    def grow(self, places: int) -> None:
        """Allocate more places."""
        self._actor.grow(places)

    def rewarded(self, places: NDArray[np.intp], rewards: NDArray[np.floating[Any]]) -> None:
        """Add the rewards [B] of its last actions at places [B]."""
        self._actor.rewarded(rewards, places)

    def lost(self) -> None:
        """Note that an episode was lost with its simulator."""
        self._running -= 1

    def ended(self, returns: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:
        """Add the returns and lengths of ended episodes."""
        self.returns += returns.tolist()
        self.lengths += lengths.tolist()
        self._running -= len(returns)
