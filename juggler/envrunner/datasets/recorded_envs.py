"""Environments that replay the episodes of a data set."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.datasets.dataset import Dataset, DatasetError, RecordedEpisode
from juggler.runtime.wire.structures import from_tree, put, take, zeros
from juggler.runtime.wire.trees import Tree


class RecordedEnvs(VectorEnv[Any, Any, Any]):
    """N environments that replay a data set and ignore their actions.

    `actions` are the recorded actions for the observations of the last `reset` or `step`. Each
    pass over the episodes is in a random order. An environment that ends an episode takes the next.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, dataset: Dataset, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = dataset.observation_space
        self.single_action_space = dataset.action_space
        self.observation_space = batch_space(dataset.observation_space, num_envs)
        self.action_space = batch_space(dataset.action_space, num_envs)
        self.dataset = dataset
        # A tree of arrays [N, ...], as recorded; new at each step.
        self.actions: Tree = zeros(dataset.action_space, (num_envs,))
        self._order: list[int] = []
        self._playing: list[RecordedEpisode] = []
        self._at = np.zeros(num_envs, np.int64)  # [N] steps played of each episode
        self._generator = np.random.default_rng(0)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the next episodes where options["reset_mask"] [N] is true, or everywhere.

        Raises:
            EnvironmentFailed: an episode is damaged.
        """
        if isinstance(seed, int):
            self._generator, self._order = np.random.default_rng(seed), []
        if options and "reset_mask" in options:
            for row in np.flatnonzero(options["reset_mask"]).tolist():
                self._playing[row] = self._next()
                self._at[row] = 0
        else:
            self._playing = [self._next() for _ in range(self.num_envs)]
            self._at[:] = 0
        return self._seen(), {}

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Replay the next step of each episode; `actions` are ignored."""
        rewards = np.array(
            [each.rewards[at] for each, at in zip(self._playing, self._at, strict=True)]
        )  # [N]
        self._at += 1
        over = np.array([len(each) for each in self._playing]) == self._at  # [N]
        terminated = over & [each.terminated for each in self._playing]  # [N]
        return self._seen(), rewards, terminated, over & ~terminated, {}

    def close_extras(self, **_: Any) -> None:
        """Do nothing, with any of Gymnasium's options."""

    def _seen(self) -> Any:
        """Set `actions`, and return the observations in Gymnasium's form."""
        at = self._at.tolist()
        observations = zeros(self.single_observation_space, (self.num_envs,))  # [N, ...]
        actions = zeros(self.single_action_space, (self.num_envs,))  # [N, ...]
        for row, (episode, step) in enumerate(zip(self._playing, at, strict=True)):
            put(observations, row, take(episode.observations, step))
            if step < len(episode):  # else it has ended
                put(actions, row, take(episode.actions, step))
        self.actions = actions
        return from_tree(self.single_observation_space, observations)

    def _next(self) -> RecordedEpisode:
        if not self._order:
            self._order = self._generator.permutation(len(self.dataset)).tolist()
        try:
            # Connectors may mend observations, which are checked after them.
            return self.dataset.episode(self._order.pop(), finite=("actions", "rewards"))
        except DatasetError as error:
            # A restarted EnvRunner would read the same damage.
            where = f"data set {self.dataset.name!r}"
            raise EnvironmentFailed(where, "reading", str(error)) from error
