"""Environments whose observations are checked before a run begins: those in Discrete, MultiDiscrete
and MultiBinary spaces must be in them.

In a run, learners refuse batches with others. Numbers outside of a Box are common, and do no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import VectorEnv, VectorWrapper

from juggler.envrunner.environments.naming import VectorEnvironment
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs, Turn
from juggler.runtime.wire.structures import bounds_of_choices, space_leaves, to_tree
from juggler.runtime.wire.trees import Tree, flatten, path_name


class CheckedVector(VectorWrapper):
    """Environments with one agent.

    Args:
        env: N environments.
        name: of the environment, for errors.

    Raises:
        EnvironmentFailed: in `reset` and `step`, over an observation outside of its space.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], name: str) -> None:
        super().__init__(env)
        self._name = name

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        observations, infos = super().reset(**arguments)
        self._check(observations, "reset")
        return observations, infos

    def step(self, actions: Any) -> Any:
        observations, *results = super().step(actions)
        self._check(observations, "step")
        return (observations, *results)

    def _check(self, observations: Any, call: str) -> None:
        space = self.single_observation_space
        for row, what in _outside(space, to_tree(space, observations)):
            raise EnvironmentFailed(f"environment {row} ({self._name})", call, what)


class CheckedGames:
    """Environments with several agents; the same."""

    def __init__(self, envs: MultiAgentEnvs, name: str) -> None:
        self._envs = envs
        self._name = name
        self.num_envs, self.agents, self.groups = envs.num_envs, envs.agents, envs.groups
        self.critic_spaces = envs.critic_spaces

    def reset(self, seed: int) -> Turn:
        return self._checked(self._envs.reset(seed), "reset")

    def step(self, actions: Sequence[Any]) -> Turn:
        return self._checked(self._envs.step(actions), "step")

    def overdue(self, steps: int) -> str:
        return self._envs.overdue(steps)

    def close(self) -> None:
        self._envs.close()

    def _checked(self, turn: Turn, call: str) -> Turn:
        for group, said in zip(self.groups, turn.groups, strict=True):
            for row, what in _outside(group.observation_space, said.observations):
                environment, agent = divmod(int(said.acting[row]), len(self.agents))
                who = f"agent {self.agents[agent]!r} in environment {environment} ({self._name})"
                raise EnvironmentFailed(who, call, what)
        return turn


def checked(
    env: VectorEnvironment | MultiAgentEnvs, name: str
) -> VectorEnvironment | MultiAgentEnvs:
    """The same environments, whose observations are checked."""
    return CheckedVector(env, name) if isinstance(env, VectorEnv) else CheckedGames(env, name)


def _outside(space: Space[Any], observations: Tree) -> Iterator[tuple[int, str]]:
    """The rows of observations [B, ...] that are outside of their space, each with what is wrong,
    for people."""
    found = dict(flatten(observations))
    for path, leaf in space_leaves(space):
        first, last = bounds_of_choices(leaf)
        if first is None:
            continue
        array = found[path]  # [B, ...]
        beyond = (array < first) | (array > last)  # [B, ...]
        at = f" at {path_name(path)}" if path else ""
        for row in np.flatnonzero(beyond.reshape(len(array), -1).any(1)).tolist():
            number = array[row][beyond[row]].flat[0]
            yield row, f"its observation{at} holds {number}, which is not in its space {leaf}"
