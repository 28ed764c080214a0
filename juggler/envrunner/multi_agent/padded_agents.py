"""Agents with different spaces, padded to equal ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from juggler.envrunner.environments.action_masks import mask_space
from juggler.envrunner.multi_agent.turns import AgentGroup, GroupTurn, MultiAgentEnvs, Turn
from juggler.runtime.connectors.leaves import OBSERVATION, at, holds_masks
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import space_leaves, zeros
from juggler.runtime.wire.trees import Tree

Rows = NDArray[np.intp]
#: Returns the space of Boxes with the same dtype and number of dimensions; None: there is none.
MergedBox = Callable[[Sequence[Any]], spaces.Box | None]


class PaddedAgents:
    """Environments whose groups of agents are padded to one group.

    Arrays of observations get zeros at their ends. If agents have different numbers of actions, the
    key "action_mask" of their observations allows each its own. Numbers at the ends of a longer
    action are dropped.

    Args:
        envs: the environments.

    Raises:
        ValueError: the spaces cannot be padded.
    """

    def __init__(self, envs: MultiAgentEnvs) -> None:
        self._envs = envs
        self.num_envs, self.agents = envs.num_envs, envs.agents
        self.critic_spaces: Mapping[str, Space[Any]] = envs.critic_spaces
        actions = _together([each.action_space for each in envs.groups], "actions", _box_of_actions)
        masked = isinstance(actions, spaces.Discrete) and any(
            each.action_space != actions or holds_masks(each.observation_space)
            for each in envs.groups
        )
        # By group, the mask [n] of its actions, if it has to be added.
        self._masks = [_own_mask(each) if masked else None for each in envs.groups]
        seen = [_with_mask(*each) for each in zip(envs.groups, self._masks, strict=True)]
        self._leaves = [space_leaves(each) for each in seen]
        observations = _together(seen, "observations", _box_of_observations)
        self.groups: tuple[AgentGroup, ...] = (AgentGroup(envs.agents, observations, actions),)
        number = {agent: g for g, each in enumerate(envs.groups) for agent in each.agents}
        self._group_of = np.array([number[agent] for agent in envs.agents], np.intp)  # [A]
        self._acting: Rows = np.zeros(0, np.intp)  # [B]

    def reset(self, seed: int) -> Turn:
        return self._merged(self._envs.reset(seed))

    def step(self, actions: Sequence[Any]) -> Turn:
        (batch,) = actions
        groups = self._group_of[self._acting % len(self.agents)]  # [B]
        own = [
            _own_actions(batch, np.flatnonzero(groups == g), group.action_space)
            for g, group in enumerate(self._envs.groups)
        ]
        return self._merged(self._envs.step(own))

    def returns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._envs.returns()

    def overdue(self, steps: int) -> str:
        return self._envs.overdue(steps)

    def close(self) -> None:
        self._envs.close()

    def _merged(self, turn: Turn) -> Turn:
        parts = turn.groups
        acting, acts = _in_order([each.acting for each in parts])
        ended, ends = _in_order([each.ended for each in parts])
        idle = [each.idle for each in parts if each.idle is not None]
        self._acting = acting
        merged = GroupTurn(
            acting=acting,
            observations=self._padded([each.observations for each in parts], acts),
            first=_joined([each.first for each in parts], acts),
            rewards=_joined([each.rewards for each in parts], acts),
            ended=ended,
            last_observations=self._padded([each.last_observations for each in parts], ends),
            last_rewards=_joined([each.last_rewards for each in parts], ends),
            terminated=_joined([each.terminated for each in parts], ends),
            idle=_joined(idle, acts) if len(idle) == len(parts) else None,
        )
        return replace(turn, groups=(merged,))

    def _padded(self, parts: Sequence[Tree], rows: Sequence[Rows]) -> Tree:
        """Merge observations of the groups: [B, ...].

        Args:
            parts: by group, [b, ...].
            rows: by group, [b] their places among B.
        """
        merged = zeros(self.groups[0].observation_space, (sum(map(len, rows)),))
        for part, places, leaves, mask in zip(parts, rows, self._leaves, self._masks, strict=True):
            seen: Any = part
            if mask is not None:
                seen = {**part} if isinstance(part, Mapping) else {OBSERVATION: part}
                seen[ACTION_MASK] = np.broadcast_to(mask, (len(places), len(mask)))  # [b, n]
            for path, _ in leaves:
                values = at(seen, path)  # [b, ...]
                at(merged, path)[(places, *map(slice, values.shape[1:]))] = values
        return merged


def _in_order(slots: Sequence[Rows]) -> tuple[Rows, list[Rows]]:
    """Sort the slots of the groups; return their places by group, too."""
    every = np.concatenate(slots)  # [B]
    places = np.empty(len(every), np.intp)
    order = np.argsort(every)
    places[order] = np.arange(len(every))
    return every[order], np.split(places, np.cumsum([len(each) for each in slots])[:-1])


def _joined(parts: Sequence[NDArray[Any]], rows: Sequence[Rows]) -> NDArray[Any]:
    joined = np.empty(sum(map(len, rows)), parts[0].dtype)  # [B]
    joined[np.concatenate(rows)] = np.concatenate(parts)
    return joined


def _own_actions(batch: Any, rows: Rows, space: Space[Any]) -> Any:
    """Return a group's part of the actions, without padding: [b, ...]."""
    if isinstance(space, spaces.Dict):
        return {key: _own_actions(batch[key], rows, each) for key, each in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_own_actions(part, rows, e) for part, e in zip(batch, space, strict=True))
    return batch[(rows, *map(slice, space.shape or ()))]


