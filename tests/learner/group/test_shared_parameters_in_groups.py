"""Modules that share parameters, trained by k learners as by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.groups import join, update
from support.shared_encoder import SHARED, SharedEncoder, SharedPlainEncoder, make_multi

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.ppo.config import PpoConfig
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.data.sharding import shard
from juggler.learner.group.state_sync import state_hash
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch

MakeBatch = Callable[..., EpisodeBatch]
CASES: dict[str, tuple[type[Any], Any]] = {
    "impala": (Impala, ImpalaConfig(optimizer_epsilon=1e-3)),
    "impala in micro-batches": (Impala, ImpalaConfig(optimizer_epsilon=1e-3, micro_batches=2)),
    "ppo": (Ppo, PpoConfig(optimizer_epsilon=1e-3, epochs=2, minibatches=2)),
}


def make_learner(case: str, shared: type[SharedEncoder] = SharedPlainEncoder) -> Learner:
    core, config = CASES[case]
    return Learner(core(partial(make_multi, shared), config), seed=0)


def alone_and_group(case: str, size: int = 2) -> tuple[Learner, list[Learner]]:
    group = [make_learner(case) for _ in range(size)]
    join(group)
    return make_learner(case), group


def assert_as_alone(alone: Learner, group: list[Learner]) -> None:
    """But for what another order of additions makes of it."""
    for module_id, weights in alone.get_params().items():
        for name, expected in weights.items():
            found = group[0].get_params()[module_id][name]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5, msg=name)
    assert alone.state[SHARED]["steps"] == group[0].state[SHARED]["steps"]
    assert len(set(map(state_hash, group))) == 1, "not a bit apart"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_learners_on_shards_have_the_weights_of_one_on_the_whole(
    make_batch: MakeBatch, case: str, size: int
) -> None:
    alone, group = alone_and_group(case, size)
    for seed in range(3):
        episodes = {
            "left": [make_batch(8, 10, seed=3 * seed)],
            "right": [make_batch(12, 6, seed=3 * seed + 1)],
            "alone": [make_batch(6, 5, seed=3 * seed + 2)],
        }
        alone.update_from_episodes(episodes)
        update(group, shard(episodes, size))
        assert_as_alone(alone, group)


@pytest.mark.parametrize("case", CASES)
def test_the_weight_of_a_shard_is_another_one_for_each_module(
    make_batch: MakeBatch, case: str
) -> None:
    alone, group = alone_and_group(case)
    left = [make_batch(1, 4, seed=1), make_batch(12, 10, seed=2)]
    right = [make_batch(9, 12, seed=3), make_batch(2, 3, seed=4)]
    alone.update_from_episodes({"left": left, "right": right})
    update(group, [{"left": left[:1], "right": right[:1]}, {"left": left[1:], "right": right[1:]}])
    assert_as_alone(alone, group)


@pytest.mark.parametrize("case", CASES)
def test_a_module_that_shares_may_be_absent_from_a_shard_or_from_all(
    make_batch: MakeBatch, case: str
) -> None:
    alone, group = alone_and_group(case)
    left, right = [make_batch(6, 8, seed=1)], [make_batch(5, 7, seed=2)]
    alone.update_from_episodes({"left": left, "right": right})
    update(group, [{"left": left}, {"right": right}])
    assert_as_alone(alone, group)
    alone.update_from_episodes({"left": left})
    update(group, shard({"left": left}, 2))
    assert_as_alone(alone, group)


def test_statistics_of_a_shared_normalization_are_the_same_at_all_learners(
    make_batch: MakeBatch,
) -> None:
    group = [make_learner("impala", SharedEncoder) for _ in range(2)]
    join(group)
    before = group[0].state[SHARED]["buffers"]
    update(
        group,
        [
            {"left": [make_batch(6, 8, seed=1)], "right": [make_batch(4, 4, seed=2)]},
            {"left": [make_batch(3, 5, seed=3)]},
        ],
    )
    after = [learner.state[SHARED]["buffers"] for learner in group]
    for name, buffer in after[0].items():
        if buffer.is_floating_point():
            torch.testing.assert_close(buffer, after[1][name], rtol=0, atol=0)
            assert not torch.equal(buffer, before[name])


@pytest.mark.parametrize("case", CASES)
def test_a_learner_without_any_module_of_a_sample_keeps_up(
    make_batch: MakeBatch, case: str
) -> None:
    alone, group = alone_and_group(case)
    episodes = {"left": [make_batch(6, 8, seed=1)], "alone": [make_batch(5, 7, seed=2)]}
    alone.update_from_episodes(episodes)
    update(group, [episodes, {}])
    assert_as_alone(alone, group)
