"""The connector frame_stack: the last k observations as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.connectors.connector import Columns, ContextConnector, Space
from juggler.runtime.connectors.leaves import at, joined, observed_leaves, replaced, space_with
from juggler.runtime.connectors.rows import first_observations
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.images import ImageLayout
from juggler.runtime.wire.trees import Path, unflatten

#: A column of batches that hold each frame once: a tree [P, ...].
FRAMES: Final = "frames"


class FrameStack(ContextConnector):
    """Stacks the last k observations ("frames") of an episode, the oldest first.

    Until an episode has k frames, its first one takes the place of the missing ones. Every Box leaf
    is stacked along its last axis, or along its channels' axis if `ImageLayout` finds that the
    channels come first. Other leaves and action masks stay as they are:

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
        """The batch with each frame once: as FRAMES, a tree [P, ...], and in place of every stacked
        leaf of its observations the numbers of its frames, int64 [N, T, k], [N, k] and [K, k].

        Args:
            columns: the batch, which stays as it is.
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
        return columns | named | {FRAMES: _tree(frames)}

    def is_without(self, columns: Mapping[str, Any]) -> bool:
        """Whether observations [N, T, ...] are single frames, and no stacks of them."""
        shape: tuple[int, ...] = tuple(at(columns[c.OBSERVATIONS], self._paths[0]).shape)
        return shape[2:] == self._frame_shape

    def stacked(self, columns: Columns) -> Columns:
        """The batch with stacks in place of the frames [..., k, ...] of its observations."""
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
        """The last k frames [N, k, ...] of each stacked leaf."""
        return [
            joined([at(context, path), at(observations, path)[:, None]], 1) for path in self._paths
        ]

    def _context(self, frames: list[Any]) -> Any:
        """The k - 1 frames [N, k - 1, ...] of each stacked leaf before the next one, as a tree."""
        return _tree(dict(zip(self._paths, frames, strict=True)))


def _tree(leaves: dict[Path, Any]) -> Any:
    """A tree of such leaves."""
    return leaves[()] if () in leaves else unflatten(leaves.items())


def _channel_axis(shape: tuple[int, ...]) -> int:
    """The axis of an observation, counted from its end, along which frames are stacked."""
    image = len(shape) in (3, 4)
    return -3 if image and not ImageLayout.of(shape).channels_last else -1


def _stacked_box(box: spaces.Box, k: int, channels: int) -> spaces.Box:
    low, high = (
        _folded(np.repeat(bound[None], k, 0), 0, channels) for bound in (box.low, box.high)
    )  # as its stack
    return spaces.Box(low, high, dtype=box.dtype.type)


def _folded(frames: Any, axis: int, channels: int) -> Any:
    """Moves the axis of the frames (arrays or tensors) into that of their channels, which is
    counted from the end."""
    dimensions = frames.ndim - axis - 1
    if dimensions == 0:
        return frames
    move: Any = torch.movedim if isinstance(frames, Tensor) else np.moveaxis
    if dimensions == 2:
        return move(frames, axis, -1)  # [k, H, W] -> [H, W, k]
    # [k, H, W, C] -> [H, W, k, C]; [k, F] and [k, C, H, W] as they are
    moved = move(frames, axis, channels - 1)
    shape = list(moved.shape)
    shape[channels - 1 :] = [shape[channels - 1] * shape[channels], *shape[channels:][1:]]
    return moved.reshape(shape)


def _frame_indices(columns: Columns, k: int) -> tuple[Tensor, Tensor]:
    """The index of each stack's frames among the k - 1 frames before a row, its T frames and the
    one after it.

    Observations are numbered through all rows: those of row n begin at n (k - 1 + T + 1).

    Returns:
        [N, T + 1, k] for observations and last observations; [K, k - 1] for the frames before final
            observations.
    """
    first = first_observations(columns)  # [N, T]
    n, t = first.shape
    steps = torch.arange(t + 1, device=first.device)  # [T + 1]
    # The step at which the episode began; one that began before the row has all of its k - 1
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
    """seen[index], with a method that copies whole frames: [M, ...], [...] -> [..., ...]."""
    return seen.index_select(0, index.flatten()).view(index.shape + seen.shape[1:])
