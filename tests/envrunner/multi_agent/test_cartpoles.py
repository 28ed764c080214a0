"""Every agent of CartPoles balances a pole as Gymnasium's CartPole does."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from juggler.envrunner.cartpoles import CartPoles
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs

NAME = "juggler:CartPoles"
N, A = 3, 4


def actions_for(observations: np.ndarray) -> np.ndarray:
    """Balance poles that lean to the left, and let the others fall."""
    return (observations[..., 2] + 0.3 * observations[..., 3] > 0).astype(np.int64)


def test_each_agents_states_rewards_and_ends_are_those_of_cartpole() -> None:
    game = CartPoles(N, A, max_episode_steps=10_000)
    observations, acting = game.reset(3, np.ones(N, bool))
    assert acting.all()
    single: dict[Any, CartPoleEnv] = {}
    for at in np.ndindex(N, A):
        single[at] = CartPoleEnv()
        single[at].reset()
        single[at].state = tuple(game._state[(slice(None), *at)])
    rng = np.random.default_rng(0)
    while single:
        skilled = rng.random((N, A)) < 0.3
        actions = np.where(skilled, actions_for(observations), rng.integers(2, size=(N, A)))
        before = acting.copy()
        observations, rewards, terminated, truncated, acting, _ = game.step(actions)
        assert not truncated.any()
        np.testing.assert_array_equal(rewards, before)
        for at in [*single]:
            seen, reward, ends, _, _ = single[at].step(int(actions[at]))  # type: ignore[no-untyped-call]
            np.testing.assert_allclose(observations[at], seen, rtol=1e-6, atol=1e-9)
            assert (rewards[at], terminated[at]) == (reward, ends)
            assert acting[at] == (not ends)
            if ends:
                del single[at]
        there = [at in single for at in np.ndindex(N, A)]
        assert acting.ravel().tolist() == there


def test_agents_that_still_balance_are_truncated_together() -> None:
    limit = gymnasium.spec("CartPole-v1").max_episode_steps
    assert limit == 500
    game = CartPoles(1, 2)
    observations, acting = game.reset(0, np.ones(1, bool))
    for step in range(1, limit + 1):
        actions = actions_for(observations)
        actions[0, 1] = 0  # the second agent lets its pole fall
        observations, _, terminated, truncated, acting, _ = game.step(actions)
        assert truncated[0].tolist() == [step == limit, False]
        assert not terminated[0, 0]
    assert not acting.any()


def test_a_reset_of_some_environments_leaves_the_others_as_they_are() -> None:
    game = CartPoles(N, A)
    game.reset(3, np.ones(N, bool))
    step = game.step(np.zeros((N, A), np.int64))
    before = np.array(step.observations)
    observations, acting = game.reset(None, np.array([False, True, False]))
    np.testing.assert_array_equal(observations[[0, 2]], before[[0, 2]])
    assert (observations[1] != before[1]).all()
    assert acting.all()


def test_it_is_made_by_name_with_the_number_of_agents() -> None:
    config = EnvRunnerConfig(env=NAME, envs_per_runner=5, env_kwargs={"num_agents": 2})
    envs = make_multi_agent_envs(config)
    assert envs.num_envs == 5
    assert envs.agents == ("cart_0", "cart_1")
    (group,) = envs.groups
    assert group.observation_space == CartPoleEnv().observation_space
    (first,) = envs.reset(0).groups
    assert group.observation_space.contains(np.asarray(first.observations)[0])
    assert first.acting.tolist() == list(range(10))


def test_sizes_below_one_are_refused() -> None:
    CartPoles(1, 1, 1)
    with pytest.raises(ValueError, match="must be at least 1"):
        CartPoles(1, 0)
