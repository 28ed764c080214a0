"""Joins batches of episodes into one sample, and splits them into shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.actors.resources import usable_cores
from juggler.runtime.episodes.batch import STEP_COLUMNS, EpisodeBatch, batch_of_columns
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Path, Tree, flatten, path_name

#: Columns of indices, int64 in a sample. Row indices count through all batches.
_ROW_INDICES = (c.FINAL_ROWS, c.SEGMENT_ROWS)
_INDICES = (c.FINAL_STEPS, c.SEGMENT_STARTS, c.SEGMENT_LENGTHS, c.SEGMENT_OFFSETS)

#: Bytes of a column that several threads copy for a GPU.
_LARGE = 2**24


def collate(batches: Sequence[EpisodeBatch], *, pin_memory: bool = False) -> dict[str, Any]:
    """Join batches into a sample of N rows and T steps.

    It has K truncations and S segments. Every array is copied once, so the batches' memory is free
    afterwards. Shorter rows are padded with dead steps that hold the last observation. So the value
    after a row's last live step is always the value of the step to its right.

    Args:
        batches: batches of one module, in the order of their rows in the sample.
        pin_memory: whether the result is in page-locked memory, from which GPU copies are
            asynchronous. Torch does not reuse it during a copy.

    Returns:
        By the names in `columns`: step columns [N, T, ...]; last_observations and states [N, ...];
        final_observations [K, ...], final_rows and final_steps [K]; segment_rows, segment_starts,
        segment_lengths and segment_offsets [S]; with a privileged critic, critic_observations,
        last_critic_observations and final_critic_observations, shaped like the columns without
        "critic". Indices are int64. Observations, actions and states are trees of tensors if they
        are trees of arrays in the batches.

    Raises:
        ValueError: there are no batches, or their arrays of observations, actions or states differ
            in shape or dtype.
    """
    if not batches:
        raise ValueError("no batches: there is nothing to train on")
    for name, dimensions in (
        (c.OBSERVATIONS, 2),
        (c.CRITIC_OBSERVATIONS, 2),
        (c.ACTIONS, 2),
        (c.STATES, 1),
    ):
        _check_alike(name, [getattr(batch, name) for batch in batches], dimensions)
    # Each array is copied once, straight into its place in the sample.
    copies = _Copies(batches, pin_memory)
    sample: dict[str, Any] = {}
    for names in (c.OBSERVED, c.OBSERVED_BY_CRITIC)[: 1 + batches[0].has_critic]:
        before, last, final = ([getattr(batch, name) for batch in batches] for name in names)
        after = [tree_map(lambda x: x[:, None], each) for each in last]  # [N, 1, ...]
        sample[names[0]] = tree_map(copies.steps, *before, *after)
        sample[names[1]] = tree_map(copies.joined, *last)
        sample[names[2]] = tree_map(copies.joined, *final)
    # Padding needs any valid action: the row's last one.
    sample[c.ACTIONS] = tree_map(
        copies.steps,
        *(b.actions for b in batches),
        *(tree_map(lambda x: x[:, -1:], b.actions) for b in batches),  # [N, 1, ...]
    )
    for name in STEP_COLUMNS:  # padded with zeros (false)
        arrays = [getattr(batch, name) for batch in batches]
        sample[name] = copies.steps(*arrays, *(np.zeros((), array.dtype) for array in arrays))
    sample[c.STATES] = tree_map(copies.joined, *(batch.states for batch in batches))
    return sample | {name: copies.indices(name, batches) for name in (*_ROW_INDICES, *_INDICES)}


class _Copies:
    """Copies arrays of several batches into one tensor."""

    def __init__(self, batches: Sequence[EpisodeBatch], pin_memory: bool) -> None:
        self._steps = max(batch.steps for batch in batches)
        self._pin_memory = pin_memory
        *self.starts, self._rows = accumulate((each.rows for each in batches), initial=0)
        # The starts are the first rows of the batches in the sample, [B].

    def steps(self, *arrays: NDArray[Any]) -> Tensor:
        """Join B arrays and their padding -> [N, T, ...]."""
        count = len(self.starts)
        tensor = self._empty((self._rows, self._steps, *arrays[0].shape[2:]), arrays[0].dtype)
        columns = tensor.numpy()  # [N, T, ...]

        def copy(start: int, part: NDArray[Any], rest: NDArray[Any]) -> None:
            n, t = part.shape[:2]
            columns[start : start + n, :t] = part
            if t < self._steps:
                columns[start : start + n, t:] = rest

        # One thread copies 5 GB/s, and a GPU may consume 20.
        at_once = self._pin_memory and columns.nbytes >= _LARGE
        copied = (_copiers().map if at_once else map)(
            copy, self.starts, arrays[:count], arrays[count:]
        )
        deque(copied, maxlen=0)
        return tensor

    def indices(self, name: str, batches: Sequence[EpisodeBatch]) -> Tensor:
        """Join a column of indices -> [K] or [S], int64."""
        indices = [getattr(batch, name).astype(np.int64) for batch in batches]
        if name in _ROW_INDICES:
            indices = [rows + start for rows, start in zip(indices, self.starts, strict=True)]
        return self.joined(*indices)

    def joined(self, *arrays: NDArray[Any]) -> Tensor:
        """Concatenate B arrays [n, ...] -> [N, ...]."""
        length = sum(len(array) for array in arrays)
        tensor = self._empty((length, *arrays[0].shape[1:]), arrays[0].dtype)
        np.concatenate(arrays, out=tensor.numpy())
        return tensor

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        return torch.empty(shape, dtype=_in_torch(dtype), pin_memory=self._pin_memory)


@cache
def _copiers() -> ThreadPoolExecutor:
    """Return threads that copy large columns, alongside environments of this host."""
    return ThreadPoolExecutor(min(8, max(1, int(usable_cores() // 2))), "copying")


@cache
def _in_torch(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _check_alike(name: str, trees: Sequence[Tree], dimensions: int) -> None:
    """Raise ValueError if a column's arrays differ beyond leading dimensions."""
    if len(trees) == 1:
        return
    first = _kinds(trees[0], dimensions)
    for other in (_kinds(tree, dimensions) for tree in trees[1:]):
        for path in first.keys() | other.keys():
            one, another = first.get(path, "nothing"), other.get(path, "nothing")
            if one != another:
                where = path_name((name, *path))
                raise ValueError(
                    f"batches differ in their {where}: {one} and {another}; all EnvRunners must "
                    "run the same environment and the same module"
                )


