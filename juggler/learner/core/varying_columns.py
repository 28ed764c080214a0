"""Columns whose length changes from sample to sample: of segments, and of truncated episodes."""

from __future__ import annotations

from typing import Any, Final

import torch

from juggler.learner.core.learner_core import Columns
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map

#: The number of truncated episodes is rounded up to a multiple of this share of the sample's steps.
_SHARE: Final = 1 / 64


def with_recurring_shapes(columns: Columns) -> Columns:
    """The columns of a module without a state, with shapes that come again from sample to sample.

    Segments are left out, because only modules with a state read them. The number of truncated
    episodes is rounded up, which adds at most one observation for 64 steps of the sample. A sample
    without truncated episodes keeps none.
    """
    columns = without_segments(columns)
    if c.FINAL_ROWS not in columns:
        return columns
    n, t = columns[c.LIVE].shape
    multiple = max(1, int(n * t * _SHARE))
    return padded_truncations(columns, -(-len(columns[c.FINAL_ROWS]) // multiple) * multiple)


def without_segments(columns: Columns) -> Columns:
    return {name: column for name, column in columns.items() if name not in c.SEGMENTS}


def padded_truncations(columns: Columns, count: int) -> Columns:
    """Columns with `count` truncated episodes: the last one is repeated.

    A loss may read the value of a final observation, but must not have a gradient through it:
    repeated observations would count several times.

    Args:
        columns: with at most `count` truncated episodes.
        count: K.
    """
    missing = count - len(columns[c.FINAL_ROWS])
    if not missing:
        return columns
    finals = [name for name in c.FINALS if name in columns]
    last: dict[str, Any]
    if len(columns[c.FINAL_ROWS]):
        last = {name: tree_map(lambda x: x[-1:], columns[name]) for name in finals}  # [1, ...]
    else:
        # The same observation follows a row's last step anyway, unless that is truncated.
        steps = columns[c.LIVE].shape[1]
        last = {
            c.FINAL_ROWS: torch.zeros_like(columns[c.LIVE][:1, 0], dtype=torch.int64),  # [1]
            c.FINAL_STEPS: torch.full_like(columns[c.LIVE][:1, 0], steps - 1, dtype=torch.int64),
        }
        for _, after, final in (c.OBSERVED, c.OBSERVED_BY_CRITIC):
            if final in columns:
                last[final] = tree_map(lambda x: x[:1], columns[after])
    padded = {
        name: tree_map(
            lambda x, y: torch.cat([x, y.expand(missing, *y.shape[1:])]), columns[name], last[name]
        )
        for name in finals
    }  # [K, ...] each
    return {**columns, **padded}
