"""Whole episodes of simulators that a checkpoint plays without exploration."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.evaluation import Goal
from juggler.runtime.acting.actor import Actor
from juggler.runtime.wire.trees import Tree

#: What the episode of a place is for. An evaluation leaves one in the middle if it takes too long,
#: or if the evaluation has ended: it counts nowhere.
TRAINING, EVALUATED, LEFT = 0, 1, 2


class GreedyEpisodes:
    """The evaluation of a checkpoint in the environments of simulators.

    It takes the episodes that begin first, since the first to end would be the short ones. They are
    neither learned from nor counted in training.

    Args:
        actor: plays, with connectors, as the checkpoint has them.
        episodes: how many.
        most_steps: of an episode, which then counts as it is; 0: no limit.
        goal: the evaluation ends once it is out of reach; None: there is none.

    Attributes:
        returns: undiscounted returns of the episodes so far.
        lengths: their numbers of steps.
        given_up: the driver wants no more of them.
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
        """Whether all episodes have ended, or more are in vain."""
        returns, goal = self.returns, self._goal
        in_vain = goal is not None and returns and goal.out_of_reach(returns, self._episodes)
        return self.given_up or bool(in_vain) or len(returns) >= self._episodes

    def choose(
        self, places: NDArray[np.intp], of: dict[str, NDArray[Any]], most: int
    ) -> NDArray[np.bool_]:
        """Choose episodes to play at places [B] -> [B] where it plays.

        Args:
            places: where an action is due.
            of: what is known of each place.
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
        """Choose the best actions for observations [B, ...], as simulators show them."""
        connectors = self._actor.connectors
        assert connectors is not None
        return self._actor.act(connectors(shown), places, first, explore=False).sent

    def grow(self, places: int) -> None:
        """Make room for more places."""
        self._actor.grow(places)

    def rewarded(self, places: NDArray[np.intp], rewards: NDArray[np.floating[Any]]) -> None:
        """Take the rewards [B] of its last actions at places [B]."""
        self._actor.rewarded(rewards, places)

    def lost(self) -> None:
        """An episode is gone with its simulator: play another instead."""
        self._running -= 1

    def ended(self, returns: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:
        """Some of its episodes have ended."""
        self.returns += returns.tolist()
        self.lengths += lengths.tolist()
        self._running -= len(returns)
