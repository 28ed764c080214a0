"""What value functions see beyond their agents' observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from juggler.envrunner.environments.action_masks import (
    LegalActions,
    find_non_binary,
    flat_mask,
    mask_space,
    space_with_masks,
    with_masks,
)
from juggler.envrunner.environments.misfits import misfit
from juggler.envrunner.multi_agent.turns import ALL_OBSERVATIONS, STATE, AgentGroup
from juggler.runtime.connectors.leaves import at, holds_masks
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.columns import (
    ACTION_MASK,
    OBSERVED,
    OBSERVED_BY_CRITIC,
    without_mask,
)
from juggler.runtime.wire.structures import put, space_leaves, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import Path, Tree, flatten, unflatten


@dataclass(eq=False)
class Misfit(Exception):
    """An observation or an action mask does not fit its space."""

    row: int
    reason: str


class GroupObservations:
    """Batches the observations of one group.

    Action masks in the agents' infos become part of their observations, as in environments with one
    agent: a Dict gets the key "action_mask", and any other observation becomes a Dict with the keys
    "observation" and "action_mask".

    Args:
        plain: the agents, with their spaces in the environment.
        mask: in the info of one of them at the beginning of an episode; None: no mask.

    Raises:
        ValueError: `mask` does not fit the actions.
        UnsupportedSpace: a space has no encoding.
    """

    def __init__(self, plain: AgentGroup, mask: Any) -> None:
        self._plain = plain.observation_space
        self._actions = plain.action_space
        self._leaves = space_leaves(self._plain)
        self._mask: spaces.Space[Any] | None = None
        self.group = plain  # the agents, with the observation space of the batches
        self._ignores = holds_masks(self._plain)  # the observations already have masks
        if mask is not None and not self._ignores:
            try:
                self._mask = mask_space(flat_mask(self._actions, mask))
                LegalActions(self._mask, self._actions)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                agents = ", ".join(plain.agents)
                raise ValueError(
                    f"info['action_mask'] of {agents} does not fit the action space: {error}"
                ) from error
            # The policy and the learner find a mask only in observations.
            space = space_with_masks(self._plain, self._mask)
            self.group = AgentGroup(plain.agents, space, self._actions)
        LegalActions.of(self.group.observation_space, self._actions)
        self._none = zeros(self.group.observation_space, (0,))

    def batch(self, observations: Sequence[Any], given: Sequence[Any], last: bool = False) -> Tree:
        """Stack observations.

        Args:
            given: B action masks from the infos; None: no mask.
            last: they are the last of their episodes; a missing mask becomes all ones.

        Raises:
            Misfit: an observation does not fit the space, or a mask is missing or invalid.
        """
        if not observations:
            return self._none
        plain = stacked(self._plain, self._leaves, observations)
        if self._ignores:
            return plain
        if self._mask is not None:
            return with_masks(self._plain, plain, self._masks(self._mask, given, last))
        for row, mask in enumerate(given):
            if mask is not None:
                raise Misfit(row, "its info has an action mask, and had none in the first reset")
        return plain

    def _masks(self, space: spaces.Space[Any], given: Sequence[Any], last: bool) -> Tree:
        flat = []
        for row, mask in enumerate(given):
            if mask is None and not last:
                raise Misfit(row, "its info had an action mask before, and here it has none")
            try:
                if mask is None:  # everything is allowed
                    each = tree_map(np.ones_like, zeros(space))
                else:
                    each = flat_mask(self._actions, mask)
                # A mask may also be floats of 0.0 and 1.0.
                why = misfit(space, tree_map(_as_int8, each), ACTION_MASK)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise Misfit(
                    row, f"info['action_mask'] does not fit the action space: {error}"
                ) from None
            if why:
                raise Misfit(row, f"the action mask in its info does not fit: {why}")
            flat.append(each)
        masks: Tree = tree_map(lambda *each: np.stack(each), *flat)  # [B, n] each
        if found := find_non_binary(masks):
            (row, *_), what = found
            raise Misfit(row, what)
        binary: Tree = tree_map(_as_int8, masks)  # [B, n] each
        return binary


def _as_int8(mask: NDArray[Any]) -> NDArray[np.int8]:
    return mask.astype(np.int8, copy=False)


def stacked(
    space: spaces.Space[Any],
    leaves: Sequence[tuple[Path, spaces.Space[Any]]],
    values: Sequence[Any],
    what: str = "observation",
) -> Tree:
    """Stack B values of a space to a new tree [B, ...].

    Raises:
        Misfit: a value does not fit the space.
    """
    try:
        # Values of Dicts are trees, unless they contain Tuples.
        trees = [to_tree(space, each) for each in values] if _has_tuples(space) else values
        return unflatten(
            (path, _stacked([at(tree, path) for tree in trees], leaf)) for path, leaf in leaves
        )
    except Exception:  # to check each value every time takes too long
        for row, value in enumerate(values):
            if why := misfit(space, value, what):
                raise Misfit(row, why) from None
        raise


def _has_tuples(space: spaces.Space[Any]) -> bool:
    if isinstance(space, spaces.Dict):
        return any(map(_has_tuples, space.spaces.values()))
    return isinstance(space, spaces.Tuple)


def _stacked(values: list[Any], space: spaces.Space[Any]) -> NDArray[Any]:
    """Stack values of a space without Dict or Tuple: [B, ...]."""
    batch = np.array(values)  # [B, ...]
    shape = (len(values), *(space.shape or ()))
    if batch.shape != shape or not np.can_cast(batch.dtype, np.dtype(space.dtype), "same_kind"):
        raise ValueError(f"values of {space} must not be {batch.dtype} of shape {batch.shape}")
    return batch.astype(space.dtype, copy=False)


_BY_POLICY, _BY_CRITIC = OBSERVED[0], OBSERVED_BY_CRITIC[0]


class States:
    """States of environments as batches.

    Args:
        space: of a state; None: numbers like those of `first`, without bounds.

    Raises:
        UnsupportedSpace: the space has no encoding.
    """

    def __init__(self, space: Space[Any] | None, first: Any) -> None:
        if space is None:
            like = np.asarray(first)
            dtype: Any = np.float32 if like.dtype.kind == "f" else like.dtype  # as in learners
            space = spaces.Box(-np.inf, np.inf, like.shape, dtype)
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
        # Stacked once for all environments, without the absent agents.
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
