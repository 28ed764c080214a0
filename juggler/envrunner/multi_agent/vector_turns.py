"""A game that steps N environments as arrays, as `MultiAgentEnvs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.environments.legal_actions import LegalActions
from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.failures import EnvironmentFailed, failures_of
from juggler.envrunner.multi_agent.slot_books import BrokenRule, SlotBooks, told_overdue
from juggler.envrunner.multi_agent.turns import AgentGroup, GroupTurn, Turn
from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv
from juggler.runtime.wire.structures import from_tree, space_leaves, to_tree, tree_map
from juggler.runtime.wire.trees import Tree, flatten, path_name, unflatten

Bools = NDArray[np.bool_]


class VectorTurns:
    """A `MultiAgentVectorEnv` as `MultiAgentEnvs`, without a loop over environments or agents.

    Args:
        env: the game.
        name: of the game, in errors.

    Raises:
        ValueError: the action mask in its observations does not fit the actions.
        UnsupportedSpace: there is no encoding for a space.
    """

    def __init__(self, env: MultiAgentVectorEnv, name: str) -> None:
        self._env = env
        self._name = name
        self._all_of_them = f"one of {env.num_envs} environments ({name})"
        self.num_envs = env.num_envs
        self.agents = tuple(env.agents)
        self._shape = (self.num_envs, len(self.agents))  # [N, A]
        self._slots = self.num_envs * len(self.agents)
        self.groups: tuple[AgentGroup, ...] = (
            AgentGroup(self.agents, env.observation_space, env.action_space),
        )
        LegalActions.of(env.observation_space, env.action_space, "")
        self._leaves = space_leaves(env.observation_space)
        self._books = SlotBooks(self.num_envs, self.agents)
        self._acting = np.zeros(0, np.intp)  # [B] slots

    def reset(self, seed: int) -> Turn:
        # Like other vectors, it takes one seed and derives the rest from it.
        observations, acting = self._begin(
            environment_seeds(seed, 1)[0], np.ones(self.num_envs, np.bool_)
        )
        self._acting = np.flatnonzero(acting)  # [B]
        booked = self._books.reset(self._acting)
        none = np.zeros(0, np.intp)
        group = GroupTurn(
            acting=self._acting,
            observations=_rows(observations, self._acting),
            first=booked.first,
            rewards=booked.rewards,
            ended=none,
            last_observations=_rows(observations, none),
            last_rewards=booked.last_rewards,
            terminated=booked.last,
        )
        everywhere = np.arange(self.num_envs)
        ended_with = booked.env_returns, booked.env_lengths, booked.agent_returns
        return Turn((group,), everywhere, none, *ended_with)

    def step(self, actions: Sequence[Any]) -> Turn:
        (batch,) = actions
        with failures_of(self._all_of_them, "step"):
            shown, rewards, terminated, truncated, acting = self._env.step(self._spread(batch))
        observations = self._checked(shown, "step")
        self._check_shapes(
            "step", rewards=rewards, terminated=terminated, truncated=truncated, acting=acting
        )
        # A copy, since environments that begin an episode may reuse the memory.
        rewards = np.array(rewards, np.float64).ravel()  # [N * A]
        ended = np.flatnonzero((terminated | truncated).ravel() & ~self._books.ended)  # [E]
        last_observations = _kept(observations, ended)
        ended_terminated = terminated.ravel()[ended]  # [E]
        over: Bools = ~np.any(acting, axis=1)  # [N]
        if over.any():
            observations, acting = self._begin(None, over)
        self._acting = np.flatnonzero(acting)  # [B]
        gone = np.flatnonzero(over)  # [L]
        try:
            booked = self._books.step(rewards, ended, gone, self._acting)
        except BrokenRule as error:
            raise self._failure(error.env, "step", error.reason) from None
        last = booked.last  # [E]
        group = GroupTurn(
            acting=self._acting,
            observations=_rows(observations, self._acting),
            first=booked.first,
            rewards=booked.rewards,
            ended=ended[last],
            last_observations=tree_map(lambda array: array[last], last_observations),
            last_rewards=booked.last_rewards[last],
            terminated=ended_terminated[last],
        )
        ended_with = booked.env_returns, booked.env_lengths, booked.agent_returns
        return Turn((group,), gone, gone, *ended_with)

    def overdue(self, steps: int) -> str:
        found = self._books.overdue(steps)
        remedy = "it has to truncate its episodes, perhaps with max_episode_steps in env_kwargs"
        return told_overdue(found, self._name, remedy)

    def close(self) -> None:
        self._env.close()

    def _begin(self, seed: int | None, which: Bools) -> tuple[Tree, Bools]:
        with failures_of(self._all_of_them, "reset"):
            shown, acting = self._env.reset(seed, which)
        observations = self._checked(shown, "reset")
        self._check_shapes("reset", acting=acting)
        idle = np.flatnonzero(~acting.any(1))
        if len(idle):
            raise self._failure(int(idle[0]), "reset", "no agent is acting after the reset")
        return observations, acting

    def _spread(self, batch: Any) -> Any:
        """Put the actions [B, ...] of the acting agents into actions of all agents [N, A, ...]."""
        space = self.groups[0].action_space

        def spread(acted: Any) -> NDArray[Any]:
            acted = np.asarray(acted)
            every: NDArray[Any] = acted
            if len(acted) < self._slots:
                every = np.zeros((self._slots, *acted.shape[1:]), acted.dtype)
                every[self._acting] = acted
            return every.reshape(self.num_envs, len(self.agents), *acted.shape[1:])

        return from_tree(space, tree_map(spread, to_tree(space, batch)))

    def _checked(self, observations: Any, call: str) -> Tree:
        """Check observations [N, A, ...]."""
        ((path, leaf), *others) = self._leaves
        if (
            not (path or others)
            and type(observations) is np.ndarray
            and observations.dtype == leaf.dtype
            and observations.shape == (*self._shape, *(leaf.shape or ()))
        ):
            plain: Tree = observations
            return plain
        try:
            given = dict(flatten(tree_map(np.asarray, observations)))
            arrays = [(path, given[path]) for path, _ in self._leaves]
        except (KeyError, TypeError) as error:
            space = self.groups[0].observation_space
            reason = f"its observations have other parts than {space}: {error!r}"
            raise EnvironmentFailed(self._all_of_them, call, reason, lasting=True) from None
        for (path, leaf), (_, array) in zip(self._leaves, arrays, strict=True):
            shape = (self.num_envs, len(self.agents), *(leaf.shape or ()))
            if array.shape != shape or not np.can_cast(
                array.dtype, np.dtype(leaf.dtype), "same_kind"
            ):
                part = f" at {path_name(path)}" if path else ""
                reason = (
                    f"its observations{part} are {array.dtype} of shape {list(array.shape)}, and "
                    f"must be {leaf.dtype} of shape {list(shape)}"
                )
                raise EnvironmentFailed(self._all_of_them, call, reason, lasting=True)
        leaves = zip(arrays, self._leaves, strict=True)
        return unflatten(
            (path, np.asarray(array, leaf.dtype)) for (path, array), (_, leaf) in leaves
        )

    def _check_shapes(self, call: str, **arrays: Any) -> None:
        """Check rewards [N, A] and flags [N, A] bool, by name."""
        shape = self._shape
        for name, array in arrays.items():
            of_numbers = name == "rewards"
            kinds = "biuf" if of_numbers else "b"
            if not (
                isinstance(array, np.ndarray) and array.shape == shape and array.dtype.kind in kinds
            ):
                reason = (
                    f"its {name} must be an array of {'numbers' if of_numbers else 'bool'} with "
                    f"shape {list(shape)}, not {array!r}"
                )
                raise EnvironmentFailed(self._all_of_them, call, reason, lasting=True)

    def _failure(self, env: int, call: str, reason: str) -> EnvironmentFailed:
        where = f"environment {env} ({self._name})"
        return EnvironmentFailed(where, call, reason, lasting=True)


def _kept(observations: Tree, slots: NDArray[np.intp]) -> Tree:
    """Copies of the rows [B, ...] of some slots: the next episode may begin in the same memory."""
    copied: Tree = tree_map(lambda array: array.reshape(-1, *array.shape[2:])[slots], observations)
    return copied


def _rows(observations: Tree, slots: NDArray[np.intp]) -> Tree:
    """The rows [B, ...] of some slots from observations [N, A, ...]; all of them are a view."""

    def rows(array: NDArray[Any]) -> NDArray[Any]:
        every = array.reshape(-1, *array.shape[2:])  # [N * A, ...]
        return every if len(slots) == len(every) else every[slots]

    found: Tree = tree_map(rows, observations)
    return found