# -- spaces ---------------------------------------------------------------------------------------


def _together(parts: Sequence[Any], what: str, box: MergedBox) -> Space[Any]:
    """Return the space that holds padded values of all spaces.

    Args:
        parts: by group.
        what: "actions" or "observations", for errors.
        box: merges Boxes.

    Raises:
        ValueError: there is none.
    """
    first = parts[0]
    found: Space[Any] | None = None
    if all(each == first for each in parts):
        found = first
    elif all(isinstance(each, spaces.Dict) and each.keys() == first.keys() for each in parts):
        found = spaces.Dict({key: _together([e[key] for e in parts], what, box) for key in first})
    elif all(isinstance(each, spaces.Tuple) and len(each) == len(first) for each in parts):
        found = spaces.Tuple(_together(each, what, box) for each in zip(*parts, strict=True))
    elif all(isinstance(each, spaces.Discrete) and each.start == first.start for each in parts):
        found = spaces.Discrete(max(int(each.n) for each in parts), start=int(first.start))
    elif all(isinstance(each, spaces.MultiBinary) and len(each.shape) == 1 for each in parts):
        found = spaces.MultiBinary(max(each.shape[0] for each in parts))
    elif all(
        isinstance(each, spaces.Box)
        and (each.dtype, len(each.shape)) == (first.dtype, len(first.shape))
        for each in parts
    ):
        found = box(parts)
    if found is None:
        kinds = " and ".join(map(str, dict.fromkeys(map(str, parts))))
        raise ValueError(
            f"pad_agents: {what} of {kinds} cannot be padded to equal ones: leave it out, and give "
            "each kind of agent a module of its own"
        )
    return found


def _largest(parts: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(max, zip(*(each.shape for each in parts), strict=True)))


def _box_of_observations(parts: Sequence[Any]) -> spaces.Box:
    """Return a Box with the bounds of all, and zero."""
    low, high = np.zeros((2, *_largest(parts)), parts[0].dtype)
    for each in parts:
        own = tuple(map(slice, each.shape))
        low[own], high[own] = np.minimum(low[own], each.low), np.maximum(high[own], each.high)
    return spaces.Box(low, high, dtype=parts[0].dtype.type)


def _box_of_actions(parts: Sequence[Any]) -> spaces.Box | None:
    """Return the longest Box; None: the bounds of others differ."""
    longest = max(parts, key=lambda each: each.shape)
    for each in parts:
        own = tuple(map(slice, each.shape))
        if _largest(parts) != longest.shape or not (
            np.array_equal(each.low, longest.low[own])
            and np.array_equal(each.high, longest.high[own])
        ):
            return None
    found: spaces.Box = longest
    return found


def _own_mask(group: AgentGroup) -> NDArray[np.int8] | None:
    """Return a mask of ones; None: the group has masks."""
    if holds_masks(group.observation_space):
        return None
    assert isinstance(group.action_space, spaces.Discrete)
    return np.ones(int(group.action_space.n), np.int8)


def _with_mask(group: AgentGroup, mask: NDArray[np.int8] | None) -> Space[Any]:
    space = group.observation_space
    if mask is None:
        return space
    parts = space.spaces if isinstance(space, spaces.Dict) else {OBSERVATION: space}
    return spaces.Dict({**parts, ACTION_MASK: mask_space(mask)})
