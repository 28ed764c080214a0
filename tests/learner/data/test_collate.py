"""Several batches of episodes as one sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch

MakeBatch = Callable[..., EpisodeBatch]


def test_rows_of_all_batches_follow_each_other(make_batch: MakeBatch) -> None:
    batches = [make_batch(rows, 5, seed=rows) for rows in (2, 1, 3)]
    sample = collate(batches)
    for name in ("observations", "actions", "rewards", "terminated", "live", "action_logp"):
        expected = np.concatenate([getattr(batch, name) for batch in batches])
        np.testing.assert_array_equal(sample[name], expected)
        assert sample[name].numpy().dtype == expected.dtype
    last = np.concatenate([batch.last_observations for batch in batches])
    np.testing.assert_array_equal(sample["last_observations"], last)


def test_final_observations_stay_with_their_rows(make_batch: MakeBatch) -> None:
    batches = [make_batch(rows, 8, seed=rows, ends=0.6) for rows in (3, 4, 5)]
    sample = collate(batches)
    rows, steps = sample["final_rows"], sample["final_steps"]
    assert rows.dtype == steps.dtype == torch.int64
    assert len(rows) == sample["truncated"].sum() > 3
    assert sample["truncated"][rows, steps].all()
    expected = {}
    start = 0
    for batch in batches:
        for row, step, final in zip(
            batch.final_rows, batch.final_steps, batch.final_observations, strict=True
        ):
            expected[start + int(row), int(step)] = final
        start += batch.rows
    for row, step, final in zip(rows, steps, sample["final_observations"], strict=True):
        np.testing.assert_array_equal(final, expected[int(row), int(step)])


def test_a_sample_does_not_share_memory_with_its_batches(make_batch: MakeBatch) -> None:
    batch = make_batch()
    sample = collate([batch])
    batch.observations[:] = 7
    batch.rewards[:] = 7
    assert not (sample["observations"] == 7).any()
    assert not (sample["rewards"] == 7).any()


def test_shorter_rows_are_filled_up_with_steps_that_are_not_live(make_batch: MakeBatch) -> None:
    long, short = make_batch(2, 6, seed=1), make_batch(3, 4, seed=2)
    sample = collate([long, short])
    assert sample["rewards"].shape == (5, 6)
    np.testing.assert_array_equal(sample["live"][:2], long.live)
    np.testing.assert_array_equal(sample["live"][2:, :4], short.live)
    for name in ("live", "terminated", "truncated", "rewards", "action_logp"):
        assert not sample[name][2:, 4:].any()
    # A row's last live step finds the value of what came after it where a longer row has it too.
    for step in (4, 5):
        np.testing.assert_array_equal(sample["observations"][2:, step], short.last_observations)
        np.testing.assert_array_equal(sample["actions"][2:, step], short.actions[:, -1])


def test_batches_of_different_environments_are_refused(make_batch: MakeBatch) -> None:
    with pytest.raises(ValueError, match=r"'observations': float32 of shape \(4,\) and float32 of"):
        collate([make_batch(), make_batch(observation_size=5)])
    floats = make_batch(seed=1)
    other = make_batch(actions=floats.actions.astype(np.float32))
    with pytest.raises(ValueError, match="differ in their 'actions'"):
        collate([floats, other])
    remembering = make_batch(states={"module": {"h": np.zeros((3, 2), np.float32)}})
    with pytest.raises(ValueError, match=r"'states/module/h': .*nothing"):
        collate([floats, remembering])


def test_segments_stay_with_their_rows(make_batch: MakeBatch) -> None:
    batches = [make_batch(rows, steps, seed=rows) for rows, steps in ((3, 8), (2, 5), (4, 8))]
    sample = collate(batches)
    names = ("rows", "starts", "lengths", "offsets")
    found = torch.stack([sample[f"segment_{name}"] for name in names], 1)  # [S, 4]
    assert found.dtype == torch.int64
    expected, first_row = [], 0
    for batch in batches:
        each = np.stack([getattr(batch, f"segment_{name}") for name in names], 1)
        expected += [[row + first_row, *rest] for row, *rest in each.tolist()]
        first_row += batch.rows
    assert found.tolist() == expected
    covered = torch.zeros_like(sample["live"], dtype=torch.int64)
    for row, start, length, _ in found.tolist():
        covered[row, start : start + length] += 1
    assert (covered == sample["live"]).all()


def test_trees_are_collated_array_by_array(make_batch: MakeBatch) -> None:
    def as_trees(batch: EpisodeBatch) -> EpisodeBatch:
        return replace(
            batch,
            **{
                name: {"x": getattr(batch, name)[..., 0], "y": {"0": getattr(batch, name)}}
                for name in ("observations", "last_observations", "final_observations")
            },
            actions={"0": batch.actions, "1": np.stack([batch.actions] * 3, -1)},
        )

    batches = [make_batch(rows, steps, seed=rows) for rows, steps in ((2, 6), (3, 4))]
    plain = collate(batches)
    found = collate([as_trees(batch) for batch in batches])
    for name in ("observations", "last_observations", "final_observations"):
        assert torch.equal(found[name]["x"], plain[name][..., 0])
        assert torch.equal(found[name]["y"]["0"], plain[name])
    assert torch.equal(found["actions"]["0"], plain["actions"])
    assert torch.equal(found["actions"]["1"], plain["actions"][..., None].expand(5, 6, 3))


def test_states_of_all_rows_follow_each_other(make_batch: MakeBatch) -> None:
    assert collate([make_batch(), make_batch(seed=1)])["states"] == {}
    states = [
        {"module": {"h": np.full((rows, 2), rows, np.float32)}, "connectors": {}} for rows in (3, 2)
    ]
    batches = [make_batch(3, states=states[0]), make_batch(2, states=states[1])]
    found = collate(batches)["states"]
    assert found["module"]["h"].tolist() == [[3, 3]] * 3 + [[2, 2]] * 2
    assert found["connectors"] == {}


def test_no_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train on"):
        collate([])
