"""Gathers whole episodes while a policy plays them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from numpy.typing import NDArray

from juggler.envrunner.environments.autoreset import autoreset_mode, last_observation
from juggler.runtime.datasets.dataset import RecordedEpisode
from juggler.runtime.wire.structures import to_tree, tree_map
from juggler.runtime.wire.trees import Tree, flatten

#: When all running episodes need more, the longest is cut: some environments never end one.
MOST_BYTES = 512 * 1024 * 1024
#: Bytes that Python needs per array of a step, in addition to its numbers.
OVERHEAD_BYTES = 256


@dataclass(slots=True)
class _Running:
    """The steps of an episode so far.

    Attributes:
        step_bytes: size of one step.
    """

    step_bytes: int
    observations: list[Tree] = field(default_factory=list)
    actions: list[Tree] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.step_bytes * len(self.rewards)


class EpisodesUnderWay:
    """Collects the running episodes, one per place.

    Args:
        take: called with each episode when it ends.
        most_bytes: when all episodes together have more, the longest is cut before its last step,
            as if it were truncated; that step begins a new episode. A single step is not cut.
    """

    def __init__(
        self, take: Callable[[RecordedEpisode], None], most_bytes: int = MOST_BYTES
    ) -> None:
        self._take, self._most_bytes = take, most_bytes
        self._running: dict[int, _Running] = {}
        self._bytes = 0  # of all running episodes

    def step(self, place: int, observation: Tree, action: Tree, reward: float) -> None:
        """Add a step. Nothing else may write to its arrays.

        Args:
            place: of the episode.
            observation: [...] that the step was taken from.
            action: [...]
            reward: of the step.
        """
        self._add(place, observation, action, reward)
        if self._bytes > self._most_bytes:
            self._cut(max(self._running, key=lambda each: self._running[each].nbytes))

    def end(self, place: int, observation: Tree | None, *, terminated: bool) -> None:
        """End the episode at a place, if it has steps.

        Args:
            place: of the episode.
            observation: [...] after its last step; None: unknown, which only a terminated
                episode allows.
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
        """Drop the episode at a place, if any."""
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
        """Move an episode's last step to a new one.

        Does nothing if it is the only step.
        """
        running = self._running[place]
        if len(running.rewards) < 2:
            return
        last = running.observations.pop(), running.actions.pop(), running.rewards.pop()
        self._bytes -= running.step_bytes
        self.end(place, last[0], terminated=False)
        self._add(place, *last)


class EpisodeRecorder(VectorWrapper):
    """A vector of environments that records whole episodes while they are played.

    Args:
        env: N environments, with any autoreset mode.
        take: called with each episode when it ends.
        shares: [N] number of episodes to record per environment; None: all.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        take: Callable[[RecordedEpisode], None],
        shares: NDArray[np.intp] | None = None,
    ) -> None:
        super().__init__(env)
        self._mode = autoreset_mode(env)
        self._observed, self._acted = env.single_observation_space, env.single_action_space
        self._under_way = EpisodesUnderWay(take)
        self._left = np.full(self.num_envs, np.inf) if shares is None else shares.copy()  # [N]
        self._resets = np.zeros(self.num_envs, np.bool_)  # [N] the next step only resets
        self._before: Tree = {}

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        everywhere = np.ones(self.num_envs, np.bool_)  # [N]
        for row in np.flatnonzero((options or {}).get("reset_mask", everywhere)).tolist():
            self._under_way.drop(row)
        observations, infos = self.env.reset(seed=seed, options=options)
        self._resets[:] = False
        self._see(observations)
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        result = self.env.step(actions)
        observations, rewards, terminated, truncated, infos = result
        acted = to_tree(self._acted, actions)
        recorded = ~self._resets & (self._left > 0)  # [N]
        for row in np.flatnonzero(recorded).tolist():
            reward = float(rewards[row])
            self._under_way.step(row, row_of(self._before, row), row_of(acted, row), reward)
            if terminated[row] or truncated[row]:
                ended = bool(terminated[row])
                last = self._last(observations, infos, row, terminated=ended)
                self._left[row] -= 1
                self._under_way.end(row, last, terminated=ended)
        if self._mode is AutoresetMode.NEXT_STEP:
            self._resets = (terminated | truncated) & ~self._resets  # [N]
        self._see(observations)
        return result

    def _see(self, observations: Any) -> None:
        """Keep the observations [N, ...] that the next step is taken from."""
        # Environments may write the next ones into the same memory.
        self._before = tree_map(np.copy, to_tree(self._observed, observations))

    def _last(
        self, observations: Any, infos: dict[str, Any], row: int, *, terminated: bool
    ) -> Tree | None:
        """Return an episode's last observation [...]; None if it terminated without one."""
        if self._mode is AutoresetMode.SAME_STEP:
            last = last_observation(self._observed, infos, row, terminated=terminated)
            return None if last is None else tree_map(np.array, last)
        return row_of(to_tree(self._observed, observations), row)


def row_of(batch: Tree, row: int) -> Tree:
    """Copy one row [...] of a batch [N, ...]."""
    copied: Tree = tree_map(lambda leaf: np.array(leaf[row]), batch)
    return copied


def _bytes_of(tree: Tree) -> int:
    return sum(leaf.nbytes + OVERHEAD_BYTES for _, leaf in flatten(tree))


def _over_steps(*leaves: NDArray[Any]) -> NDArray[Any]:
    """Stack L arrays [...] to [L, ...]."""
    return np.stack(leaves)
