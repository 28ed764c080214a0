"""What value functions see beyond their agents' observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from juggler.envrunner.multi_agent.group_observations import GroupObservations, Misfit, stacked
from juggler.envrunner.multi_agent.turns import ALL_OBSERVATIONS, STATE, AgentGroup
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.columns import OBSERVED, OBSERVED_BY_CRITIC
from juggler.runtime.modules.encoders import without_mask
from juggler.runtime.wire.structures import put, space_leaves, zeros
from juggler.runtime.wire.trees import Tree, flatten, unflatten

_BY_POLICY, _BY_CRITIC = OBSERVED[0], OBSERVED_BY_CRITIC[0]


class States:
    """States of environments as batches.

    Args:
        space: of a state; None: numbers like those of `first`, without bounds.
        first: a state.

    Attributes:
        space: of a state.

    Raises:
        UnsupportedSpace: the space has no encoding.
    """

    def __init__(self, space: Space[Any] | None, first: Any) -> None:
        if space is None:
            like = np.asarray(first)
            space = spaces.Box(-np.inf, np.inf, like.shape, _dtype_of(like))
        self.space = space
        self._leaves = space_leaves(space)

    def batch(self, states: Sequence[Any]) -> Tree:
        """Stack B states: a new tree [B, ...].

        Raises:
            Misfit: a state does not fit the space.
        """
        return stacked(self.space, self._leaves, states, "state")


class AllObservations:
    """The observations of all agents of environments as batches, without action masks.

    Args:
        groups: the agents, with their spaces in the environment.

    Attributes:
        space: of the observations of all agents.

    Raises:
        UnsupportedSpace: a space has no encoding.
    """

    def __init__(self, groups: Sequence[AgentGroup]) -> None:
        self._groups = [
            AgentGroup(group.agents, without_mask(group.observation_space), group.action_space)
            for group in groups
        ]
        self._observations = [GroupObservations(group, None) for group in self._groups]
        joint = [joint_space(each.observation_space, len(each.agents)) for each in self._groups]
        self.space: Space[Any] = joint[0] if len(joint) == 1 else spaces.Tuple(joint)

    def batch(self, seen: Sequence[Mapping[str, Any]]) -> Tree:
        """Stack the observations by agent of B environments; missing ones are zeros.

        Raises:
            Misfit: an observation does not fit its space.
        """
        parts = [
            self._of_group(group, observations, seen)
            for group, observations in zip(self._groups, self._observations, strict=True)
        ]
        return parts[0] if len(parts) == 1 else {str(i): part for i, part in enumerate(parts)}

    def _of_group(
        self, group: AgentGroup, observations: GroupObservations, seen: Sequence[Mapping[str, Any]]
    ) -> Tree:
        space, count = group.observation_space, len(group.agents)
        there = [
            (row * count + at, by_agent[agent])
            for row, by_agent in enumerate(seen)
            for at, agent in enumerate(group.agents)
            if agent in by_agent
        ]
        places = np.array([place for place, _ in there], np.intp)  # [P]
        try:
            given = observations.batch([each for _, each in there], [None] * len(there))  # [P, ...]
        except Misfit as error:
            row, at = divmod(int(places[error.row]), count)
            raise Misfit(row, f"agent {group.agents[at]!r}: {error.reason}") from None
        every = zeros(space, (len(seen) * count,))  # [B A, ...]
        put(every, places, given)
        return joined(space, every, count)


def joint_space(space: Space[Any], count: int) -> Space[Any]:
    """Return the space of the joint observation of `count` agents.

    Vectors are concatenated, and everything else gets a leading dimension for the agents.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: joint_space(each, count) for key, each in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([joint_space(each, count) for each in space.spaces])
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary(_joint_shape(space, count))
    if isinstance(space, spaces.Box):
        low, high = (
            np.broadcast_to(each, (count, *space.shape)) for each in (space.low, space.high)
        )
        shape = _joint_shape(space, count)
        return spaces.Box(low.reshape(shape), high.reshape(shape), dtype=space.dtype)
    joint: Space[Any] = batch_space(space, count)
    return joint


def joined(space: Space[Any], observations: Tree, count: int) -> Tree:
    """Reshape A agents' observations [B A, ...] to values of their `joint_space`."""
    arrays = dict(flatten(observations))
    return unflatten(
        (path, arrays[path].reshape(-1, *_joint_shape(leaf, count)))
        for path, leaf in space_leaves(space)
    )


def _joint_shape(leaf: Space[Any], count: int) -> tuple[int, ...]:
    shape = leaf.shape or ()
    is_vector = len(shape) == 1 and isinstance(leaf, spaces.Box | spaces.MultiBinary)
    return (count * shape[0],) if is_vector else (count, *shape)


def _dtype_of(state: NDArray[Any]) -> Any:
    """Return the dtype of states without a space: learners compute in float32."""
    return np.float32 if state.dtype.kind == "f" else state.dtype


def space_with_critic(space: Space[Any], critic_space: Space[Any] | None) -> Space[Any]:
    """Return the space of rows: observations, perhaps with a critic's."""
    if critic_space is None:
        return space
    return spaces.Dict({_BY_POLICY: space, _BY_CRITIC: critic_space})


def with_critic(observations: Tree, seen: Tree) -> Tree:
    """Join observations [B, ...] with what a critic sees [B, ...]."""
    return {_BY_POLICY: observations, _BY_CRITIC: seen}


def apart_from_critic(batch: EpisodeBatch) -> EpisodeBatch:
    """Split a batch of joined rows into columns for policy and critic."""
    held = [getattr(batch, name) for name in OBSERVED]
    columns = {name: tree[_BY_POLICY] for name, tree in zip(OBSERVED, held, strict=True)}
    for name, tree in zip(OBSERVED_BY_CRITIC, held, strict=True):
        columns[name] = tree[_BY_CRITIC]
    return replace(batch, **columns)


def no_state(name: str) -> str:
    """Explain that an environment has no state."""
    return (
        f"critic_sees = {STATE!r}: the environment {name} has no state() that tells what a value "
        "function may see, as in PettingZoo (nor a state_space, which a MultiAgentVectorEnv has "
        f"beside it); write it, or set critic_sees = {ALL_OBSERVATIONS!r}"
    )
