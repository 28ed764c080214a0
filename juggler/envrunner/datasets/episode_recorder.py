"""Gathers whole episodes while a policy plays them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from juggler.envrunner.environments.autoreset import autoreset_mode, last_observation
from juggler.runtime.datasets.dataset import RecordedEpisode
from juggler.runtime.wire.structures import to_tree, tree_map
from juggler.runtime.wire.trees import Tree, flatten

#: An episode that takes more bytes is cut: some environments never end one.
MOST_BYTES = 256 * 1024 * 1024
#: So is the longest one when all that are under way take more together.
MOST_TOGETHER = 4 * MOST_BYTES
#: What Python takes for each array of a step beside its numbers, and for what holds them.
BESIDE = 256


@dataclass(slots=True)
class _Running:
    """The steps of an episode so far.

    Attributes:
        step_bytes: what a step takes.
    """

    step_bytes: int
    observations: list[Tree] = field(default_factory=list)
    actions: list[Tree] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.step_bytes * len(self.rewards)


class EpisodesUnderWay:
    """The episodes that are played now, each at a place of its own.

    Args:
        take: gets each episode when it ends.
        most_bytes: an episode with more is cut before its last step, as if it were truncated; that
            step begins another one.
        most_together: so is the longest episode when all of them have more. Those with a single
            step stay.
    """

    def __init__(
        self,
        take: Callable[[RecordedEpisode], None],
        most_bytes: int = MOST_BYTES,
        most_together: int = MOST_TOGETHER,
    ) -> None:
        self._take, self._most_bytes, self._most_together = take, most_bytes, most_together
        self._running: dict[int, _Running] = {}
        self._bytes = 0  # of all of them

    def step(self, place: int, observation: Tree, action: Tree, reward: float) -> None:
        """Add a step. Nothing else may write to its arrays.

        Args:
            place: of the episode.
            observation: [...] that the step was taken from.
            action: [...]
            reward: of the step.
        """
        self._add(place, observation, action, reward)
        if self._running[place].nbytes > self._most_bytes:
            self._cut(place)
        if self._bytes > self._most_together:
            self._cut(max(self._running, key=lambda each: self._running[each].nbytes))

    def end(self, place: int, observation: Tree | None, *, terminated: bool) -> None:
        """End the episode at a place, if it has steps.

        Args:
            place: of the episode.
            observation: [...] after its last step; None: nobody knows, and nobody learns from it
                where an episode terminated.
            terminated: the environment ended it; otherwise it was cut off.
        """
        running = self.drop(place)
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

    def drop(self, place: int) -> _Running | None:
        """Forget the episode at a place, if there is one."""
        running = self._running.pop(place, None)
        self._bytes -= running.nbytes if running else 0
        return running

    def _add(self, place: int, observation: Tree, action: Tree, reward: float) -> None:
        running = self._running.get(place)
        if running is None:
            each = _bytes_of(observation) + _bytes_of(action)
            running = self._running[place] = _Running(each)
        running.observations.append(observation)
        running.actions.append(action)
        running.rewards.append(reward)
        self._bytes += running.step_bytes

    def _cut(self, place: int) -> None:
        """Begin another episode with the last step of this one, unless it is the only one."""
        running = self._running[place]
        if len(running.rewards) < 2:
            return
        last = running.observations.pop(), running.actions.pop(), running.rewards.pop()
        self._bytes -= running.step_bytes
        self.end(place, last[0], terminated=False)
        self._add(place, *last)


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
                ended = bool(terminated[row])
                last = self._last(observations, infos, row, terminated=ended)
                self._under_way.end(row, last, terminated=ended)

    def drop(self, rows: NDArray[np.intp]) -> None:
        """Forget the episodes that are running in some environments."""
        for row in rows.tolist():
            self._under_way.drop(row)

    def _last(
        self, observations: Any, infos: dict[str, Any], row: int, *, terminated: bool
    ) -> Tree | None:
        """The last observation [...] of an episode; None: it has terminated, and the vector does
        not give one that fits."""
        if self._same_step:
            last = last_observation(self._observed, infos, row, terminated=terminated)
            return None if last is None else tree_map(np.array, last)
        return row_of(to_tree(self._observed, observations), row)


def row_of(batch: Tree, row: int) -> Tree:
    """A copy of one row [...] of a batch [N, ...]."""
    copied: Tree = tree_map(lambda leaf: np.array(leaf[row]), batch)
    return copied


def _bytes_of(tree: Tree) -> int:
    return sum(leaf.nbytes + BESIDE for _, leaf in flatten(tree))


def _over_steps(*leaves: NDArray[Any]) -> NDArray[Any]:
    """Stack L arrays [...] to [L, ...]."""
    return np.stack(leaves)
