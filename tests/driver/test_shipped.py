"""The configurations in the package, and what their files say that they were seen to reach."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.pages import ROOT

import juggler.driver.configs
from juggler.driver import shipped
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.given_config import load_config
from juggler.driver.shipped import Seen, read_shipped, shipped_configs

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
    """A directory whose files are those that ship."""
    monkeypatch.setattr(shipped, "_CONFIGS", tmp_path)
    return tmp_path


def test_there_is_one_for_each_of_these_tasks() -> None:
    assert set(shipped_configs()) >= {
        "acrobot",
        "breakout",
        "cartpole",
        "hopper",
        "kuhn-poker",
        "lunarlander",
        "memory-cartpole",
        "mountaincar-continuous",
        "pendulum",
        "pong",
    }


@pytest.mark.parametrize("name", shipped_configs())
def test_each_has_a_goal_and_a_head_that_names_its_algorithm(name: str) -> None:
    found = read_shipped(name)
    goal = found.config.driver
    assert goal.stop_return is not None or goal.stop_steps is not None
    head = (CONFIGS / f"{name}.toml").read_text().partition("\n")[0]
    assert re.search(rf"\b{found.config.learner.algorithm.upper()}\b", head), head


@pytest.mark.parametrize("name", shipped_configs())
def test_each_is_found_by_its_name_alone(name: str) -> None:
    assert load_config(name) == read_shipped(name).config


def test_what_was_seen_is_beside_the_configuration(in_a_package: Path) -> None:
    (in_a_package / "mine.toml").write_text(f"lr = 0.5\n{SEEN}")
    found = read_shipped("mine")
    assert found.config == RunConfig.from_flat({"lr": 0.5})
    assert found.seen == Seen(476.5, 430_000, 4.1, 3, "2 cores, AMD EPYC")
    assert load_config("mine") == found.config


def test_without_the_table_nothing_was_seen(in_a_package: Path) -> None:
    (in_a_package / "mine.toml").write_text("lr = 0.5\n")
    assert read_shipped("mine").seen is None


def test_a_sentence_with_figures_is_seen_as_it_is(in_a_package: Path) -> None:
    (in_a_package / "mine.toml").write_text('seen = "wins"\nlr = 0.5\n')
    assert read_shipped("mine").seen == "wins"
    assert read_shipped("mine").config == RunConfig.from_flat({"lr": 0.5})


def test_figures_from_benchmarks_are_on_the_page_that_is_named() -> None:
    for name in shipped_configs():
        if isinstance(said := read_shipped(name).seen, str):
            (page,) = re.findall(r"\((benchmarks/\S+)\)$", said)
            text = (ROOT / page).read_text()
            figures = re.findall(r"-?\d[\d.,]*", said.partition(";")[0].rstrip(","))
            assert [each for each in figures if each.strip(",.") not in text] == [], name


@pytest.mark.parametrize(
    ("line", "words"),
    [("machine", "machine"), ("seconds", "seconds"), ("seeds", "seeds")],
)
def test_half_of_the_table_is_refused(in_a_package: Path, line: str, words: str) -> None:
    without = "\n".join(each for each in SEEN.splitlines() if not each.startswith(line))
    (in_a_package / "mine.toml").write_text(without)
    with pytest.raises(ConfigError, match=rf"mine\.toml: seen: .*{words}"):
        read_shipped("mine")


def test_a_word_in_the_table_that_nobody_knows_is_refused(in_a_package: Path) -> None:
    (in_a_package / "mine.toml").write_text(f"{SEEN}luck = 1\n")
    with pytest.raises(ConfigError, match=r"mine\.toml: seen: .*luck"):
        read_shipped("mine")


def test_a_file_of_ones_own_says_nothing_of_what_was_seen(tmp_path: Path) -> None:
    file = tmp_path / "copied.toml"
    file.write_text(f"lr = 0.5\n{SEEN}")
    with pytest.raises(ConfigError, match="leave it out of a file of your own"):
        load_config(file)
