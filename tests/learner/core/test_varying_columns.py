"""Where a loss is recorded, columns of any length have the same shapes, and the same gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.cores import MakeBatch, make_core

from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.core.varying_columns import padded_truncations, with_recurring_shapes
from juggler.learner.data.collate import collate
from juggler.runtime.modules import columns as c
from juggler.runtime.recorder import Recordings

ROWS, STEPS = 32, 32


def sample_of(make_batch: MakeBatch, seed: int, ends: float = 0.02) -> Any:
    state = {"hidden": torch.ones(ROWS, 8)}  # [N, 8]
    batch = make_batch(ROWS, STEPS, seed=seed, ends=ends)
    return {**collate([batch]), "states": {"module": state}}


def truncated_episodes(sample: Any) -> int:
    return len(sample[c.FINAL_ROWS])


def test_numbers_of_truncated_episodes_come_again_and_take_little_room(
    make_batch: MakeBatch,
) -> None:
    before, after = set(), set()
    for seed in range(20):
        sample = sample_of(make_batch, seed)
        before.add(truncated_episodes(sample))
        columns = with_recurring_shapes(sample)
        count = len(columns[c.FINAL_ROWS])
        after.add(count)
        assert 0 <= count - truncated_episodes(sample) < ROWS * STEPS / 64
        assert {len(columns[name]) for name in c.FINALS if name in columns} == {count}
        assert not columns.keys() & set(c.SEGMENTS)
        assert sample.keys() >= set(c.SEGMENTS), "a sample stays as it is"
    assert len(before) > 4 * len(after)


def test_a_sample_without_truncated_episodes_has_none_afterwards(make_batch: MakeBatch) -> None:
    sample = sample_of(make_batch, seed=1, ends=0.0)
    assert len(with_recurring_shapes(sample)[c.FINAL_ROWS]) == 0


def test_a_repeated_episode_is_the_last_one_or_what_follows_a_row(make_batch: MakeBatch) -> None:
    for ends in (0.0, 0.02):
        columns = sample_of(make_batch, seed=2, ends=ends)
        padded = padded_truncations(columns, 100)
        row, step = (int(padded[name][-1]) for name in (c.FINAL_ROWS, c.FINAL_STEPS))
        if ends:
            assert (row, step) == (int(columns[c.FINAL_ROWS][-1]), int(columns[c.FINAL_STEPS][-1]))
            expected = columns[c.FINAL_OBSERVATIONS][-1]
        else:
            assert (row, step) == (0, STEPS - 1)
            expected = columns[c.LAST_OBSERVATIONS][0]
        assert torch.equal(padded[c.FINAL_OBSERVATIONS][-1], expected)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_are_the_same_up_to_rounding(make_batch: MakeBatch, name: str) -> None:
    core = make_core(name)
    state, sample = core.init(seed=1), sample_of(make_batch, seed=3)
    assert truncated_episodes(sample) % (ROWS * STEPS // 64), "it is rounded up"
    found = []
    for recordings in (None, Recordings(1, math.inf)):
        core._recordings = recordings
        grads, _ = core.grads(state, sample)
        found.append(grads)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["impala", "appo"])
def test_one_recording_serves_samples_with_many_numbers_of_truncated_episodes(
    make_batch: MakeBatch, name: str
) -> None:
    core = make_core(name)
    core._recordings = Recordings(1, math.inf)
    state = core.init(seed=1)
    samples = [sample_of(make_batch, seed) for seed in range(20)]
    for sample in samples:
        core.grads(state, sample)
    assert len(set(map(truncated_episodes, samples))) > 4 * len(core._recordings._calls)
