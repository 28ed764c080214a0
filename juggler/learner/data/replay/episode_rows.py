"""Converts rows of sampled episodes to equal-sized table rows, and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from juggler.learner.data.sources import Columns
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map

#: Columns with an entry for each truncated episode or each segment. In a table they have W places
#: in each row, filled from the first. The column of counts [N] has the number of filled places.
_ENTRIES: Final = {
    c.FINAL_ROWS: ("final_counts", c.FINALS[1:]),
    c.SEGMENT_ROWS: ("segment_counts", c.SEGMENTS[1:]),
}
#: Columns [N, ...] of a table, without a dimension of steps.
WITHOUT_STEPS: Final = frozenset(
    {c.LAST_OBSERVATIONS, c.LAST_CRITIC_OBSERVATIONS, c.STATES}
    | {counts for counts, _ in _ENTRIES.values()}
)
#: Observations of added steps: the row's last observations.
LAST: Final = {
    c.OBSERVATIONS: c.LAST_OBSERVATIONS,
    c.CRITIC_OBSERVATIONS: c.LAST_CRITIC_OBSERVATIONS,
}


class Size(NamedTuple):
    """Capacity of a table's rows."""

    steps: int
    finals: int  # truncated episodes
    segments: int

    def covering(self, other: Size) -> Size:
        """Return the smallest size that has room for both."""
        return Size(*map(max, self, other))


def rows_of_episodes(columns: Columns) -> dict[str, Any]:
    """Convert a sample's N rows to table rows, trees [N, ...].

    The host waits for the device, as the maximum number of entries is a dimension of tensors.

    Args:
        columns: as `collate` makes them.
    """
    count = len(columns[c.LIVE])
    entries = {name for at, (_, names) in _ENTRIES.items() for name in (at, *names)}
    rows = {name: column for name, column in columns.items() if name not in entries}
    for at, (counts_name, names) in _ENTRIES.items():
        index = columns[at]  # [K]
        order = index.argsort(stable=True)  # [K] by row
        at_row = index[order]  # [K]
        counts = torch.bincount(index, minlength=count)  # [N]
        firsts = counts.cumsum(0) - counts  # [N]
        places = torch.arange(len(index), device=index.device) - firsts[at_row]  # [K]
        spread = partial(_spread, order, (at_row, places), (count, int(counts.max())))
        rows[counts_name] = counts  # [N]
        rows.update({name: tree_map(spread, columns[name]) for name in names if name in columns})
    return rows


def living_rows(columns: Columns) -> dict[str, Any]:
    """Convert rows with live steps as `rows_of_episodes` does; {}: none."""
    rows = rows_of_episodes(columns)
    living = rows[c.LIVE].any(1).nonzero().squeeze(1)  # [n]
    return tree_map(lambda x: x[living], rows) if len(living) else {}


def episodes_of_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `rows_of_episodes`; entries are in the order of their rows."""
    counted = {counts for counts, _ in _ENTRIES.values()}
    columns = {name: column for name, column in rows.items() if name not in counted}
    for at, (counts_name, names) in _ENTRIES.items():
        counts = rows[counts_name]  # [N]
        width = rows[names[0]].shape[1]  # W
        places = torch.arange(width, device=counts.device)  # [W]
        index = (places < counts.unsqueeze(1)).nonzero(as_tuple=True)  # [K] each
        columns[at] = index[0]
        for name in names:
            if name in rows:
                columns[name] = tree_map(lambda x, i=index: x[i], rows[name])  # [K, ...]
    return columns


def size_of(rows: Mapping[str, Any]) -> Size:
    """Return the capacity of a table's rows."""
    finals, segments = rows[c.FINAL_STEPS], rows[c.SEGMENT_STARTS]  # [N, F], [N, S]
    return Size(rows[c.LIVE].shape[1], finals.shape[1], segments.shape[1])


def resized(rows: Mapping[str, Any], size: Size, before: Size) -> dict[str, Any]:
    """Enlarge rows.

    Added steps are padding as in `collate`: not live, with the row's last observation and action.

    Args:
        rows: all columns, or some of them with the columns in `LAST`.
        size: the new capacity.
        before: the old capacity.
    """
    if before == size:
        return dict(rows)
    fills = {name: rows.get(last) for name, last in LAST.items()}
    fills[c.ACTIONS] = tree_map(lambda x: x[:, -1], rows.get(c.ACTIONS, {}))  # [N, ...]
    steps, finals, segments = (new - old for new, old in zip(size, before, strict=True))
    found: dict[str, Any] = {}
    for name, column in rows.items():
        if name in WITHOUT_STEPS:
            found[name] = column
            continue
        more = finals if name in c.FINALS else segments if name in c.SEGMENTS else steps
        fill = fills.get(name)
        if fill is None:
            fill = tree_map(lambda x: x.new_zeros((len(x), *x.shape[2:])), column)  # [N, ...]
        found[name] = tree_map(lambda x, y, n=more: _padded(x, n, y), column, fill)
    return found


def _spread(
    order: Tensor, places: tuple[Tensor, Tensor], shape: tuple[int, int], x: Tensor
) -> Tensor:
    """Scatter entries x [K, ...] into zeros [N, W, ...]."""
    return x.new_zeros(shape + x.shape[1:]).index_put_(places, x[order])  # [N, W, ...]


def _padded(x: Tensor, count: int, fill: Tensor) -> Tensor:
    """Append `count` entries `fill` to each row of x [N, W, ...]."""
    if not count:
        return x
    more = fill.unsqueeze(1).expand(len(x), count, *x.shape[2:])  # [N, count, ...]
    return torch.cat([x, more], 1)  # [N, W + count, ...]
