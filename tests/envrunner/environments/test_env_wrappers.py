"""Wrappers that a config names, and environments that a script registers."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.script_classes import is_of_a_script, own_classes, pack
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.failures import EnvironmentFailed

CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
TIMED = ["TimeAwareObservation", {"use": "ReshapeObservation", "shape": [5, 1]}]


class Doubled(gymnasium.RewardWrapper[Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], factor: float) -> None:
        super().__init__(env)
        self._factor = factor

    def reward(self, reward: Any) -> Any:
        return self._factor * reward


@pytest.mark.parametrize("env", ["CartPole-v1", CARTPOLE])
def test_the_last_one_is_the_outermost_and_options_reach_them(env: str) -> None:
    own = {"use": f"{__name__}:Doubled", "factor": 3.0}
    limit = {"use": "TimeLimit", "max_episode_steps": 2}
    config = EnvRunnerConfig(env=env, envs_per_runner=2, env_wrappers=[limit, *TIMED, own])
    made = make_vector_env(config)
    try:
        assert made.single_observation_space.shape == (5, 1), "its shape came as a tuple"
        made.reset(seed=1)
        _, rewards, *_ = made.step(np.zeros(2, np.int64))
        _, _, _, truncated, _ = made.step(np.zeros(2, np.int64))
        assert rewards.tolist() == [3.0, 3.0]
        assert truncated.all()
    finally:
        made.close()


@pytest.mark.parametrize(
    ("wrappers", "said"),
    [
        (["TimeAwareObservatio"], "did you mean 'TimeAwareObservation'?"),
        ([{"factor": 2}], "a table with a 'use'"),
        ([3], "not 3"),
    ],
)
def test_a_name_that_is_none_is_told_by_the_config(wrappers: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match="env_wrappers: ") as wrong:
        EnvRunnerConfig(env_wrappers=wrappers).validate()
    assert said in str(wrong.value)


@pytest.mark.parametrize(
    "elsewhere",
    [{"env": "dm_env_rpc://h:1"}, {"env": "envpool:Pong-v5"}, {"gateway": "127.0.0.1:0"}],
)
def test_what_python_does_not_step_is_not_wrapped(elsewhere: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leave them out"):
        EnvRunnerConfig(env_wrappers=TIMED, **elsewhere).validate()


def test_vectors_are_not_wrapped() -> None:
    def vector() -> CartPoleVectorEnv:
        return CartPoleVectorEnv(num_envs=2)

    config = EnvRunnerConfig(envs_per_runner=2, env_wrappers=TIMED)
    with pytest.raises(EnvironmentFailed, match="makes a CartPoleVectorEnv: let it wrap its own"):
        make_vector_env(config, vector)
    config.vectorize = "native"
    with pytest.raises(ValueError, match="CartPole-v1 has wrappers; use auto, sync or async"):
        make_vector_env(config)


def test_options_that_a_wrapper_does_not_take_are_told() -> None:
    config = EnvRunnerConfig(envs_per_runner=1, env_wrappers=[{"use": "TimeLimit", "steps": 5}])
    with pytest.raises(EnvironmentFailed, match=r"failed in constructor: TypeError: .*'steps'"):
        make_vector_env(config)


class OwnWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    pass


def test_a_class_among_wrappers_is_named_if_other_processes_can_import_it() -> None:
    keys: dict[str, Any] = {"env_wrappers": [OwnWrapper, {"use": OwnWrapper, "k": 2}, "ClipReward"]}
    own_classes(keys)
    name = f"{__name__}:OwnWrapper"
    assert keys["env_wrappers"] == [name, {"use": name, "k": 2}, "ClipReward"]
    script = type("Script", (OwnWrapper,), {"__module__": "__main__"})
    with pytest.raises(ConfigError, match=r"Script is of a script.*env=lambda: Script\("):
        own_classes({"env_wrappers": [script]})


@pytest.mark.parametrize("entry_point", ["__main__:OfScript", CartPoleEnv])
def test_an_environment_that_a_script_registers_is_there_in_workers(
    entry_point: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "OfScript", CartPoleEnv, raising=False)
    spec = EnvSpec("OfScript-v0", entry_point)
    monkeypatch.setitem(gymnasium.registry, "OfScript-v0", spec)
    config = RunConfig.from_flat({"env": "OfScript-v0"})
    own_code = pack(config, "OfScript-v0", None, {})
    assert is_of_a_script(config)
    monkeypatch.delitem(gymnasium.registry, "OfScript-v0")
    cloudpickle.loads(own_code)
    assert gymnasium.make("OfScript-v0").unwrapped.__class__ is CartPoleEnv


def test_what_gymnasium_registers_is_no_environment_of_a_script() -> None:
    assert pack(RunConfig(), None, None, {}) == b""
