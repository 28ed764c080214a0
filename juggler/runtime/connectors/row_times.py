"""Time within rows: beginnings of episodes, and sums over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from juggler.runtime.connectors.connector import Columns
from juggler.runtime.modules import columns as c


def first_observations(columns: Columns) -> Tensor:
    """Return a mask [N, T] of episodes' first observations in a row.

    A row's first step is never marked: if an episode begins there, the row's context shows it.
    """
    live = columns[c.LIVE]  # [N, T]
    done = columns[c.TERMINATED] | columns[c.TRUNCATED]  # [N, T]
    # The step after an end begins the next episode, unless it only resets the environment.
    begins = (done[:, :-1] & live[:, 1:]) | ~live[:, :-1]  # [N, T - 1]
    return torch.cat([torch.zeros_like(live[:, :1]), begins], 1)  # [N, T]


def following(columns: Mapping[str, Any]) -> Tensor:
    """Index observations after each step, int64 [N, T].

    They count observations before each step, row by row, then last ones, then final ones.
    A terminal observation is missing in batches; its index is then arbitrary.
    """
    live = columns[c.LIVE]  # [N, T]
    rows, steps = live.shape
    inside = torch.arange(rows * steps, device=live.device).view(rows, steps)  # [N, T]
    behind = rows * steps + torch.arange(rows, device=live.device)  # [N]
    after = torch.cat([inside[:, 1:], behind.unsqueeze(1)], 1)  # [N, T]
    finals = rows * steps + rows + torch.arange(len(columns[c.FINAL_ROWS]), device=live.device)
    return after.index_put((columns[c.FINAL_ROWS], columns[c.FINAL_STEPS]), finals)


def per_step(mask: Tensor, column: Tensor) -> Tensor:
    """Expand a mask [N, T] to the dimensions of [N, T, ...]."""
    return mask.reshape(mask.shape + (1,) * (column.ndim - mask.ndim))


def linear_recurrence(a: Tensor, b: Tensor, x_last: Tensor) -> Tensor:
    """Solve x_t = b_t + a_t x_{t+1} backwards from `x_last`.

    One step of the recurrence is the map x -> b + a x. The composition of two of these maps has the
    same form. Composing each map with the one 1, 2, 4, … places after it covers the rest of the row
    after log2 T rounds.

    Args:
        a: [..., T]
        b: [..., T]
        x_last: [...]

    Returns:
        x: [..., T]
    """
    length = a.shape[-1]
    b = torch.cat([b[..., :-1], (b[..., -1] + a[..., -1] * x_last).unsqueeze(-1)], -1)  # [..., T]
    reach, a = 1, a[..., :-1]
    while reach < length:
        # Maps within `reach` of the end already cover the rest of the row, and need no partner:
        # a is [..., T - reach].
        b = torch.cat([b[..., :-reach] + a * b[..., reach:], b[..., -reach:]], -1)  # [..., T]
        a = a[..., :-reach] * a[..., reach:]  # [..., T - 2 reach]
        reach *= 2
    return b
