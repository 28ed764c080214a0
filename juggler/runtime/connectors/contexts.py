"""Connectors that add the past: frames, last action and reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.connectors.connector import Columns, ContextConnector, Space
from juggler.runtime.connectors.leaves import (
    OBSERVATION,
    acted_dtype,
    at,
    in_dtype,
    joined,
    observed_leaves,
    replaced,
    space_with,
)
from juggler.runtime.connectors.row_times import first_observations, per_step
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.encoders import ImageLayout
from juggler.runtime.wire.structures import first_leaf, space_leaves, tree_map, zeros
from juggler.runtime.wire.trees import Path, unflatten

#: A column of batches that hold each frame once: a tree [P, ...].
FRAMES: Final = "frames"


class FrameStack(ContextConnector):
    """Stacks the last k observations ("frames") of an episode, the oldest first.

    Until an episode has k frames, its first one replaces missing ones. Every Box leaf is stacked
    along its last axis, or along its channels' axis if `ImageLayout` finds that the channels come
    first. Other leaves and action masks do not change:

        []         -> [k]
        [F]        -> [k F]
        [H, W]     -> [H, W, k]
        [H, W, C]  -> [H, W, k C]
        [C, H, W]  -> [k C, H, W]      and so on for more dimensions

    Batches hold single frames and, for each row, the k - 1 frames before it. The learner makes the
    stacks, on its device. Mnih et al. 2015, "Human-level control through deep reinforcement
    learning", stack 4 frames.

    Args:
        k: number of frames.
    """

    takes_tensors = True
    uses_rewards = False

    def __init__(self, observation_space: Space, action_space: Space, k: int = 4) -> None:
        if type(k) is not int or k < 2:
            raise ValueError(f"k = {k!r} frames to stack: must be an integer of at least 2")
        boxes = {
            path: leaf
            for path, leaf in observed_leaves(observation_space).items()
            if isinstance(leaf, spaces.Box)
        }
        if not boxes:
            raise ValueError(
                f"frame_stack has nothing to stack: observations in {observation_space} hold no Box"
            )
        # All leaves are stacked alike: the first one tells frames from stacks.
        self._k = k
        self._paths = list(boxes)
        self._channels = {path: _channel_axis(leaf.shape) for path, leaf in boxes.items()}
        self._frame_shape = boxes[self._paths[0]].shape
        leaves = {path: _stacked_box(leaf, k, self._channels[path]) for path, leaf in boxes.items()}
        super().__init__(space_with(observation_space, leaves), action_space)

    def initial(self, observations: Any) -> Any:
        return self._context(
            [joined([at(observations, path)[:, None]] * (self._k - 1), 1) for path in self._paths]
        )

    def __call__(self, observations: Any, context: Any) -> Any:
        frames = self._frames(context, observations)  # [N, k, ...] each
        stacks = {
            path: _folded(each, 1, self._channels[path])
            for path, each in zip(self._paths, frames, strict=True)
        }  # [N, ...] each
        return replaced(observations, stacks)

    def advance(
        self, context: Any, observations: Any, actions: Any, rewards: NDArray[np.float32]
    ) -> Any:
        return self._context([each[:, 1:] for each in self._frames(context, observations)])

    def over_rows(self, columns: Columns, context: Any) -> Columns:
        numbered = self.numbered(columns, context)
        frames = numbered.pop(FRAMES)
        for name in c.OBSERVED:
            of_frames = {
                path: _taken(at(frames, path), at(numbered[name], path)) for path in self._paths
            }  # [..., k, ...] each
            numbered[name] = replaced(numbered[name], of_frames)
        return self.stacked(numbered)

    def numbered(self, columns: Columns, context: Any) -> Columns:
        """Return the batch with each frame once, and numbers instead of stacks.

        FRAMES is a tree [P, ...]; the numbers are int64 [N, T, k], [N, k] and [K, k].

        Args:
            columns: the batch, which is not changed.
            context: [N, ...] at the start of each row.
        """
        index, final_index = _frame_indices(columns, self._k)  # [N, T + 1, k], [K, k - 1]
        count = len(columns[c.FINAL_ROWS])  # K
        frames: dict[Path, Tensor] = {}
        for path in self._paths:
            observations = at(columns[c.OBSERVATIONS], path)  # [N, T, ...]
            last = at(columns[c.LAST_OBSERVATIONS], path)  # [N, ...]
            final = at(columns[c.FINAL_OBSERVATIONS], path)  # [K, ...]
            seen = torch.cat([at(context, path), observations, last[:, None]], 1)
            frames[path] = torch.cat([seen.flatten(0, 1), final])  # [N (k - 1 + T + 1) + K, ...]
        # Final observations are numbered after the frames of all rows.
        behind = index.shape[0] * (index.shape[1] + self._k - 1)  # N (k - 1 + T + 1)
        finals = torch.arange(behind, behind + count, device=index.device)  # [K]
        numbers = {
            c.OBSERVATIONS: index[:, :-1],  # [N, T, k]
            c.LAST_OBSERVATIONS: index[:, -1],  # [N, k]
            c.FINAL_OBSERVATIONS: torch.cat([final_index, finals[:, None]], 1),  # [K, k]
        }
        named = {
            name: replaced(columns[name], dict.fromkeys(self._paths, each))
            for name, each in numbers.items()
        }
        return columns | named | {FRAMES: unflatten(frames.items())}

    def is_without(self, columns: Mapping[str, Any]) -> bool:
        """Return whether observations [N, T, ...] are single frames, not stacks."""
        shape: tuple[int, ...] = tuple(at(columns[c.OBSERVATIONS], self._paths[0]).shape)
        return shape[2:] == self._frame_shape

    def stacked(self, columns: Columns) -> Columns:
        """Return the batch with stacks instead of frames [..., k, ...]."""
        found = dict(columns)
        for name in c.OBSERVED:
            if name in columns:
                axis = 2 if name == c.OBSERVATIONS else 1
                stacks = {
                    path: _folded(at(columns[name], path), axis, self._channels[path])
                    for path in self._paths
                }
                found[name] = replaced(columns[name], stacks)
        return found

    def _frames(self, context: Any, observations: Any) -> list[Any]:
        """Return the last k frames [N, k, ...] of each stacked leaf."""
        return [
            joined([at(context, path), at(observations, path)[:, None]], 1) for path in self._paths
        ]

    def _context(self, frames: list[Any]) -> Any:
        """Return each leaf's last frames [N, k - 1, ...]."""
        return unflatten(zip(self._paths, frames, strict=True))


