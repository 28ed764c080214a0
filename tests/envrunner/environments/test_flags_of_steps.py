"""`terminated` and `truncated` are true or false: a step that says something else is an error."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.wire.flags import NoFlag, as_flag, as_flags


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
        ("sync", {"terminated": "yes"}, "terminated must be True or False, not 'yes'"),
        ("async", {"truncated": "no"}, "truncated must be True or False, not 'no'"),
        ("sync", {"truncated": None}, "truncated must be True or False, not None"),
        ("sync", {"terminated": [True, False]}, "terminated must be True or False, not [True,"),
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


def test_many_flags_are_taken_as_one_is() -> None:
    assert as_flags("truncated", [1, 0, True]).tolist() == [True, False, True]
    assert as_flag("truncated", np.False_) is False
    for given in (["yes", "no"], [0.5, 1], [None, True]):
        with pytest.raises(NoFlag, match="truncated must be True or False, not"):
            as_flags("truncated", given)
