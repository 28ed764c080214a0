"""The faster look at actions says what Gymnasium's says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete, MultiDiscrete, Space
from gymnasium.vector import VectorEnv

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import (
    EqualChoices,
    check_actions_faster,
    make_vector_env,
)
from juggler.envrunner.failures import EnvironmentFailed

LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class Vector(VectorEnv[Any, Any, Any]):
    def __init__(self, action_space: Space[Any]) -> None:
        self.action_space = action_space


@pytest.mark.parametrize(
    "actions",
    [
        np.array([0, 1, 2]),
        np.array([2, 2, 2])[::-1],
        np.array([0, 1, 3]),
        np.array([0, -1, 2]),
        np.array([LEAST, 0, 0]),
        np.array([0, 0, MOST]),
        np.array([0, 1]),
        np.array([[0, 1, 2]]),
        np.array(0),
        np.array([0, 1, 2], np.int32),
        np.array([0, 1, 4], np.int32),
        np.array([0, 1, 2], np.uint64),
        np.array([0.0, 1.0, 2.0]),
        [0, 1, 2],
        (0, 1, 3),
        "012",
        None,
    ],
    ids=repr,
)
def test_the_same_actions_are_valid(actions: Any) -> None:
    env = Vector(MultiDiscrete([3, 3, 3]))
    check_actions_faster(env)
    assert type(env.action_space) is EqualChoices
    assert env.action_space.contains(actions) is MultiDiscrete([3, 3, 3]).contains(actions)


def test_choices_in_several_dimensions_are_looked_at_too() -> None:
    env = Vector(MultiDiscrete([[2, 2], [2, 2]]))
    check_actions_faster(env)
    assert type(env.action_space) is EqualChoices
    assert env.action_space.contains(np.array([[0, 1], [1, 0]]))
    assert not env.action_space.contains(np.array([[0, 1], [2, 0]]))


@pytest.mark.parametrize(
    "space",
    [
        MultiDiscrete([3, 2]),
        MultiDiscrete([3, 3], start=[1, 1]),
        MultiDiscrete([3, 3], dtype=np.int32),
        Discrete(3),
    ],
    ids=repr,
)
def test_other_spaces_stay_as_they_are(space: Space[Any]) -> None:
    env, before = Vector(space), type(space)
    check_actions_faster(env)
    assert env.action_space is space
    assert type(space) is before


def test_a_space_stays_equal_and_keeps_its_random_numbers() -> None:
    space, other = MultiDiscrete([3] * 8, seed=1), MultiDiscrete([3] * 8, seed=1)
    check_actions_faster(Vector(space))
    assert space == other
    assert other == space
    np.testing.assert_array_equal(space.sample(), other.sample())
    assert repr(space) == repr(other)


def test_cartpoles_own_vector_still_refuses_an_action_that_it_does_not_have() -> None:
    env = make_vector_env(EnvRunnerConfig(env="CartPole-v1", envs_per_runner=3))
    assert type(env.unwrapped.action_space) is EqualChoices
    env.reset(seed=0)
    env.step(np.array([0, 1, 0]))
    for actions in ([0, 1, 2], [0, -1, 0], [0, 1]):
        with pytest.raises(EnvironmentFailed, match=r"AssertionError: .* invalid"):
            env.step(np.array(actions))
    env.close()
