"""The connector previous_actions_and_rewards: the policy's last action and the reward for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.connectors.connector import Columns, ContextConnector, Space
from juggler.runtime.connectors.leaves import OBSERVATION, acted_dtype, in_dtype, space_with
from juggler.runtime.connectors.rows import first_observations, per_step
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import space_leaves, tree_map, zeros

PREVIOUS_ACTION: Final = "previous_action"
PREVIOUS_REWARD: Final = "previous_reward"


class PreviousActionsAndRewards(ContextConnector):
    """Adds the keys "previous_action" and "previous_reward" to observations.

    An observation that is not a Dict gets the key "observation". At the start of an episode both
    are 0; Discrete and MultiDiscrete actions are the first of their space. The action is the
    policy's own, as batches hold it, and the reward the environment's.
    """

    takes_tensors = True

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        acted = _as_chosen(action_space)
        self._first_action: Any = zeros(acted, (1,))  # [1, ...]
        self._is_dict = isinstance(observation_space, spaces.Dict)
        added = {
            PREVIOUS_ACTION: acted,
            PREVIOUS_REWARD: spaces.Box(-np.inf, np.inf, (), np.float32),
        }
        children = {OBSERVATION: observation_space}
        if isinstance(observation_space, spaces.Dict):
            children = dict(observation_space.spaces)
            if taken := children.keys() & added.keys():
                raise ValueError(f"the observations have the keys {sorted(taken)} already")
        super().__init__(spaces.Dict({**children, **added}), action_space)

    def initial(self, observations: Any) -> Any:
        leaf = _first_leaf(observations)
        rows = leaf.shape[0]
        if isinstance(leaf, Tensor):
            actions = tree_map(
                lambda a: torch.from_numpy(a).expand(rows, *a.shape[1:]), self._first_action
            )  # [N, ...]
            return {PREVIOUS_ACTION: actions, PREVIOUS_REWARD: torch.zeros(rows)}
        return {
            PREVIOUS_ACTION: tree_map(lambda a: np.repeat(a, rows, 0), self._first_action),
            PREVIOUS_REWARD: np.zeros(rows, np.float32),
        }

    def __call__(self, observations: Any, context: Any) -> Any:
        return self._beside(observations, context[PREVIOUS_ACTION], context[PREVIOUS_REWARD])

    def advance(
        self, context: Any, observations: Any, actions: Any, rewards: NDArray[np.float32]
    ) -> Any:
        return {
            PREVIOUS_ACTION: tree_map(
                lambda like, action: _own(action, like.dtype), self._first_action, actions
            ),
            PREVIOUS_REWARD: _own(rewards, np.float32),
        }

    def over_rows(self, columns: Columns, context: Any) -> Columns:
        first = first_observations(columns)  # [N, T]
        rows, steps = columns[c.FINAL_ROWS], columns[c.FINAL_STEPS]  # [K] both
        chosen = tree_map(
            lambda action, before: action.to(before.dtype),
            columns[c.ACTIONS],
            context[PREVIOUS_ACTION],
        )  # [N, T, ...]
        actions = tree_map(
            lambda a, before, start: _shifted(a, before, torch.from_numpy(start), first),
            chosen,
            context[PREVIOUS_ACTION],
            self._first_action,
        )  # [N, T, ...]
        rewards = columns[c.REWARDS]  # [N, T]
        before = _shifted(rewards, context[PREVIOUS_REWARD], rewards.new_zeros(1), first)  # [N, T]
        return columns | {
            c.OBSERVATIONS: self._beside(columns[c.OBSERVATIONS], actions, before),
            c.LAST_OBSERVATIONS: self._beside(
                columns[c.LAST_OBSERVATIONS], tree_map(lambda a: a[:, -1], chosen), rewards[:, -1]
            ),
            c.FINAL_OBSERVATIONS: self._beside(
                columns[c.FINAL_OBSERVATIONS],
                tree_map(lambda a: a[rows, steps], chosen),
                rewards[rows, steps],
            ),
        }

    def _beside(self, observations: Any, actions: Any, rewards: Any) -> dict[str, Any]:
        children = observations if self._is_dict else {OBSERVATION: observations}
        return {**children, PREVIOUS_ACTION: actions, PREVIOUS_REWARD: rewards}


def _shifted(column: Tensor, before: Tensor, start: Tensor, first: Tensor) -> Tensor:
    """For each step, the value at the step before it -> [N, T, ...].

    Args:
        column: [N, T, ...]
        before: [N, ...], the value for a row's first step.
        start: [1, ...], the value for the first step of an episode.
        first: [N, T], which steps are first in an episode.
    """
    shifted = torch.cat([before[:, None], column[:, :-1]], 1)  # [N, T, ...]
    return torch.where(per_step(first, column), start.to(column.device), shifted)


def _as_chosen(space: Space) -> Space:
    """The action space with the dtypes that policies act in."""
    leaves: dict[tuple[str, ...], Space] = {}
    for path, leaf in space_leaves(space):
        dtype: Any = acted_dtype(leaf)
        if isinstance(leaf, spaces.Box):
            leaves[path] = spaces.Box(leaf.low.astype(dtype), leaf.high.astype(dtype), dtype=dtype)
        elif isinstance(leaf, spaces.Discrete):
            leaves[path] = spaces.Discrete(int(leaf.n), start=int(leaf.start))
        elif isinstance(leaf, spaces.MultiDiscrete):
            nvec, start = leaf.nvec.astype(dtype), leaf.start.astype(dtype)
            leaves[path] = spaces.MultiDiscrete(nvec, dtype, start=start)
    return space_with(space, leaves)


def _first_leaf(tree: Any) -> Any:
    while isinstance(tree, Mapping):
        tree = next(iter(tree.values()))
    return tree


def _own(values: Any, dtype: Any) -> Any:
    """An array with a dtype, in newly allocated memory; or a tensor, which is never changed."""
    return in_dtype(values, dtype) if isinstance(values, Tensor) else np.array(values, dtype)
