"""Modules that share parts, each with learners of its own, trained by k processes as by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.groups import join, update

from juggler.learner.algorithms.registry import build_learner
from juggler.learner.data.sharding import shard
from juggler.learner.group.state_sync import state_hash
from juggler.learner.learner import Learner
from juggler.learner.shared_parts import SharedParts
from juggler.runtime.episodes.batch import EpisodeBatch

MakeBatch = Callable[..., EpisodeBatch]
SPACES = spaces.Box(-10, 10, (4,), np.float32), spaces.Discrete(2)
ALGORITHMS = {"left": "impala", "right": "ppo"}


class Process:
    """The learners of both modules in one process."""

    def __init__(self, seed: int) -> None:
        self.shared = SharedParts({"encoder.*": list(ALGORITHMS)})
        self.learners: dict[str, Learner] = {}
        for number, (module_id, algorithm) in enumerate(ALGORITHMS.items()):
            config = {"algorithm": algorithm, "optimizer_epsilon": 1e-3}
            self.learners[module_id] = build_learner(
                config, None, *SPACES, {"hidden_sizes": [8]}, seed=seed + number
            )
            self.shared.add(module_id, self.learners[module_id])


def make(*seeds: int) -> list[Process]:
    """Processes that have met, module by module; the first one's state is that of all."""
    processes = [Process(seed) for seed in seeds]
    for module_id in ALGORITHMS:
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


def assert_equal(processes: list[Process]) -> None:
    for module_id in ALGORITHMS:
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
        assert_equal(group)
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
    for module_id in ALGORITHMS:
        meet(group, module_id)
    assert_equal(group)
    train(group, "right", [make_batch(12, 6, seed=2)])
    assert_equal(group)


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
    assert_equal(group)
