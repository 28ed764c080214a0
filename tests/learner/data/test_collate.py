"""Several batches of episodes as one sample."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import TWO, VECTOR, MakeBatch, World, refused

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.data.collate import _copiers, collate, shard, some_rows
from juggler.runtime.actors import resources
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.trees import flatten


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
    with pytest.raises(ValueError, match="'observations': float32 of shape"):
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


def test_a_count_of_a_sample_goes_to_its_first_rows_alone() -> None:
    columns = {"live": torch.ones(4, 2), "new_steps": torch.full((), 6)}
    parts = [some_rows(columns, start, start + 2) for start in (0, 2)]
    assert [int(part["new_steps"]) for part in parts] == [6, 0]


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


# Episodes in shards: what each of them gets.


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


def test_no_shards_at_all_are_refused(make_batch: MakeBatch) -> None:
    with pytest.raises(ValueError, match="0 shards"):
        shard([make_batch(2, 4)], 0)


def test_rows_of_unequal_live_steps_are_balanced(make_batch: MakeBatch) -> None:
    live = np.zeros((9, 8), bool)
    for row, steps in enumerate([8, 1, 1, 1, 1, 1, 1, 1, 8]):
        live[row, :steps] = True
    nothing = np.zeros_like(live)
    batch = make_batch(9, 8, live=live, terminated=nothing, truncated=nothing)
    shards = shard([batch], 3)
    assert [collate(each)["live"].sum().item() for each in shards] == [8, 7, 8]


# What a learner expects to be remembered at the start of each row.


def test_what_modules_and_connectors_remember_has_branches_of_its_own() -> None:
    model = {"recurrent": "gru", "recurrent_size": 5}
    pieces = [{"use": "frame_stack", "k": 3}, "previous_actions_and_rewards"]
    connectors = {"env_to_module": pieces}
    learner = build_learner(ImpalaConfig(), None, VECTOR, TWO, model, connectors=connectors)
    states: Any = learner.example_states()
    assert states.keys() == {"module", "connectors"}
    assert all(array.shape == (5,) for array in states["module"].values())
    contexts = states["connectors"]
    assert contexts["frame_stack"].shape == (2, 4)
    previous = contexts["previous_actions_and_rewards"]
    assert previous["previous_action"].shape == previous["previous_reward"].shape == ()
    assert previous["previous_action"].dtype == np.int64


# What peers send takes a share of the memory that a container may have, not of its host's.


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a container says what it may have: nothing yet."""
    place = tmp_path / "cgroup"
    place.mkdir()
    monkeypatch.setattr(resources, "_CGROUP", place)
    _copiers.cache_clear()
    yield place
    _copiers.cache_clear()


def test_the_smallest_limit_is_what_a_process_may_have(container: Path) -> None:
    of_host = resources.total_memory()
    assert of_host > 1 << 30
    (container / "memory.max").write_text("max\n")
    assert resources.total_memory() == of_host
    (container / "memory.max").write_text(f"{3 << 20}\n")
    assert resources.total_memory() == 3 << 20
    (container / "memory").mkdir()
    (container / "memory" / "memory.limit_in_bytes").write_text(f"{2 << 20}\n")
    assert resources.total_memory() == 2 << 20


def test_batches_that_wait_take_half_of_it(container: Path, world: World) -> None:
    size = sum(array.nbytes for _, array in flatten(world.frame(1).tree))
    (container / "memory.max").write_text(f"{2 * size}\n")
    store = world.open()
    assert store.insert(world.frame(1)) == ""
    assert refused(world, store, world.frame(2)) == f"{size} bytes of batches are waiting already"


def test_columns_are_copied_by_half_of_the_cores_of_a_container(
    container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (container / "cpu.max").write_text("600000 100000\n")
    assert _copiers()._max_workers == 3
