"""Sources of samples: old rows mixed in, and a circular buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import MakeBatch
from torch import Tensor

from juggler.learner.data.collate import collate
from juggler.learner.data.replay.column_storage import bytes_of_step
from juggler.learner.data.replay.replay import MixInReplay
from juggler.learner.data.replay.table import (
    episodes_of_rows,
    resized,
    rows_of_episodes,
    size_of,
)
from juggler.learner.data.sources import NEW_STEPS, CircularBuffer, Columns, Queue
from juggler.runtime.wire.structures import tree_map


def make(**changes: Any) -> MixInReplay:
    return MixInReplay(Queue(), **{"share": 0.5, "capacity": 1000, **changes})


def numbered(make_batch: MakeBatch, number: int, rows: int, steps: int = 4) -> Columns:
    """Rows of an endless episode, with their numbers as rewards."""
    columns = _endless(make_batch, rows, steps)
    numbers = torch.arange(number, number + rows, dtype=torch.float32)
    return {**columns, "rewards": numbers.unsqueeze(1).expand(rows, steps).contiguous()}


@cache
def _endless(make_batch: MakeBatch, rows: int, steps: int) -> Columns:
    return collate([make_batch(rows, steps, ends=0.0)])


def given(source: MixInReplay, columns: Columns) -> list[int]:
    """The numbers of the rows that are learned from when these arrive."""
    (sample,) = source.add(columns)
    return [int(x) for x in sample["rewards"][:, 0]]


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    tree_map(
        lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True), one, other
    )


def test_rows_of_several_sizes_are_joined_as_batches_are(make_batch: MakeBatch) -> None:
    batches = [make_batch(3, 9, seed=1), make_batch(2, 5, seed=2), make_batch(4, 7, ends=0.0)]
    rows = [rows_of_episodes(collate([batch])) for batch in batches]
    size = size_of(rows[0]).covering(size_of(rows[1])).covering(size_of(rows[2]))
    same(
        episodes_of_rows(
            tree_map(
                lambda *xs: torch.cat(xs), *(resized(each, size, size_of(each)) for each in rows)
            )
        ),
        collate(batches),
    )


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
def test_old_steps_are_the_given_share_in_the_long_run(make_batch: MakeBatch, share: float) -> None:
    source, rng = make(share=share), np.random.default_rng(0)
    new = old = arrived = 0
    for update in range(200):
        count = int(rng.integers(1, 6))
        numbers = given(source, numbered(make_batch, arrived, count))
        assert numbers[:count] == list(range(arrived, arrived + count)), "new ones, each once"
        assert all(number < arrived for number in numbers[count:])
        assert len(set(numbers)) == len(numbers)
        arrived += count
        if update >= 10:  # from then on there are enough
            new, old = new + count, old + len(numbers) - count
    assert old / (new + old) == pytest.approx(share, abs=0.005)


def test_nothing_old_is_beside_the_first_sample_and_no_more_beside_later_ones_for_that(
    make_batch: MakeBatch,
) -> None:
    source = make(share=0.75)
    numbers = [given(source, numbered(make_batch, 2 * k, 2)) for k in range(6)]
    assert [len(each) - 2 for each in numbers] == [0, 2, 4, 6, 6, 6]


def test_rows_without_a_live_step_are_not_kept_and_bring_nothing_old(make_batch: MakeBatch) -> None:
    source = make(share=0.75)
    given(source, numbered(make_batch, 1, 5))
    silent = collate([make_batch(3, 4, ends=0.0).silenced()])
    assert len(given(source, silent)) == 3
    assert source.table.size == 5
    assert source.metrics() == {"replayed_steps": 0.0, "replay_age": 0.0}


def test_metrics_say_how_much_was_old_and_how_old(make_batch: MakeBatch) -> None:
    source = make()
    for k in range(9):
        new, *old = given(source, numbered(make_batch, k, 1))
        age = float(sum(new - each for each in old))
        assert source.metrics() == {"replayed_steps": 4.0 * len(old), "replay_age": age}


def test_new_steps_are_those_of_all_learners_without_the_old_ones(make_batch: MakeBatch) -> None:
    def sums(x: Tensor) -> Tensor:
        return 3 * x

    source = make()
    for _ in range(3):
        (sample,) = source.add(numbered(make_batch, 0, 5), sums)
        assert sample[NEW_STEPS] == 3 * 5 * 4
    assert sample["live"].sum() == 2 * 5 * 4


def test_a_cleared_source_does_as_one_that_goes_on_from_its_state_and_draws_other_rows(
    make_batch: MakeBatch,
) -> None:
    one, other = make(seed=3), make(seed=4)
    seen = []
    for _ in range(3):
        other.restore(one.state(), torch.device("cpu"))
        one.clear()
        other.clear()
        seen.append([])
        for k in range(20, 40):
            columns = numbered(make_batch, k, 3)
            seen[-1].append(tuple(given(one, columns)))
            assert seen[-1][-1] == tuple(given(other, columns))
    assert len(set(map(tuple, seen))) == 3, "each time other rows"


def test_samples_of_members_of_a_population_are_refused(make_batch: MakeBatch) -> None:
    columns = tree_map(lambda x: torch.stack([x, x]), numbered(make_batch, 0, 2))
    with pytest.raises(ValueError, match="replay_share: old rows cannot be"):
        next(make().add(columns))


def test_a_saved_table_goes_on_as_it_was(make_batch: MakeBatch) -> None:
    one, other = (make(capacity=60, share=0.7, saved=True, seed=seed) for seed in (3, 4))
    for k in range(9):
        given(one, numbered(make_batch, 10 * k, 3, steps=4 + k % 3))
    other.restore(one.state(), torch.device("cpu"))
    one.clear()  # what is saved stays
    for k in range(9, 30):
        columns = numbered(make_batch, 10 * k, 3, steps=4 + k % 4)
        assert given(one, columns) == given(other, columns)
        assert one.metrics() == other.metrics()


def test_a_source_stays_as_it_is_when_it_refuses_a_state(make_batch: MakeBatch) -> None:
    one, same, larger = (make(capacity=rows, saved=True) for rows in (20, 20, 40))
    for k in range(12):
        for source in (one, same, larger):
            given(source, numbered(make_batch, k, 1))
    broken = same.state()
    broken["modules"]["default"].pop("steps")
    cut = {key: value for key, value in same.state().items() if key != "generator"}
    for state in (larger.state(), broken, cut):
        with pytest.raises(ValueError, match="the checkpoint"):
            one.restore(state, torch.device("cpu"))
    for k in range(12, 20):
        columns = numbered(make_batch, k, 1)
        assert given(one, columns) == given(same, columns)
        assert one.metrics() == same.metrics()


def test_memory_and_disk_limit_old_rows_as_those_of_any_replay(
    make_batch: MakeBatch, tmp_path: Path
) -> None:
    columns = numbered(make_batch, 0, 5)
    rows = rows_of_episodes(columns)
    each = bytes_of_step(rows)
    limited = make(memory=8 * each / 1e9)
    given(limited, columns)
    assert limited.table.size == 2, "two rows of four steps"
    assert limited.expect(columns) == 8 * each
    with pytest.raises(ValueError, match=r"replay_memory = .*: 3 steps of"):
        make(memory=3 * each / 1e9).expect(columns)
    with pytest.raises(ValueError, match="replay_capacity = 1000000000000"):
        make(capacity=10**12).expect(columns)
    with pytest.raises(ValueError, match=r"replay_directory = .*there is no room for"):
        make(capacity=10**12, directory=str(tmp_path)).expect(columns)
    with pytest.raises(ValueError, match="No such file or directory; name"):
        make(directory=str(tmp_path / "nowhere")).expect(columns)
    one, other = make(directory=str(tmp_path)), make()
    assert one.expect(columns) == 0
    for k in range(9):
        columns = numbered(make_batch, 10 * k, 3, steps=4 + k % 3)
        assert given(one, columns) == given(other, columns)
    assert list(tmp_path.iterdir()) == []


# The circular buffer uses each of the newest N samples K times.


def sample(number: int) -> Columns:
    return {"number": number}


def numbers(samples: Sequence[Columns]) -> list[int]:
    return [each["number"] for each in samples]


@pytest.mark.parametrize(
    ("batches", "uses"), [(1, 1), (4, 2), (8, 2), (5, 3), (3, 3), (2, 5), (1, 3)]
)
def test_each_sample_is_used_k_times_while_it_is_one_of_the_newest_n(
    batches: int, uses: int
) -> None:
    buffer = CircularBuffer(batches, uses)
    ages: dict[int, list[int]] = {}
    for number in range(50):
        for due in numbers(buffer.add(sample(number))):
            ages.setdefault(due, []).append(number - due)
    done = {number: each for number, each in ages.items() if number <= 50 - batches}
    assert len(done) == 51 - batches
    for each in done.values():
        assert each == [use * batches // uses for use in range(uses)]
        assert max(each) < batches


def test_what_is_forgotten_is_not_used_again() -> None:
    buffer = CircularBuffer(4, 2)
    uses = Counter(number for each in range(3) for number in numbers(buffer.add(sample(each))))
    buffer.clear()
    for each in range(10, 20):
        uses.update(numbers(buffer.add(sample(each))))
    assert [uses[number] for number in range(3)] == [2, 1, 1]
    assert uses[10] == 2
