"""A table of rows of episodes whose rows get room for more: what is made anew, and what stays."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.replays import table_of

from juggler.learner.data.collate import collate
from juggler.learner.data.replay import memory
from juggler.learner.data.replay.episode_rows import living_rows, resized, size_of
from juggler.learner.data.replay.table import EpisodeTable
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_leaves, tree_map

MakeBatch = Callable[..., EpisodeBatch]


def rows_of(make_batch: MakeBatch, seed: int, **keys: Any) -> dict[str, Any]:
    return living_rows(collate([make_batch(3, seed=seed, **keys)]))


def same(found: Any, rows: Any) -> None:
    alike = resized(rows, size_of(found), size_of(rows))
    tree_map(partial(torch.testing.assert_close, rtol=0, atol=0), found, alike)


@pytest.mark.parametrize("on_disk", [False, True])
def test_more_ends_in_a_row_make_only_columns_of_ends_anew_and_all_rows_stay_where_they_are(
    make_batch: MakeBatch, tmp_path: Path, on_disk: bool
) -> None:
    table = table_of(600, EpisodeTable, directory=str(tmp_path) if on_disk else "")
    first = rows_of(make_batch, 0, ends=0.0)
    slots = table.insert(first)
    drawn = table.generations[slots].copy()
    before = dict(table._columns.tree)
    more = rows_of(make_batch, 1, ends=0.9, reset_rows=False)
    assert size_of(more).finals > 1 < size_of(more).segments
    later = table.insert(more)
    same(table.rows(slots), first)
    same(table.rows(later), more)
    assert (table.generations[slots] == drawn).all(), "priorities of drawn rows still count"
    after = table._columns.tree
    anew = {name for name in after if after[name] is not before[name]}
    assert anew == {*c.FINALS[1:3], *c.SEGMENTS[1:]}


def test_columns_of_longer_rows_are_made_one_after_the_other(make_batch: MakeBatch) -> None:
    """A table on a device or on disk has all of its memory from the first row on."""
    tracemalloc.start()
    table = table_of(300_000, EpisodeTable)
    first = rows_of(make_batch, 0, steps=5, ends=0.5)
    table.insert(first)
    longer = rows_of(make_batch, 1, steps=10, ends=0.5)
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    table.insert(longer)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sizes = [each._data.nbytes for _, each in tree_leaves(table._columns.tree)]
    assert max(sizes) < 0.5 * sum(sizes), "so that this test says something"
    assert peak < max(before, held) + 1.1 * max(sizes)
    same(table.rows(table.oldest_first()[:3]), first)


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_a_table_that_lacks_memory_for_longer_rows_has_its_rows_or_none(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    table = table_of(9 * 3, EpisodeTable)
    first = rows_of(make_batch, 0, ends=0.0)
    slots = table.insert(first)
    made, calls = memory.Columns.__init__, count(1)

    def lacking(*given: Any) -> None:
        if next(calls) == failing:
            raise MemoryError
        made(*given)

    longer = rows_of(make_batch, 1, steps=9, ends=0.9, reset_rows=False)
    with monkeypatch.context() as patch:
        patch.setattr(memory.Columns, "__init__", lacking)
        with pytest.raises(MemoryError):
            table.insert(longer)
    assert (table.size, table.unused_rows) == ((3, 0) if failing == 1 else (0, 3))
    if table.size:
        same(table.rows(slots), first)
    same(table.rows(table.insert(longer)), longer)


@pytest.mark.parametrize(
    "rules", [{"priority_exponent": 0.6}, {"selector": "fifo", "max_times_sampled": 2}, {}]
)
def test_no_row_is_drawn_that_has_left_because_memory_lacked(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any]
) -> None:
    table = table_of(9 * 30, EpisodeTable, **rules)
    for seed in range(6):
        table.insert(rows_of(make_batch, seed, ends=0.0))
    made, calls = memory.Columns.__init__, count(1)

    def lacking(*given: Any) -> None:
        if next(calls) == 3:
            raise MemoryError
        made(*given)

    with monkeypatch.context() as patch:
        patch.setattr(memory.Columns, "__init__", lacking)
        with pytest.raises(MemoryError):
            table.insert(rows_of(make_batch, 7, steps=9, ends=0.9, reset_rows=False))
    assert table.size == 0
    assert not table.may_draw()
    table.insert(rows_of(make_batch, 8, ends=0.0))
    there = set(table.oldest_first().tolist())
    assert set(table.sample(6).slots.tolist()) <= there


@pytest.mark.parametrize("steps", [6, 9])
def test_rows_stay_if_there_is_no_room_on_disk_for_wider_ones(
    make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    table = table_of(6 * 3, EpisodeTable, directory=str(tmp_path))
    first = rows_of(make_batch, 0, ends=0.0)
    slots = table.insert(first)

    def full(*_: Any) -> Any:
        raise memory.no_room_on_disk(str(tmp_path), 1e9, "full")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "_on_disk", full)
        wider = rows_of(make_batch, 1, steps=steps, ends=0.9, reset_rows=False)
        with pytest.raises(ValueError, match="there is no room"):
            table.insert(wider)
    assert (table.size, table.unused_rows) == (3, 0)
    same(table.rows(slots), first)
    again = rows_of(make_batch, 2, ends=0.0)
    same(table.rows(table.insert(again)), again)