def _channel_axis(shape: tuple[int, ...]) -> int:
    """Return the axis along which frames are stacked, counted from the end."""
    image = len(shape) in (3, 4)
    return -3 if image and not ImageLayout.of(shape).channels_last else -1


def _stacked_box(box: spaces.Box, k: int, channels: int) -> spaces.Box:
    # Bounds are stacked like the frames.
    low, high = (
        _folded(np.repeat(bound[None], k, 0), 0, channels) for bound in (box.low, box.high)
    )
    return spaces.Box(low, high, dtype=box.dtype.type)


def _folded(frames: Any, axis: int, channels: int) -> Any:
    """Merge the axis of frames into the axis of channels.

    Works with arrays and tensors; the channels' axis is counted from the end.
    """
    dimensions = frames.ndim - axis - 1
    if dimensions == 0:
        return frames
    move: Any = torch.movedim if isinstance(frames, Tensor) else np.moveaxis
    if dimensions == 2:
        return move(frames, axis, -1)  # [k, H, W] -> [H, W, k]
    # [k, H, W, C] -> [H, W, k, C]; [k, F] and [k, C, H, W] unchanged
    moved = move(frames, axis, channels - 1)
    shape = list(moved.shape)
    shape[channels - 1 :] = [shape[channels - 1] * shape[channels], *shape[channels:][1:]]
    return moved.reshape(shape)


