"""A replay's invariants for any input: pace, books, and whole rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import MakeBatch, make, numbered

from juggler.learner.core.returns import rows_of_transitions
from juggler.learner.data.collate import collate
from juggler.learner.data.replay.replay import Replay
from juggler.learner.data.replay.table import living_rows, resized, rows_of_episodes, size_of
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.structures import tree_map

CPU = torch.device("cpu")


def test_metrics_say_what_is_kept_and_how_often_it_is_drawn() -> None:
    replay, arrived, draws = make(begin=10, capacity=50, size=8, ratio=4.0), 0, 0
    for _ in range(60):
        draws += len(list(replay.add(numbered(arrived, 3))))
        arrived += 3
    since = arrived - 9  # the fourth arrival is the first that is drawn for
    told = dict(replay.metrics())
    drawn, waiting, unused = (
        told.pop(f"replay_rows_{what}") for what in ("drawn", "waiting", "unused")
    )
    assert 0 < unused < waiting + unused < 50
    assert drawn + waiting + unused == arrived
    assert told == {
        "replay_rows": 50.0,
        "replay_steps_missing": 0.0,
        "stale_priorities": 0.0,
        "samples_per_insert": 8 * draws / since,
        "updates_per_step": draws / since,
    }
    assert told["samples_per_insert"] == pytest.approx(4.0, abs=8 / since)


def test_a_replay_that_fills_says_how_many_steps_it_lacks_and_draws_when_it_lacks_none() -> None:
    replay, missing, draws = make(begin=8), [], []
    for first in range(0, 16, 4):
        draws.append(len(list(replay.add(numbered(first, 4)))))
        missing.append(replay.books()["replay_steps_missing"])
    assert missing == [4, 0, 0, 0]
    assert draws == [0, 2, 2, 2]


def test_a_learner_that_no_row_came_to_says_that_the_others_wait_for_it() -> None:
    replay = Replay(lambda columns: {}, capacity=64, size=4, ratio=1.0, begin=20)
    others = torch.tensor([30, 30, 1, 1], dtype=torch.float64)  # rows, steps, learners with rows
    assert not list(replay.add(numbered(0, 1), lambda told: told + others))
    assert replay.books()["replay_steps_missing"] == 1


def marked(make_batch: MakeBatch, seed: int, steps: int) -> EpisodeBatch:
    """Rows whose observations and rewards all hold the row's own number."""
    rows = 3
    numbers = (np.arange(rows) + rows * seed).astype(np.float32)
    plain = make_batch(rows, steps, seed=seed, ends=0.2)
    return make_batch(
        rows,
        steps,
        seed=seed,
        ends=0.2,
        observations=np.broadcast_to(numbers[:, None, None], (rows, steps, 4)).copy(),
        rewards=(np.broadcast_to(numbers[:, None], (rows, steps)) * plain.live).copy(),
        last_observations=np.broadcast_to(numbers[:, None], (rows, 4)).copy(),
        final_observations=np.repeat(numbers[plain.final_rows][:, None], 4, 1),
        states={"module": {"hidden": np.broadcast_to(numbers[:, None], (rows, 2)).copy()}},
    )


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("capacity", [1, 7, 8, 60])
def test_no_drawn_transition_is_of_two_rows(
    make_batch: MakeBatch, capacity: int, alpha: float
) -> None:
    replay = Replay(
        partial(rows_of_transitions, n=3, gamma=0.5),
        capacity=capacity,
        size=16,
        ratio=8.0,
        priority_exponent=alpha,
    )
    newest, generator = 0.0, torch.Generator().manual_seed(0)
    for seed in range(40):
        batch = marked(make_batch, seed, steps=int(5 + seed % 4))
        for drawn in replay.add(collate([batch])):
            found = drawn
            number = found["observations"][:, 0, 0]  # [B]
            assert (found["observations"][:, 0] == number[:, None]).all()
            assert (found["last_observations"] == number[:, None]).all()
            shares = found["rewards"][:, 0] / number.clamp(min=1)  # 1, 1.5 or 1.75
            assert (torch.isin(shares, torch.tensor([1.0, 1.5, 1.75])) | (number == 0)).all()
            newest = max(newest, float(number.max()))
            replay.update_priorities(torch.rand(16, generator=generator))
    assert newest >= 3 * 39


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_no_drawn_row_of_episodes_is_of_two_and_each_is_as_it_arrived(
    make_batch: MakeBatch, alpha: float
) -> None:
    """Also while rows become longer, for which all of them move."""
    replay = Replay(
        living_rows, capacity=100, size=4, ratio=2.0, priority_exponent=alpha, episodes=True
    )
    arrived: dict[int, Any] = {}
    for seed in range(40):
        columns = collate([marked(make_batch, seed, steps=5 + seed // 10)])
        rows = living_rows(columns)
        for place, number in enumerate(rows["last_observations"][:, 0].int().tolist()):
            arrived[number] = tree_map(lambda x, i=place: x[i : i + 1], rows)
        for drawn in replay.add(columns):
            found = dict(drawn)
            del found["importance_weights"], found["new_steps"]
            found = rows_of_episodes(found)
            for place in range(4):
                row = tree_map(lambda x, i=place: x[i : i + 1], found)
                source = arrived[int(row["last_observations"][0, 0])]
                size = size_of(row).covering(size_of(source))
                tree_map(
                    partial(torch.testing.assert_close, rtol=0, atol=0),
                    *(resized(each, size, size_of(each)) for each in (row, source)),
                )
            replay.update_priorities(found["last_observations"][:, 0] + 1)


def test_priorities_stay_with_their_rows_when_all_of_them_move(make_batch: MakeBatch) -> None:
    replay = Replay(
        living_rows, capacity=60, size=4, ratio=16.0, priority_exponent=1.0, episodes=True
    )
    for seed in range(3):
        for drawn in replay.add(collate([marked(make_batch, seed, steps=5)])):
            replay.update_priorities(drawn["last_observations"][:, 0] + 1)
    next(iter(replay.add(collate([marked(make_batch, 3, steps=10)]))))
    table = replay.table
    numbers = table.rows(np.arange(table.size))["last_observations"][:, 0].numpy()
    assert numbers.tolist() == [9.0, 10.0, 11.0, 6.0, 7.0, 8.0], "six rows of 10 steps fit"
    assert table._weights is not None
    weights = table._weights[np.arange(6)]
    assert weights.tolist() == [9.0, 9.0, 9.0, 7.0, 8.0, 9.0], "new rows have the largest priority"


def test_priorities_of_rows_that_have_moved_are_stale(make_batch: MakeBatch) -> None:
    replay = Replay(
        living_rows, capacity=60, size=3, ratio=1.0, priority_exponent=1.0, episodes=True
    )
    (_,) = replay.add(collate([marked(make_batch, 0, steps=5)]))
    longer = living_rows(collate([marked(make_batch, 1, steps=9)]))
    replay.table.insert(longer)
    replay.update_priorities(torch.full((3,), 100.0))
    assert replay.metrics()["stale_priorities"] == 3
    assert replay.table._weights.total == 6.0


@pytest.mark.parametrize(("before", "after"), [(0.6, 1.0), (1.0, 0.6), (0.0, 0.6), (0.6, 0.0)])
def test_another_exponent_after_a_restore_is_that_of_all_rows(before: float, after: float) -> None:
    priorities = torch.tensor([1.0, 2.0, 4.0, 8.0])
    one, other = (make(capacity=4, ratio=40.0, priority_exponent=each) for each in (before, after))
    for drawn in one.add(numbered(0, 4)):
        one.update_priorities(priorities[drawn["number"]])
    other.restore(one.state(), CPU)
    if after:
        expected = priorities.double().numpy() if before else np.full(4, 1.0)
        weights: Any = other.table._weights
        np.testing.assert_allclose(weights[np.arange(4)], expected**after)
    for drawn in other.add(numbered(4, 1)):
        assert set(drawn["number"].tolist()) <= {1, 2, 3, 4}
        other.update_priorities(torch.ones(4))
