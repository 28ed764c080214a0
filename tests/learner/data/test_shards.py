"""Episodes in shards: what each of them gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from juggler.learner.data.collate import collate
from juggler.learner.data.sharding import shard
from juggler.runtime.episodes.batch import EpisodeBatch

MakeBatch = Callable[..., EpisodeBatch]


def rows_of(batches: list[EpisodeBatch]) -> list[tuple[bytes, ...]]:
    """All that is known of each row, whichever batch it is in."""
    found = []
    for batch in batches:
        for row in range(batch.rows):
            own = [
                getattr(batch, name)[row].tobytes()
                for name in ("observations", "actions", "rewards", "live", "last_observations")
            ]
            finals = batch.final_rows == row
            segments = batch.segment_rows == row
            own += [batch.final_steps[finals].tobytes(), batch.final_observations[finals].tobytes()]
            own += [
                getattr(batch, f"segment_{name}")[segments].tobytes()
                for name in ("starts", "lengths", "offsets")
            ]
            found.append(tuple(own))
    return found


@settings(max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7)), min_size=1, max_size=4),
    dead=st.lists(st.integers(0, 20), max_size=12),
    count=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_shards_are_all_rows_in_order_never_empty_and_about_equal(
    make_batch: MakeBatch, sizes: list[tuple[int, int]], dead: list[int], count: int, seed: int
) -> None:
    batches, before = [], 0
    for place, (rows, steps) in enumerate(sizes):
        changes: dict[str, Any] = {}
        gone = [row - before for row in dead if before <= row < before + rows]
        whole = make_batch(rows, steps, seed=seed + place)
        if gone:
            live, nothing = whole.live.copy(), np.zeros((rows, steps), bool)
            live[gone] = False
            changes = {"live": live, "terminated": nothing, "truncated": nothing}
        batches.append(make_batch(rows, steps, seed=seed + place, **changes))
        before += rows
    per_row = np.concatenate([batch.live.sum(1) for batch in batches])
    if np.count_nonzero(per_row) < count:
        with pytest.raises(ValueError, match=f"rows .* among {count} learners"):
            shard(batches, count)
        return
    shards = list(shard(batches, count))
    assert len(shards) == count
    assert [row for each in shards for row in rows_of(each)] == rows_of(batches)
    for each in shards:
        for batch in each:
            EpisodeBatch.from_tree(batch.to_tree())  # indices are those of its own rows
    live_steps = [sum(batch.live_steps for batch in each) for each in shards]
    assert min(live_steps) > 0
    if (per_row > 0).all() and len(set(per_row)) == 1:
        assert max(live_steps) - min(live_steps) < 2 * per_row.max()


def test_more_shards_than_rows_are_refused(make_batch: MakeBatch) -> None:
    batches = [make_batch(2, 4), make_batch(2, 6)]
    assert [sum(batch.rows for batch in each) for each in shard(batches, 2)] in (
        [2, 2],
        [1, 3],
        [3, 1],
    )
    with pytest.raises(ValueError, match=r"4 rows .* 5 learners"):
        shard(batches, 5)
    with pytest.raises(ValueError, match="0 shards"):
        shard(batches, 0)


def test_rows_of_unequal_live_steps_are_balanced(make_batch: MakeBatch) -> None:
    live = np.zeros((9, 8), bool)
    for row, steps in enumerate([8, 1, 1, 1, 1, 1, 1, 1, 8]):
        live[row, :steps] = True
    nothing = np.zeros_like(live)
    batch = make_batch(9, 8, live=live, terminated=nothing, truncated=nothing)
    shards = shard([batch], 3)
    assert [collate(each)["live"].sum().item() for each in shards] == [8, 7, 8]
