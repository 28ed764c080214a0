"""Gathers the whole episodes of simulators, whichever of their steps are learned from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from numpy.typing import NDArray

from juggler.envrunner.datasets.episode_recorder import EpisodesUnderWay, row_of
from juggler.gateway.recordings import Recording
from juggler.gateway.row_layout import Layout
from juggler.gateway.step_batches import Steps
from juggler.runtime.acting.actor import Actor
from juggler.runtime.datasets.dataset import RecordedEpisode
from juggler.runtime.wire.structures import to_tree
from juggler.runtime.wire.trees import Tree


class EpisodeLog:
    """Hears of every step of every environment, each of which has a place in the gateway.

    Args:
        layout: of what simulators observe.
        policy: turns chosen actions into those that environments get.
        action_space: of the latter.
        take: gets each episode when it ends.
    """

    def __init__(
        self,
        layout: Layout,
        policy: Actor,
        action_space: Any,
        take: Callable[[RecordedEpisode], None],
    ) -> None:
        self._layout, self._policy, self._action_space = layout, policy, action_space
        self._under_way = EpisodesUnderWay(take)
        self._shown: dict[int, Tree] = {}  # by place, what the next action is chosen for
        self._acted: dict[int, tuple[Tree, Tree]] = {}  # by place, a step without its reward

    def arrive(self, arrivals: list[Steps], shown: Tree) -> None:
        """Hear of the results of actions, and of what the next ones are chosen for.

        Args:
            arrivals: of different environments.
            shown: [B, ...] what simulators observe, of all rows in order.
        """
        begin = 0
        for steps in arrivals:
            count = len(steps.final_rows)
            finals: Tree = self._layout.tree([steps.final_raw], count) if count else {}  # [K, ...]
            paused, terminated = set(steps.paused), set(steps.terminated)
            ended, final_of = set(steps.ended), {row: k for k, row in enumerate(steps.final_rows)}
            for row, place in enumerate(steps.slots.tolist()):
                if place in self._acted:
                    self._under_way.step(place, *self._acted.pop(place), steps.rewards[row])
                if row in ended:
                    # Those of terminated episodes were not checked.
                    last = None if row in terminated else row_of(finals, final_of[row])
                    self._under_way.end(place, last, terminated=row in terminated)
                if row not in paused:
                    self._shown[place] = row_of(shown, begin + row)
            begin += steps.rows

    def act(self, places: NDArray[Any], actions: Tree) -> None:
        """Hear of the actions [B, ...] that environments at places [B] get."""
        for row, place in enumerate(places.tolist()):
            self._acted[place] = self._shown.pop(place), row_of(actions, row)

    def record(self, recording: Recording) -> None:
        """Hear of steps that somebody else took."""
        place, steps = recording.place, len(recording.rewards)
        sent = self._policy.for_environments(recording.actions)
        actions = to_tree(self._action_space, sent)  # [L, ...]
        if recording.starts:
            self._under_way.drop(place)
        for t, reward in enumerate(recording.rewards.tolist()):
            before = row_of(recording.observations, t)
            self._under_way.step(place, before, row_of(actions, t), reward)
        if recording.terminated or recording.truncated:
            last = row_of(recording.observations, steps)
            self._under_way.end(place, last, terminated=recording.terminated)

    def drop(self, places: Iterable[int]) -> None:
        """Forget the episodes of environments that are gone."""
        for place in places:
            self._under_way.drop(place)
            self._shown.pop(place, None)
            self._acted.pop(place, None)
