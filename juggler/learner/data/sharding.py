"""Splits batches of episodes into shards, one per learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.episodes.batch import EpisodeBatch, batch_of_columns
from juggler.runtime.wire.structures import tree_map

_FINALS = ("final_observations", "final_critic_observations", "final_steps")
_SEGMENTS = (
    "segment_episodes",
    "segment_starts",
    "segment_lengths",
    "segment_offsets",
    "segment_generations",
    "segment_updates",
)


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
            found.append(batch if last - first == batch.rows else _rows(batch, first, last))
        before += batch.rows
    return found


def _rows(batch: EpisodeBatch, start: int, end: int) -> EpisodeBatch:
    """Select rows of a batch, as a batch."""
    columns: dict[str, Any] = {}
    for rows_name, names in (("final_rows", _FINALS), ("segment_rows", _SEGMENTS)):
        rows = getattr(batch, rows_name)  # [K] or [S]
        within = (rows >= start) & (rows < end)  # [K] or [S]
        columns[rows_name] = rows[within] - rows.dtype.type(start)
        for name in names:
            columns[name] = tree_map(lambda x, mask=within: x[mask], getattr(batch, name))
    by_row = batch.to_tree().keys() - columns.keys()
    for name in by_row:
        columns[name] = tree_map(lambda x: x[start:end], getattr(batch, name))
    return replace(batch, **columns)
