"""From batches of episodes to the columns that a learner trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules import columns as c


def collate(batches: Sequence[EpisodeBatch], *, pin_memory: bool = False) -> dict[str, Tensor]:
    """Several batches as one: N rows in all, T steps (the most that any has), K truncations.

    Every array is copied once, so that the batches' memory is free afterwards. Rows of fewer steps
    are filled up with steps that are not live, which see the row's last observation: the value of
    what comes after a row's last live step is then the one of the step to its right.

    Args:
        batches: of one module, in the order their rows shall have.
        pin_memory: the result lies in page-locked memory, from which copies to a GPU run beside
            the host. Torch gives such memory to nobody else while a copy is under way.

    Returns:
        By the names in `columns`: step columns [N, T, ...], last_observations [N, ...],
        final_observations [K, ...], final_rows [K] and final_steps [K] (both int64).

    Raises:
        ValueError: no batches, or they differ in the shape or dtype of observations or actions.
    """
    if not batches:
        raise ValueError("no batches: there is nothing to train on")
    first = batches[0]
    for batch in batches[1:]:
        _same("observations", first.observations, batch.observations)
        _same("actions", first.actions, batch.actions)
    rows = [batch.rows for batch in batches]
    steps = max(batch.steps for batch in batches)
    starts = np.cumsum([0, *rows])[:-1]
    step_columns: dict[str, list[tuple[NDArray[Any], Any]]] = {
        c.OBSERVATIONS: [(b.observations, b.last_observations[:, None]) for b in batches],
        # Any action that the space has will do; that of the step before is one.
        c.ACTIONS: [(b.actions, b.actions[:, -1:]) for b in batches],
        c.REWARDS: [(b.rewards, 0) for b in batches],
        c.TERMINATED: [(b.terminated, False) for b in batches],
        c.TRUNCATED: [(b.truncated, False) for b in batches],
        c.LIVE: [(b.live, False) for b in batches],
        c.ACTION_LOGP: [(b.action_logp, 0) for b in batches],
    }
    sample: dict[str, Tensor] = {}
    for name, parts in step_columns.items():
        like = parts[0][0]
        tensor = _empty((sum(rows), steps, *like.shape[2:]), like.dtype, pin_memory)
        array = tensor.numpy()  # [N, T, ...]
        for start, (part, rest) in zip(starts, parts, strict=True):
            n, t = part.shape[:2]
            array[start : start + n, :t] = part
            array[start : start + n, t:] = rest
        sample[name] = tensor
    joined = {
        c.LAST_OBSERVATIONS: [b.last_observations for b in batches],
        c.FINAL_OBSERVATIONS: [b.final_observations for b in batches],
        c.FINAL_ROWS: [b.final_rows + start for b, start in zip(batches, starts, strict=True)],
        c.FINAL_STEPS: [b.final_steps.astype(np.int64) for b in batches],
    }
    for name, arrays in joined.items():
        length = sum(len(array) for array in arrays)
        tensor = _empty((length, *arrays[0].shape[1:]), arrays[0].dtype, pin_memory)
        np.concatenate(arrays, out=tensor.numpy())
        sample[name] = tensor
    return sample


def _empty(shape: tuple[int, ...], dtype: np.dtype[np.generic], pin_memory: bool) -> Tensor:
    torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty(shape, dtype=torch_dtype, pin_memory=pin_memory)


def _same(name: str, one: NDArray[np.generic], other: NDArray[np.generic]) -> None:
    if one.shape[2:] != other.shape[2:] or one.dtype != other.dtype:
        raise ValueError(
            f"batches differ in their {name}: {one.dtype} of shape {one.shape[2:]} and "
            f"{other.dtype} of shape {other.shape[2:]}; all envrunners must run one environment"
        )
