"""Finds where episodes begin within the rows of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from juggler.runtime.connectors.connector import Columns
from juggler.runtime.modules import columns as c


def first_observations(columns: Columns) -> Tensor:
    """Which observations are the first of an episode that begins within its row -> [N, T] bool.

    A row's first step is never marked: if an episode begins there, the row's context says so.
    """
    live = columns[c.LIVE]  # [N, T]
    done = columns[c.TERMINATED] | columns[c.TRUNCATED]  # [N, T]
    # The step after an end begins the next episode, unless it only resets the environment.
    begins = (done[:, :-1] & live[:, 1:]) | ~live[:, :-1]  # [N, T - 1]
    return torch.cat([torch.zeros_like(live[:, :1]), begins], 1)  # [N, T]


def per_step(mask: Tensor, column: Tensor) -> Tensor:
    """A mask [N, T] with the number of dimensions of a column [N, T, ...]."""
    return mask.reshape(mask.shape + (1,) * (column.ndim - mask.ndim))
