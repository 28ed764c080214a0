"""Columns whose length changes from sample to sample: of segments, and of truncated episodes."""

from __future__ import annotations

from typing import Any, Final

import torch

from juggler.learner.core.learner_core import Columns
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map

#: The number of truncated episodes is rounded up to a multiple of the sample's steps over this.
_PARTS: Final = 64


def with_recurring_shapes(columns: Columns) -> Columns:
    """A module's columns, for a module without a state, with shapes that come again and again.

    Only modules with a state read segments. Numbers of truncated episodes are rounded up, which
    takes at most a 64th more observations than the sample has steps. Without any truncated episode,
    there are none afterwards.
    """
    columns = without_segments(columns)
    if c.FINAL_ROWS not in columns:
        return columns
    n, t = columns[c.LIVE].shape
    multiple = max(1, n * t // _PARTS)
    return padded_truncations(columns, -(-len(columns[c.FINAL_ROWS]) // multiple) * multiple)


def without_segments(columns: Columns) -> Columns:
    return {name: column for name, column in columns.items() if name not in c.SEGMENTS}


def padded_truncations(columns: Columns, count: int) -> Columns:
    """A module's columns with this number of truncated episodes, the last of which is repeated.

    A loss may read what follows the step of each one, but have no gradient through that.
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
    repeated = {
        name: tree_map(lambda x, y: torch.cat([x, *[y] * missing]), columns[name], last[name])
        for name in finals
    }  # [count, ...] each
    return {**columns, **repeated}