def _kinds(tree: Tree, dimensions: int) -> dict[Path, str]:
    return {
        path: f"{array.dtype} of shape {array.shape[dimensions:]}" for path, array in flatten(tree)
    }


#: Columns with an entry for each row index. A sample has no episodes and versions.
_INDEXED = {
    c.FINAL_ROWS: c.FINALS[1:],
    c.SEGMENT_ROWS: (
        *c.SEGMENTS[1:],
        "segment_episodes",
        "segment_generations",
        "segment_updates",
    ),
}


def some_rows(columns: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """Select consecutive rows, with their truncations and segments, numbered from 0.

    Args:
        columns: arrays or tensors [N, ...], or [K] or [S] with row indices; counts [] belong to the
            first row.
        start: first row.
        end: the row after the last one.
    """
    found: dict[str, Any] = {}
    for own, names in _INDEXED.items():
        if own in columns:
            within = (columns[own] >= start) & (columns[own] < end)  # [K] or [S]
            found[own] = columns[own][within] - start
            for name in columns.keys() & set(names):
                found[name] = tree_map(lambda x, mask=within: x[mask], columns[name])
    for name in columns.keys() - found.keys():
        found[name] = tree_map(
            lambda x: x[start:end] if x.ndim else x * (start == 0), columns[name]
        )
    return found


def shard(
    episodes: Sequence[EpisodeBatch] | Mapping[str, Any], count: int
) -> list[list[EpisodeBatch]]:
    """Split batches into shards of consecutive rows.

    Each shard has a live step. Their numbers of live steps differ by less than two rows, unless a
    shard would otherwise be empty. Rows are views of the given arrays.

    Args:
        episodes: batches of a module, or columns as for `update_from_batch`.
        count: number of shards.

    Returns:
        For each shard, an argument for `update_from_episodes`.

    Raises:
        ValueError: there are fewer rows with a live step than shards.
    """
    if count < 1:
        raise ValueError(f"{count} shards: there must be at least 1")
    batches = [batch_of_columns(episodes)] if isinstance(episodes, Mapping) else episodes
    live_steps = [np.count_nonzero(batch.live, axis=1) for batch in batches]  # [N] each
    ends = _ends(np.concatenate([np.zeros(0, np.int64), *live_steps]), count)
    return [_between(batches, *each) for each in zip([0, *ends], ends, strict=False)]


def _ends(live_steps: NDArray[np.integer[Any]], count: int) -> list[int]:
    """Find ends of shards with about equal live steps, at least one.

    Args:
        live_steps: live steps of each row, [N].
        count: number of shards.
    """
    rows = np.flatnonzero(live_steps)  # [R] rows with a live step
    if len(rows) < count:
        raise ValueError(
            f"{len(rows)} rows with a live step cannot be split among {count} learners"
        )
    sums = np.cumsum(live_steps[rows])  # [R]
    places = np.arange(1, count)
    wanted = sums[-1] * places / count
    after = np.searchsorted(sums, wanted)  # the rows that reach these sums
    before = sums[after] - live_steps[rows[after]]
    nearest = after + (sums[after] - wanted < wanted - before)
    # Each shard has a row: later ends are larger, and leave enough rows.
    found = np.maximum.accumulate(np.maximum(nearest - places, 0))
    found = np.minimum(found, len(rows) - count) + places
    return [*rows[found].tolist(), len(live_steps)]


def _between(batches: Sequence[EpisodeBatch], start: int, end: int) -> list[EpisodeBatch]:
    """Select rows of several batches; row numbers count through all batches."""
    found, before = [], 0
    for batch in batches:
        first, last = max(start - before, 0), min(end - before, batch.rows)
        if first < last:
            part = some_rows(batch.to_tree(), first, last)
            found.append(batch if last - first == batch.rows else replace(batch, **part))
        before += batch.rows
    return found
