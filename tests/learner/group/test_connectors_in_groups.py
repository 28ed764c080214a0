"""What connectors of several learners estimate is what one learner estimates from all batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.groups import join, update

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.data.sharding import shard
from juggler.learner.learner import Learner
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.episodes.batch import EpisodeBatch

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)


def make_learner(seed: int = 0) -> Learner:
    return build_learner(
        ImpalaConfig(lr=1e-3, optimizer_epsilon=1e-3),
        None,
        VECTOR,
        spaces.Discrete(2),
        {"hidden_sizes": [8]},
        connectors=ConnectorsConfig(learner=["normalize_rewards"]),
        seed=seed,
    )


def a_batch(make_batch: MakeBatch, seed: int, rows: int = 8) -> EpisodeBatch:
    """Its rewards are around 100: sums of their squares must not lose the differences."""
    made = make_batch(rows, 10, seed=seed)
    returned = np.linspace(0, 5, rows, dtype=np.float32)  # [N] by the episodes before the rows
    states: dict[str, Any] = {"connectors": {"discounted_returns": returned}}
    return replace(made, rewards=made.rewards + np.float32(100), states=states)


def moments(learner: Learner) -> dict[str, float]:
    assert learner.pipeline is not None
    state = learner.pipeline.get_state()["normalize_rewards"]
    return {name: float(value) for name, value in state.items()}


def assert_one(alone: Learner, group: list[Learner]) -> None:
    for learner in group:
        assert moments(learner) == pytest.approx(moments(alone), rel=1e-9)
        assert moments(learner) == moments(group[0]), "not a bit apart"
        for name, weights in learner.get_params().items():
            torch.testing.assert_close(weights, alone.get_params()[name], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_two_learners_have_the_moments_of_one_that_saw_both_shards(
    make_batch: MakeBatch, size: int
) -> None:
    alone, group = make_learner(), [make_learner() for _ in range(size)]
    join(group)
    for seed in range(3):
        batches = [a_batch(make_batch, 2 * seed), a_batch(make_batch, 2 * seed + 1)]
        alone.update_from_episodes(batches)
        update(group, shard(batches, size))
        assert_one(alone, group)
    assert moments(alone)["m2"] > 0


def test_a_learner_without_a_live_step_has_them_too(make_batch: MakeBatch) -> None:
    alone, group = make_learner(), [make_learner() for _ in range(2)]
    join(group)
    full, stale = a_batch(make_batch, 1), a_batch(make_batch, 2, rows=3).silenced()
    alone.update_from_episodes([full])
    update(group, [[full], [stale]])
    assert_one(alone, group)
    before = moments(group[0])
    update(group, [[stale], [stale]])
    assert moments(group[0]) == before


def test_whoever_joins_takes_the_moments_over_though_its_weights_are_the_same(
    make_batch: MakeBatch,
) -> None:
    ahead, behind = make_learner(), make_learner()
    ahead.pipeline.set_state(
        {"normalize_rewards": {name: torch.tensor(3.0) for name in ("count", "mean", "m2")}}
    )
    hashes = join([ahead, behind])
    assert hashes[0] == hashes[1]
    assert moments(behind) == moments(ahead) == {"count": 3.0, "mean": 3.0, "m2": 3.0}
