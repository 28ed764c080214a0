"""A sampler that begins anew does what a new one does, whatever it did before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.seeding import seed_process
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.sampler import Fragment, Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.building import build_runner_pipelines
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.modules.building import build_module
from juggler.runtime.wire.trees import flatten

STEPS = 7
SHORT = {"env": "Pendulum-v1", "env_kwargs": {"max_episode_steps": 10}}
CONFIGS = [
    {"env": "CartPole-v1"},  # a vector of its own
    *({**SHORT, "autoreset": mode} for mode in ("next_step", "same_step", "disabled")),
    {**SHORT, "autoreset": "next_step", "vectorize": "async"},
]


def sampler_of(config: dict[str, Any], seed: int) -> Sampler:
    env = make_vector_env(EnvRunnerConfig(envs_per_runner=3, **config))
    pieces = ["mean_std_filter", "previous_actions_and_rewards"]
    connectors = ConnectorsConfig(env_to_module=pieces, learner=["normalize_rewards"])
    env_to_module, module_to_env = build_runner_pipelines(
        connectors, env.single_observation_space, env.single_action_space
    )
    torch.manual_seed(0)
    model = {"recurrent": "lstm", "recurrent_size": 4}
    spaces = env_to_module.module_observation_space, module_to_env.action_space
    module = build_module(None, *spaces, model)
    policy = Actor(module, env.num_envs, STEPS, seed, module_to_env, env_to_module)
    return Sampler(env, policy, STEPS, seed)


def arrays_of(fragment: Fragment) -> dict[str, Any]:
    """Without the ids of episodes, which are never given twice."""
    arrays = {"/".join(path): array for path, array in flatten(fragment.batch.to_tree())}
    del arrays["segment_episodes"]
    return arrays


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_fragments_behind_a_reset_are_those_of_a_new_sampler(config: dict[str, Any]) -> None:
    used, new = sampler_of(config, 1), sampler_of(config, 9)
    for _ in range(4):
        used.sample((0, 0))
    used.reset(9)
    ended = 0
    for _ in range(4):
        mine, expected = used.sample((0, 0)), new.sample((0, 0))
        assert arrays_of(mine).keys() == arrays_of(expected).keys()
        for name, array in arrays_of(expected).items():
            np.testing.assert_array_equal(arrays_of(mine)[name], array, err_msg=name)
        assert mine.episode_returns == expected.episode_returns
        assert mine.episode_lengths == expected.episode_lengths
        ended += len(mine.episode_returns)
    assert ended > 0
    for sampler in (used, new):
        sampler._env.close()


def test_a_seed_of_the_process_reaches_all_global_generators() -> None:
    def numbers(seed: int) -> tuple[float, float, float]:
        seed_process(seed)
        return random.random(), np.random.rand(), torch.rand(()).item()

    assert numbers(2**64 - 1) == numbers(2**64 - 1)
    assert not set(numbers(1)) & set(numbers(2))
