"""k learners on shards of a batch are one learner on the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.groups import join, update

from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.data.sharding import shard
from juggler.learner.group.state_sync import state_hash
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.rl_module import Batch, RLModule

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)
RECURRENT = {"recurrent": "gru", "recurrent_size": 6, "hidden_sizes": [8]}


def make_learner(
    algorithm: str,
    *,
    module: Any = None,
    model: dict[str, Any] | None = None,
    seed: int = 0,
    **config: Any,
) -> Learner:
    make = partial(build_module, module, VECTOR, TWO, model or {"hidden_sizes": [8]})
    found = ALGORITHMS[algorithm]
    package, _, name = found.core.partition(":")
    core = getattr(__import__(package, fromlist=[name]), name)
    return Learner(core(make, found.config(**config)), seed=seed)


def assert_equal(one: Learner, other: Learner) -> None:
    """But for what another order of additions makes of it."""
    for name, expected in one.get_params().items():
        torch.testing.assert_close(
            other.get_params()[name], expected, rtol=1e-4, atol=2e-5, msg=name
        )
    assert int(one.state["steps"]) == int(other.state["steps"])


CASES: dict[str, dict[str, Any]] = {
    "impala": {"algorithm": "impala"},
    "appo": {"algorithm": "appo", "target_kl": 0.05, "batch_uses": 2, "buffer_batches": 2},
    "ppo": {"algorithm": "ppo", "epochs": 3, "minibatches": 4},
    "ppo with a limit": {"algorithm": "ppo", "epochs": 2, "minibatches": 2, "target_kl": 1e-3},
    "several optimizers": {
        "algorithm": "impala",
        "optimizers": {"values": {"parameters": ["value_head.*"], "lr": 1e-2}},
    },
    "micro-batches": {"algorithm": "impala", "micro_batches": 3},
    "recurrent": {"algorithm": "impala", "model": RECURRENT, "burn_in": 2},
    "recurrent ppo": {"algorithm": "ppo", "model": RECURRENT, "minibatches": 1, "epochs": 2},
}


@pytest.mark.parametrize(
    ("case", "size"),
    [(case, size) for i, case in enumerate(CASES) for size in (2, 3 + i % 2)],
)
def test_learners_on_shards_have_the_weights_of_one_on_the_whole(
    make_batch: MakeBatch, case: str, size: int
) -> None:
    options = {"lr": 1e-3, "optimizer_epsilon": 1e-3} | CASES[case]
    if "recurrent" in case:
        states = {"states": {"module": {"hidden": np.zeros((8, 6), np.float32)}}}
    else:
        states = {}
    alone, group = make_learner(**options), [make_learner(**options) for _ in range(size)]
    join(group)
    for seed in range(3):
        batches = [
            make_batch(8, 10, seed=2 * seed, **states),
            make_batch(8, 10, seed=2 * seed + 1, **states),
        ]
        alone.update_from_episodes(batches)
        update(group, shard(batches, size))
        for learner in group:
            assert_equal(alone, learner)
    assert len(set(map(state_hash, group))) == 1, "not a bit apart"


def test_shards_may_be_as_uneven_as_they_like(make_batch: MakeBatch) -> None:
    options: dict[str, Any] = {
        "algorithm": "ppo",
        "epochs": 2,
        "minibatches": 2,
        "optimizer_epsilon": 1e-3,
    }
    alone, group = make_learner(**options), [make_learner(**options) for _ in range(2)]
    join(group)
    batches = [make_batch(1, 4, seed=1), make_batch(12, 20, seed=2)]
    alone.update_from_episodes(batches)
    update(group, [batches[:1], batches[1:]])
    assert_equal(alone, group[0])


@pytest.mark.parametrize("model", [None, RECURRENT])
@pytest.mark.parametrize("algorithm", ["impala", "ppo", "appo"])
def test_a_learner_without_a_live_step_keeps_up(
    make_batch: MakeBatch, algorithm: str, model: dict[str, Any] | None
) -> None:
    options: dict[str, Any] = {"algorithm": algorithm, "model": model, "optimizer_epsilon": 1e-3}
    alone, group = make_learner(**options), [make_learner(**options) for _ in range(2)]
    join(group)
    states = {"states": {"module": {"hidden": np.zeros((6, 6), np.float32)}}} if model else {}
    full, stale = make_batch(6, 8, seed=1, **states), make_batch(6, 8, seed=2, **states)
    alone.update_from_episodes([full])
    update(group, [[full], [stale.silenced()]])
    for learner in group:
        assert_equal(alone, learner)
    update(group, [[full.silenced()], [stale.silenced()]])
    for learner in group:
        assert_equal(alone, learner)


class Normalized(RLModule):
    """Has a buffer that is an estimate from samples, and one that counts passes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 3)

    def _forward(self, batch: Batch) -> dict[str, Any]:
        outputs = self.head(self.norm(batch["observations"]))  # [B, 3]
        return {"action_dist_inputs": outputs[:, :2], "values": outputs[:, 2]}


def test_buffers_are_the_same_at_all_learners_too(make_batch: MakeBatch) -> None:
    group = [make_learner("impala", module=Normalized, seed=rank) for rank in range(2)]
    join(group)
    for seed in range(2):
        update(group, [[make_batch(4, 8, seed=seed)], [make_batch(6, 8, seed=seed + 10)]])
    assert state_hash(group[0]) == state_hash(group[1])


def test_all_go_on_from_the_one_with_most_updates(make_batch: MakeBatch) -> None:
    group = [make_learner("ppo", seed=rank) for rank in range(3)]
    group[1].update_from_episodes([make_batch(4, 8)])
    group[1].update_from_episodes([make_batch(4, 8)])
    group[2].update_from_episodes([make_batch(4, 8)])
    expected = group[1].save()[0]
    assert len(set(join(group))) == 1
    assert [learner.updates for learner in group] == [2, 2, 2]
    found = group[0].save()[0]
    np.testing.assert_equal(found, expected)


def test_a_group_of_one_needs_nobody(make_batch: MakeBatch) -> None:
    alone, other = make_learner("ppo"), make_learner("ppo")
    other.join(None)
    for learner in (alone, other):
        learner.update_from_episodes([make_batch(4, 8)])
    assert_equal(alone, other)
    assert not other.in_group
