"""Gathers whole episodes while a policy plays them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from juggler.envrunner.environments.autoreset import autoreset_mode, final_observation
from juggler.runtime.datasets.dataset import RecordedEpisode
from juggler.runtime.wire.structures import to_tree, tree_map
from juggler.runtime.wire.trees import Tree, flatten

#: An episode that takes more bytes is cut: some environments never end one.
MOST_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class _Running:
    """The steps of an episode so far.

    Attributes:
        most: the most steps.
    """

    most: int
    observations: list[Tree] = field(default_factory=list)
    actions: list[Tree] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


class EpisodesUnderWay:
    """The episodes that are played now, each at a place of its own.

    Args:
        take: gets each episode when it ends.
        most_bytes: an episode with as many is cut there, as if it were truncated; its next step
            begins another one.
    """

    def __init__(
        self, take: Callable[[RecordedEpisode], None], most_bytes: int = MOST_BYTES
    ) -> None:
        self._take, self._most_bytes = take, most_bytes
        self._running: dict[int, _Running] = {}

    def step(self, place: int, observation: Tree, action: Tree, reward: float) -> None:
        """Add a step. Nothing else may write to its arrays.

        Args:
            place: of the episode.
            observation: [...] that the step was taken from.
            action: [...]
            reward: of the step.
        """
        running = self._running.get(place)
        if running is not None and len(running.rewards) == running.most:
            self.end(place, observation, terminated=False)
            running = None
        if running is None:
            each = _bytes_of(observation) + _bytes_of(action)
            running = self._running[place] = _Running(max(1, self._most_bytes // max(1, each)))
        running.observations.append(observation)
        running.actions.append(action)
        running.rewards.append(reward)

    def end(self, place: int, observation: Tree | None, *, terminated: bool) -> None:
        """End the episode at a place, if it has steps.

        Args:
            place: of the episode.
            observation: [...] after its last step; None: nobody knows, and nobody learns from it
                where an episode terminated.
            terminated: the environment ended it; otherwise it was cut off.
        """
        running = self._running.pop(place, None)
        if running is None:
            return
        last = running.observations[-1] if observation is None else observation
        episode = RecordedEpisode(
            tree_map(_over_steps, *running.observations, last),
            tree_map(_over_steps, *running.actions),
            np.array(running.rewards, np.float32),
            terminated,
        )
        self._take(episode)

    def drop(self, place: int) -> None:
        """Forget the episode at a place, if there is one."""
        self._running.pop(place, None)


class EpisodeRecorder:
    """Hears of every step of a vector of environments.

    Args:
        env: N environments, with any autoreset mode.
        take: gets each episode when it ends.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Any], take: Callable[[RecordedEpisode], None]
    ) -> None:
        self._same_step = autoreset_mode(env) is AutoresetMode.SAME_STEP
        self._observed, self._acted = env.single_observation_space, env.single_action_space
        self._under_way = EpisodesUnderWay(take)
        self._before: Tree = {}

    def sees(self, observations: Any) -> None:
        """Hear of the observations [N, ...] that the next step is taken from."""
        # Environments may write the next ones into the same memory.
        self._before = tree_map(np.copy, to_tree(self._observed, observations))

    def step(
        self,
        actions: Any,
        rewards: NDArray[Any],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        observations: Any,
        infos: dict[str, Any],
        recorded: NDArray[np.bool_],
    ) -> None:
        """Hear of a step.

        Args:
            actions: what the environments got, [N, ...].
            rewards: [N], as the environments gave them; so are the next four.
            terminated: [N]
            truncated: [N]
            observations: [N, ...]
            infos: of the step.
            recorded: [N] whose steps belong to episodes that are recorded.
        """
        acted = to_tree(self._acted, actions)
        for row in np.flatnonzero(recorded).tolist():
            reward = float(rewards[row])
            self._under_way.step(row, row_of(self._before, row), row_of(acted, row), reward)
            if terminated[row] or truncated[row]:
                last = self._last(observations, infos, row)
                self._under_way.end(row, last, terminated=bool(terminated[row]))

    def drop(self, rows: NDArray[np.intp]) -> None:
        """Forget the episodes that are running in some environments."""
        for row in rows.tolist():
            self._under_way.drop(row)

    def _last(self, observations: Any, infos: dict[str, Any], row: int) -> Tree:
        """The last observation [...] of an episode."""
        if self._same_step:
            last: Tree = tree_map(np.array, final_observation(self._observed, infos, row))
            return last
        return row_of(to_tree(self._observed, observations), row)


def row_of(batch: Tree, row: int) -> Tree:
    """A copy of one row [...] of a batch [N, ...]."""
    copied: Tree = tree_map(lambda leaf: np.array(leaf[row]), batch)
    return copied


def _bytes_of(tree: Tree) -> int:
    return sum(leaf.nbytes for _, leaf in flatten(tree))


def _over_steps(*leaves: NDArray[Any]) -> NDArray[Any]:
    """Stack L arrays [...] to [L, ...]."""
    return np.stack(leaves)
