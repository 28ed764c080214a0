"""Configurations that ship, by task and algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.algorithms import acts_in_choices, needs_memory

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.given_config import load_config
from juggler.driver.shipped import shipped_configs
from juggler.driver.training import train
from juggler.learner.algorithms.registry import ALGORITHMS


def test_a_task_ships_with_settings_for_each_algorithm() -> None:
    assert load_config("cartpole").learner.algorithm == "impala"
    for algorithm, each in ALGORITHMS.items():
        if each.offline:  # its task is a data set
            continue
        task, env = "cartpole", "CartPole-v1"
        if needs_memory(algorithm):
            task = "memory-cartpole"
            env = "juggler.envrunner.memory_cartpole:MemoryCartPole-v0"
        elif not acts_in_choices(algorithm):
            task, env = "pendulum", "Pendulum-v1"
        config = load_config(task, algorithm)
        assert config.learner.algorithm == algorithm
        assert config.env_runner.env == env
    assert load_config("cartpole", "ppo") == load_config("cartpole-ppo")
    assert load_config("cartpole-ppo", "ppo") == load_config("cartpole-ppo")


def test_a_task_without_settings_for_an_algorithm_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"'cartpole-ppo' has settings for .*'ppo', and none ship"
    ):
        load_config("cartpole-ppo", "appo")
    same = r"in CartPole-v1: give one of cartpole, cartpole-appo, .*cartpole-sac, or a .toml file"
    with pytest.raises(ConfigError, match=rf"{same}. --env CartPole-v1 --algorithm r2d2 trains"):
        load_config("cartpole", "r2d2")
    with pytest.raises(
        ConfigError, match=r"'td3' needs a Box .*Discrete\(2\): choose .* appo or d"
    ):
        load_config("cartpole", "td3")
    with pytest.raises(ConfigError, match=r"algorithm = 'pppo' is not known: did you mean 'ppo'\?"):
        load_config("cartpole", "pppo")
    with pytest.raises(
        ConfigError, match=f"no configuration 'cart'.*: .*{', '.join(shipped_configs())}"
    ):
        load_config("cart", "ppo")


def test_every_name_is_that_of_its_task_and_algorithm() -> None:
    for name in shipped_configs():
        config = load_config(name)
        task, _, algorithm = name.rpartition("-")
        if algorithm in ALGORITHMS:
            assert config.learner.algorithm == algorithm
            assert config.env_runner.env == load_config(task).env_runner.env


def test_no_file_and_an_algorithm_are_its_defaults() -> None:
    assert load_config(None, "ppo") == RunConfig.from_flat({"algorithm": "ppo"})
    assert load_config(None) == RunConfig()


@pytest.mark.parametrize("said", ['c_bar = 0.5\nalgorithm = "ppo"', "c_bar = 0.5"])
def test_a_file_for_another_algorithm_is_refused_by_the_first_key_that_does_not_fit(
    tmp_path: Path, said: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(said)
    with pytest.raises(
        ConfigError, match="'c_bar' is a key of appo and impala, and algorithm = 'ppo'"
    ):
        load_config(path, "ppo")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"epochs": 3}, "'epochs' is a key of ppo and pqn, and algorithm = 'impala'"),
        ({"algorithm": "ppo", "buffer_batches": 3}, "'buffer_batches' is a key of appo, and"),
    ],
)
def test_keys_of_python_are_refused_in_the_same_way(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train("cartpole", **keys)
