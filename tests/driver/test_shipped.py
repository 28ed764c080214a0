"""Shipped configurations, and the results that their files state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.pages import ROOT
from support.small_cores import acts_in_choices, needs_memory

import juggler.driver.configs
from juggler.driver import config_files as shipped
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import (
    MedianResults,
    load_config_and_keys,
    read_shipped,
    shipped_configs,
)
from juggler.learner.algorithms.registry import ALGORITHMS

CONFIGS = Path(juggler.driver.configs.__path__[0])
SEEN = """
[seen]
episode_return = 476.5
env_steps = 430_000
seconds = 4.1
seeds = 3
machine = "2 cores, AMD EPYC"
"""


@pytest.fixture
def in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that ship."""
    monkeypatch.setattr(shipped, "_CONFIGS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", shipped_configs())
def test_each_has_a_goal_and_a_head_that_names_its_algorithm(name: str) -> None:
    found = read_shipped(name)
    goal = found.config.driver
    assert goal.stop_return is not None or goal.stop_steps is not None
    head = (CONFIGS / f"{name}.toml").read_text().partition("\n")[0]
    assert re.search(rf"\b{found.config.learner.algorithm.upper()}\b", head), head


def test_what_was_seen_is_beside_the_configuration(in_a_package: Path) -> None:
    (in_a_package / "mine.toml").write_text(f"lr = 0.5\n{SEEN}")
    found = read_shipped("mine")
    assert found.config == RunConfig.from_flat({"lr": 0.5})
    assert found.seen == MedianResults(476.5, 430_000, 4.1, 3, "2 cores, AMD EPYC")
    assert load_config_and_keys("mine")[0] == found.config


def test_figures_from_benchmarks_are_on_the_page_that_is_named() -> None:
    for name in shipped_configs():
        if isinstance(said := read_shipped(name).seen, str):
            (page,) = re.findall(r"\((benchmarks/\S+)\)$", said)
            text = (ROOT / page).read_text()
            figures = re.findall(r"-?\d[\d.,]*", said.partition(";")[0].rstrip(","))
            assert [each for each in figures if each.strip(",.") not in text] == [], name


@pytest.mark.parametrize(
    ("line", "words"), [("machine", "machine"), ("seconds", "seconds"), ("seeds", "seeds")]
)
def test_half_of_the_table_is_refused(in_a_package: Path, line: str, words: str) -> None:
    without = "\n".join(each for each in SEEN.splitlines() if not each.startswith(line))
    (in_a_package / "mine.toml").write_text(without)
    with pytest.raises(ConfigError, match=rf"mine\.toml: seen: .*{words}"):
        read_shipped("mine")


def test_a_file_of_ones_own_says_nothing_of_what_was_seen(tmp_path: Path) -> None:
    file = tmp_path / "copied.toml"
    file.write_text(f"lr = 0.5\n{SEEN}")
    with pytest.raises(ConfigError, match="leave it out of your file"):
        load_config_and_keys(file)[0]


# Configurations that ship, by task and algorithm.


def test_a_task_ships_with_settings_for_each_algorithm() -> None:
    assert load_config_and_keys("cartpole")[0].learner.algorithm == "impala"
    for algorithm, each in ALGORITHMS.items():
        if each.offline:  # its task is a data set
            continue
        task, env = "cartpole", "CartPole-v1"
        if needs_memory(algorithm):
            task = "memory-cartpole"
            env = "juggler.envrunner.memory_cartpole:MemoryCartPole-v0"
        elif not acts_in_choices(algorithm):
            task, env = "pendulum", "Pendulum-v1"
        config = load_config_and_keys(task, algorithm)[0]
        assert config.learner.algorithm == algorithm
        assert config.env_runner.env == env
    assert load_config_and_keys("cartpole", "ppo")[0] == load_config_and_keys("cartpole-ppo")[0]
    assert load_config_and_keys("cartpole-ppo", "ppo")[0] == load_config_and_keys("cartpole-ppo")[0]


def test_a_task_without_settings_for_an_algorithm_is_named() -> None:
    with pytest.raises(ConfigError, match="'cartpole-ppo' has settings for"):
        load_config_and_keys("cartpole-ppo", "appo")[0]
    same = r"in CartPole-v1: give one of cartpole, cartpole-appo, .*cartpole-sac, or a .toml file"
    with pytest.raises(ConfigError, match=rf"{same}. --env CartPole-v1 --algorithm r2d2 trains"):
        load_config_and_keys("cartpole", "r2d2")[0]
    with pytest.raises(ConfigError, match="'td3' needs a Box"):
        load_config_and_keys("cartpole", "td3")[0]
    with pytest.raises(ConfigError, match="algorithm = 'pppo' is not known"):
        load_config_and_keys("cartpole", "pppo")[0]
    with pytest.raises(
        ConfigError, match=f"no configuration 'cart'.*: .*{', '.join(shipped_configs())}"
    ):
        load_config_and_keys("cart", "ppo")[0]


def test_every_name_is_that_of_its_task_and_algorithm() -> None:
    for name in shipped_configs():
        config = load_config_and_keys(name)[0]
        task, _, algorithm = name.rpartition("-")
        if algorithm in ALGORITHMS:
            assert config.learner.algorithm == algorithm
            assert config.env_runner.env == load_config_and_keys(task)[0].env_runner.env