def _frame_indices(columns: Columns, k: int) -> tuple[Tensor, Tensor]:
    """Return indices of each stack's frames.

    They count the k - 1 frames before a row, its T frames and the one after it.

    Observations are numbered through all rows: row n begins at n (k - 1 + T + 1).

    Returns:
        [N, T + 1, k] for observations and last observations; [K, k - 1] for the frames before final
            observations.
    """
    first = first_observations(columns)  # [N, T]
    n, t = first.shape
    steps = torch.arange(t + 1, device=first.device)  # [T + 1]
    # The step at which the episode began; an episode from before the row has all of its k - 1
    # frames.
    began = torch.where(first, steps[:-1], 1 - k).cummax(1).values  # [N, T]
    began = torch.cat([began, began[:, -1:]], 1)  # [N, T + 1]
    ages = torch.arange(1 - k, 1, device=first.device)  # [k] of frames, the oldest first
    index = torch.maximum(steps[:, None] + ages, began[..., None])  # [N, T + 1, k]
    rows, ends = columns[c.FINAL_ROWS], columns[c.FINAL_STEPS]  # [K] both
    final_index = torch.maximum(ends[:, None] + 1 + ages[:-1], began[rows, ends, None])  # [K, k-1]
    offsets = torch.arange(n, device=first.device) * (k + t) + (k - 1)  # [N] of each step 0
    return index + offsets[:, None, None], final_index + offsets[rows, None]


def _taken(seen: Tensor, index: Tensor) -> Tensor:
    """Take whole frames: [M, ...], [...] -> [..., ...]."""
    return seen.index_select(0, index.flatten()).view(index.shape + seen.shape[1:])


PREVIOUS_ACTION: Final = "previous_action"
PREVIOUS_REWARD: Final = "previous_reward"


class PreviousActionsAndRewards(ContextConnector):
    """Adds the keys "previous_action" and "previous_reward" to observations.

    An observation that is not a Dict gets the key "observation". At the start of an episode both
    are 0; Discrete and MultiDiscrete actions are the first of their space. The action is the
    policy's, as in batches, and the reward is the environment's.
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
                raise ValueError(f"the observations already have the keys {sorted(taken)}")
        super().__init__(spaces.Dict({**children, **added}), action_space)

    def initial(self, observations: Any) -> Any:
        leaf = first_leaf(observations)
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
        return self._with_previous(observations, context[PREVIOUS_ACTION], context[PREVIOUS_REWARD])

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
        # Before a row's first step comes what its context holds.
        actions = tree_map(
            lambda a, before, start: _shifted(a, before, torch.from_numpy(start), first),
            chosen,
            context[PREVIOUS_ACTION],
            self._first_action,
        )  # [N, T, ...]
        rewards = columns[c.REWARDS]  # [N, T]
        before = _shifted(rewards, context[PREVIOUS_REWARD], rewards.new_zeros(1), first)  # [N, T]
        # After a row or an episode, the previous step is its last one.
        return columns | {
            c.OBSERVATIONS: self._with_previous(columns[c.OBSERVATIONS], actions, before),
            c.LAST_OBSERVATIONS: self._with_previous(
                columns[c.LAST_OBSERVATIONS], tree_map(lambda a: a[:, -1], chosen), rewards[:, -1]
            ),
            c.FINAL_OBSERVATIONS: self._with_previous(
                columns[c.FINAL_OBSERVATIONS],
                tree_map(lambda a: a[rows, steps], chosen),
                rewards[rows, steps],
            ),
        }

    def _with_previous(self, observations: Any, actions: Any, rewards: Any) -> dict[str, Any]:
        children = observations if self._is_dict else {OBSERVATION: observations}
        return {**children, PREVIOUS_ACTION: actions, PREVIOUS_REWARD: rewards}


def _shifted(column: Tensor, before: Tensor, start: Tensor, first: Tensor) -> Tensor:
    """Return the value one step earlier, for each step [N, T, ...].

    Args:
        column: [N, T, ...]
        before: [N, ...], the value for a row's first step.
        start: [1, ...], the value for the first step of an episode.
        first: [N, T], whether each step is the first of an episode.
    """
    shifted = torch.cat([before[:, None], column[:, :-1]], 1)  # [N, T, ...]
    return torch.where(per_step(first, column), start.to(column.device), shifted)


def _as_chosen(space: Space) -> Space:
    """Return the action space with the dtypes that policies act in."""
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


def _own(values: Any, dtype: Any) -> Any:
    """Return an array of a dtype in new memory; tensors are shared."""
    return in_dtype(values, dtype) if isinstance(values, Tensor) else np.array(values, dtype)
