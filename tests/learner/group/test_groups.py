"""k learners on shards of a batch equal one learner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import TWO, VECTOR, MakeBatch
from support.learner_groups import join, update

from juggler.learner.algorithms.dqn import DqnConfig
from juggler.learner.algorithms.dqn.core import Dqn
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.registry import ALGORITHMS, build_learner
from juggler.learner.data.collate import shard
from juggler.learner.data.sources import Columns, Sums
from juggler.learner.group.peers import state_hash
from juggler.learner.learner import Learner
from juggler.learner.shared_parts import SharedParts
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.models import ActorCritic, QNetwork
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import Batch, RLModule

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
    ("case", "size"), [(case, size) for i, case in enumerate(CASES) for size in (2, 3 + i % 2)]
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
    """Has a buffer estimated from samples, and one that counts passes."""

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


# What connectors of several learners estimate is what one learner estimates from all batches.


def normalizing(seed: int = 0) -> Learner:
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
    """Rewards around 100: sums of squares must keep the differences."""
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
    alone, group = (normalizing(), [normalizing() for _ in range(size)])
    join(group)
    for seed in range(3):
        batches = [a_batch(make_batch, 2 * seed), a_batch(make_batch, 2 * seed + 1)]
        alone.update_from_episodes(batches)
        update(group, shard(batches, size))
        assert_one(alone, group)
    assert moments(alone)["m2"] > 0


def test_whoever_joins_takes_the_moments_over_though_its_weights_are_the_same(
    make_batch: MakeBatch,
) -> None:
    ahead, behind = normalizing(), normalizing()
    ahead.pipeline.set_state(
        {"normalize_rewards": {name: torch.tensor(3.0) for name in ("count", "mean", "m2")}}
    )
    hashes = join([ahead, behind])
    assert hashes[0] == hashes[1]
    assert moments(behind) == moments(ahead) == {"count": 3.0, "mean": 3.0, "m2": 3.0}


# Learners of a group that keep steps: what each of them draws.


def dqn(**config: Any) -> Learner:
    make = partial(QNetwork, VECTOR, TWO, {"hidden_sizes": [8]})
    own = {"replay_begin": 1, "replay_batch_size": 32, "replay_ratio": 4.0, **config}
    return Learner(Dqn(make, DqnConfig(**own)), seed=3)


def impala(**config: Any) -> Learner:
    make = partial(ActorCritic, VECTOR, TWO, {"hidden_sizes": [8]})
    own = ImpalaConfig(replay_share=0.5, save_replay=True, **config)
    return Learner(Impala(make, own), seed=3)


def told(learner: Learner, samples: list[Any]) -> None:
    """Make it put each of its samples into this list, too."""
    add = learner.data.add

    def adding(sample: Columns, sums: Sums) -> Iterator[Columns]:
        for drawn in add(sample, sums):
            samples.append(drawn)
            yield drawn

    learner.data.add = adding  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "make",
    [dqn, partial(dqn, priority_exponent=0.6), impala],
    ids=["dqn", "dqn by priority", "old rows mixed in"],
)
def test_learners_that_go_on_from_one_table_draw_different_rows_from_it(
    make_batch: MakeBatch, make: Callable[[], Learner]
) -> None:
    group = [make() for _ in range(2)]
    join(group)
    for seed in range(6):
        update(group, [[make_batch(4, 16, seed=2 * seed + own)] for own in range(2)])
    join(group)  # as when one of them is lost and another one takes its place
    drawn: list[list[Any]] = [[], []]
    for learner, samples in zip(group, drawn, strict=True):
        told(learner, samples)
    if make is not impala:
        update(group, [[make_batch(1, 1, seed=100 + own)] for own in range(2)])
    for _ in range(3):
        update(group, [[make_batch(4, 16, seed=200)] for _ in range(2)])
    new = 4 if make is impala else 0  # rows before the old ones
    old = [[sample["observations"][new:] for sample in samples] for samples in drawn]
    assert len(old[0]) == len(old[1]) > 2, "as often as one another"
    assert all(len(rows) for rows in old[0] + old[1])
    for one, other in zip(*old, strict=True):
        assert one.shape != other.shape or not torch.equal(one, other)


# Modules that share parts, each with learners of its own, trained by k processes as by one.


SPACES = spaces.Box(-10, 10, (4,), np.float32), spaces.Discrete(2)
SHARING = {"left": "impala", "right": "ppo"}


class Process:
    """The learners of both modules in one process."""

    def __init__(self, seed: int) -> None:
        self.shared = SharedParts({"encoder.*": list(SHARING)})
        self.learners: dict[str, Learner] = {}
        for number, (module_id, algorithm) in enumerate(SHARING.items()):
            config = {"algorithm": algorithm, "optimizer_epsilon": 1e-3}
            self.learners[module_id] = build_learner(
                config, None, *SPACES, {"hidden_sizes": [8]}, seed=seed + number
            )
            self.shared.add(module_id, self.learners[module_id])


def make(*seeds: int) -> list[Process]:
    """Processes that have met, by module, with the first one's state."""
    processes = [Process(seed) for seed in seeds]
    for module_id in SHARING:
        meet(processes, module_id)
    return processes


def meet(processes: list[Process], module_id: str) -> None:
    join([each.learners[module_id] for each in processes])
    for each in processes:
        each.shared.broadcast(module_id)


def train(processes: list[Process], module_id: str, episodes: list[EpisodeBatch]) -> None:
    shards = shard(episodes, len(processes))
    update([each.learners[module_id] for each in processes], shards)
    for each in processes:
        each.shared.broadcast(module_id)


def assert_in_step(processes: list[Process]) -> None:
    for module_id in SHARING:
        hashes = {state_hash(each.learners[module_id]) for each in processes}
        assert len(hashes) == 1, f"{module_id}: not a bit apart"


def encoders(process: Process) -> list[torch.Tensor]:
    return [each.get_params()["encoder.0.weight"] for each in process.learners.values()]


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_share_updates_stay_equal_and_are_as_one(
    make_batch: MakeBatch, size: int
) -> None:
    alone, group = [Process(0)], make(*range(size))
    for seed, module_id in enumerate(("left", "right", "right", "left")):
        episodes = [make_batch(4, 6, seed=seed), make_batch(8, 6, seed=seed + 10)]
        train(alone, module_id, episodes)
        train(group, module_id, episodes)
        assert_in_step(group)
        expected, found = encoders(alone[0]), encoders(group[0])
        assert torch.equal(*found)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_a_process_that_comes_later_has_the_shared_parts_of_those_before_it(
    make_batch: MakeBatch,
) -> None:
    group = make(0, 1)
    train(group, "left", [make_batch(8, 6)])
    train(group, "right", [make_batch(8, 6, seed=1)])
    group.append(Process(7))
    for module_id in SHARING:
        meet(group, module_id)
    assert_in_step(group)
    assert torch.equal(*encoders(group[-1])), "both of its modules have one encoder"
    train(group, "right", [make_batch(12, 6, seed=2)])
    assert_in_step(group)


def test_processes_agree_again_where_an_update_was_made_by_one_of_them_alone(
    make_batch: MakeBatch,
) -> None:
    group = make(0, 1)
    first = group[0].learners["left"]
    first.join(None)
    first.update_from_episodes([make_batch(8, 6)])
    group[0].shared.broadcast("left")
    assert not torch.equal(encoders(group[0])[1], encoders(group[1])[1])
    train(group, "right", [make_batch(8, 6, seed=1)])
    meet(group, "left")
    assert torch.equal(encoders(group[0])[1], encoders(group[1])[1])
    assert_in_step(group)
