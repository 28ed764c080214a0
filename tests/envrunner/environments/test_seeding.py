from __future__ import annotations

import numpy as np
from gymnasium.vector import AutoresetMode
from support.scripted_environments import NativeScripted, Scripted

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.environments.vector import make_vector_env, reset_environments
from juggler.runtime.acting.actor import noise_seed
from juggler.runtime.actors.seeds import worker_seed


def seeds_of_a_run(run_seed: int) -> list[int]:
    workers = [
        worker_seed(run_seed, role, index, restarts)
        for role in ("envrunner", "evaluator")
        for index in range(8)
        for restarts in range(2)
    ]
    return [seed for worker in workers for seed in environment_seeds(worker, 64)]


def test_no_two_environments_of_a_run_share_a_seed() -> None:
    for run_seed in (0, 1, 12345):
        seeds = seeds_of_a_run(run_seed)
        assert len(set(seeds)) == len(seeds)
        assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_same_run_seed_gives_the_same_seeds_and_another_one_others() -> None:
    assert seeds_of_a_run(7) == seeds_of_a_run(7)
    assert not set(seeds_of_a_run(7)) & set(seeds_of_a_run(8))


def test_more_environments_keep_the_seeds_of_the_first_ones() -> None:
    assert environment_seeds(3, 100)[:10] == environment_seeds(3, 10)


def test_a_worker_can_use_its_seed_for_anything() -> None:
    seed = worker_seed(0, "envrunner", 0)
    assert 0 <= seed < 2**64
    assert noise_seed(seed) not in environment_seeds(seed, 1000)


def test_environments_of_one_runner_start_differently_and_repeatably() -> None:
    config = EnvRunnerConfig(env="support.scripted_environments:Scripted", envs_per_runner=4)
    env = make_vector_env(config)
    first = reset_environments(env, 1).copy()
    assert len(np.unique(first[:, 2])) == 4
    assert (reset_environments(env, 1)[:, 2] == first[:, 2]).all()
    assert (reset_environments(env, 2)[:, 2] != first[:, 2]).all()


def test_a_vector_of_environments_gets_one_seed() -> None:
    env = NativeScripted([((3, "terminated"),)] * 2, AutoresetMode.NEXT_STEP)
    observations = reset_environments(env, 9)
    alone, _ = Scripted().reset(seed=environment_seeds(9, 2)[0])
    np.testing.assert_array_equal(observations[0], alone)
