"""Results of a vector that steps its environments in its own way."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces import Discrete, MultiDiscrete, Space
from gymnasium.vector import AutoresetMode, VectorEnv
from support.scripted_environments import NativeAsTrees, NativeScripted

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.accepted_vector import AcceptedVector
from juggler.envrunner.environments.vector import (
    EqualChoices,
    check_actions_faster,
    make_vector_env,
)
from juggler.envrunner.failures import EnvironmentFailed

N = 4


def native() -> NativeScripted:
    return NativeScripted([((9, "terminated"),)] * N, AutoresetMode.SAME_STEP)


class Giving(NativeScripted):
    """Gives something else in place of one of a step's results, or of all observations."""

    def __init__(self, place: int, given: Any, dtype: Any = np.float32) -> None:
        super().__init__([((9, "terminated"),)] * N, AutoresetMode.SAME_STEP)
        self.single_observation_space = spaces.Box(0, 255, (3,), dtype)
        self.place, self.given = place, given

    def reset(self, **arguments: Any) -> Any:
        observations, infos = super().reset(**arguments)
        return self.given if self.place == 0 else observations, infos

    def step(self, actions: Any) -> Any:
        results = list(super().step(actions))
        results[self.place] = self.given
        return tuple(results)


def begin(env: Any) -> Any:
    vector = AcceptedVector(env, f"one of {N} environments (toy)")
    vector.reset(seed=1)
    return vector.step(np.zeros(N, int))


@pytest.mark.parametrize(
    ("dtype", "given", "words"),
    [
        (np.float32, np.zeros(3, np.float32), r"float32 of shape \[3\]"),
        (np.float32, np.zeros((N, 1), np.float32), r"float32 of shape \[4, 1\]"),
        (np.uint8, np.full((N, 3), 0.7), r"float64 of shape \[4, 3\]"),
        (np.uint8, np.full((N, 3), 300), r"int64 of shape \[4, 3\]"),
    ],
)
def test_observations_are_not_repeated_for_all_environments_or_cut_off(dtype, given, words) -> None:
    due = rf"a vector of 4 must give {np.dtype(dtype)} of shape \[4, 3\]"
    expected = rf"4 environments \(toy\) failed in reset: its observations are {words}: {due}"
    with pytest.raises(EnvironmentFailed, match=expected):
        begin(Giving(0, given, dtype))


@pytest.mark.parametrize(
    ("place", "given", "words"),
    [
        (1, 1.0, "rewards are float64 of shape"),
        (1, np.zeros((N, 1)), r"rewards are float64 of shape \[4, 1\]"),
        (2, False, "terminated are bool of shape"),
        (3, np.full((N, 1), 0.0), r"truncated are float64 of shape \[4, 1\]"),
        (3, np.full(N, "no"), r"truncated are <U2 of shape \[4\]"),
    ],
)
def test_a_step_is_not_that_of_one_environment_for_all(place: int, given: Any, words: str) -> None:
    with pytest.raises(EnvironmentFailed, match=f"failed in step: its {words}"):
        begin(Giving(place, given))


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.uint8, np.bool_, object, torch.float32, torch.bfloat16]
)
@pytest.mark.parametrize("place", [2, 3])
def test_ends_of_episodes_may_be_numbers_or_objects(place: int, dtype: Any) -> None:
    ends = [False, True, True, False]
    if isinstance(dtype, torch.dtype):
        given: Any = torch.tensor(ends).to(dtype)
    else:
        given = np.array(ends).astype(dtype)
    flags = begin(Giving(place, given))[place]
    assert flags.dtype in (np.bool_, torch.bool)
    assert flags.tolist() == ends


def test_a_part_of_observations_that_is_lacking_or_wrong_is_named() -> None:
    class Parts(NativeAsTrees):
        lacking = False

        def reset(self, **arguments: Any) -> Any:
            observations, infos = super().reset(**arguments)
            if self.lacking:
                del observations["count"]
            else:
                observations["count"] = observations["count"][:1]
            return observations, infos

    env = Parts(native())
    vector = AcceptedVector(env, "it")
    with pytest.raises(EnvironmentFailed, match="observations at 'count' are int64"):
        vector.reset(seed=1)
    env.lacking = True
    with pytest.raises(EnvironmentFailed, match=r"other parts than Dict.*KeyError: 'count'"):
        vector.reset(seed=1)


# `terminated` and `truncated` are true or false: a step that says something else is an error.


class Says(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, terminated: Any = False, truncated: Any = False) -> None:
        self.ends = terminated, truncated

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, *self.ends, {}


def vector(vectorize: str, **env_kwargs: Any) -> VectorEnv[Any, Any, Any]:
    config = EnvRunnerConfig(env="mine", envs_per_runner=2, vectorize=vectorize)
    return make_vector_env(config, functools.partial(Says, **env_kwargs))


@pytest.mark.parametrize(
    ("vectorize", "ends", "said"),
    [
        ("sync", {"terminated": "yes"}, "terminated must be True or False"),
        ("async", {"truncated": "no"}, "truncated must be True or False, not 'no'"),
        ("sync", {"truncated": None}, "truncated must be True or False, not None"),
        ("sync", {"terminated": [True, False]}, "terminated must be True or False"),
        ("sync", {"terminated": np.ones(2, np.bool_)}, "must be True or False, not array("),
        ("sync", {"truncated": 2}, "truncated must be True or False, not 2"),
        ("sync", {"truncated": float("nan")}, "truncated must be True or False, not nan"),
    ],
)
def test_what_is_neither_true_nor_false_is_refused_in_a_sentence(
    vectorize: str, ends: Any, said: str
) -> None:
    env = vector(vectorize, **ends)
    try:
        env.reset(seed=0)
        with pytest.raises(EnvironmentFailed) as failed:
            env.step(np.zeros(2, np.int64))
    finally:
        env.close()
    assert said in failed.value.reason
    assert not failed.value.traceback


@pytest.mark.parametrize(
    ("vectorize", "yes"),
    [("sync", each) for each in (True, np.True_, np.array(True), 1, np.ones(1), np.int8(1))]
    + [("async", 1)],
)
def test_what_is_true_may_also_be_a_number_or_an_array_of_one(vectorize: str, yes: Any) -> None:
    env = vector(vectorize, terminated=yes, truncated=0)
    try:
        env.reset(seed=0)
        _, _, terminated, truncated, _ = env.step(np.zeros(2, np.int64))
    finally:
        env.close()
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert terminated.tolist() == [True, True]
    assert truncated.tolist() == [False, False]


# The faster look at actions says what Gymnasium's says.


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
