"""Runs with modules that only play, and line-ups for each episode."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.place import assert_books_balance, metrics, summary

import juggler
from juggler.driver.config import ConfigError
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.checkpoints.weights import playing_tree, read_module, tree_digest

pytestmark = pytest.mark.usefixtures("local_workers")

PAIR: dict[str, Any] = {
    "env": "support.small_games:Pair",
    "num_env_runners": 1,
    "envs_per_runner": 4,
    "fragment_steps": 8,
    "batch_size": 64,
    "progress": "off",
}
AGENTS = {"left": "main", "right": ["old", "random"]}


def assert_only_main_is_trained(run_dir: Path) -> None:
    lines = [*metrics(run_dir), summary(run_dir)]
    assert_books_balance(run_dir)
    for line in lines:
        modules = line["by_module"]
        main = modules["main"]
        for count in ("env_steps_sampled", "env_steps_trained", "env_steps_in_flight"):
            assert line[count] == main[count], "the books are of what is trained"
        assert set(modules["old"]) == {
            "env_steps_played",
            "episodes",
            "episode_return_mean",
            "episode_length_mean",
            "evaluation_return_mean",
        }
    end = summary(run_dir)["by_module"]
    assert end["old"]["env_steps_played"] > 0
    assert end["random"]["env_steps_played"] > 0
    assert end["main"]["episodes"] > 0
    saved = read(run_dir)
    assert saved.module_ids == ("main",)
    assert not any("old" in name for name in saved.tree)


def test_steps_of_modules_that_are_not_trained_never_reach_a_learner(tmp_path: Path) -> None:
    old, run_dir = tmp_path / "old", tmp_path / "run"
    juggler.train(**PAIR, stop_steps=200, run_dir=str(old))
    digest = tree_digest(playing_tree(read(old), "default"))
    tables = {"agents": AGENTS, "modules": {"old": {"train": False, "from": str(old)}}}
    result = juggler.train(**PAIR, **tables, stop_steps=1000, run_dir=str(run_dir))
    assert_only_main_is_trained(run_dir)
    by_module = result.summary["by_module"]
    # Both agents act at the same time, so as much is played as is sampled, but for the two requests
    # of which only the learner may have told when the run ends: 8 steps in 4 environments each.
    against = by_module["old"]["env_steps_played"] + by_module["random"]["env_steps_played"]
    assert 0 <= by_module["main"]["env_steps_sampled"] - against <= 2 * 4 * 8
    assert by_module["main"]["episodes"] == pytest.approx(
        by_module["old"]["episodes"] + by_module["random"]["episodes"], abs=4
    )
    assert tree_digest(playing_tree(*read_module(f"{run_dir}:old"))) == digest
    assert read(run_dir).config["modules"]["old"]["digest"] == digest

    # Without the run that it came from, this one goes on, is evaluated, and plays matches.
    shutil.rmtree(old)
    again = juggler.resume(run_dir, stop_steps=1500)
    assert_only_main_is_trained(run_dir)
    for module_id in ("old", "random"):
        before, after = (each.summary["by_module"][module_id] for each in (result, again))
        assert after["env_steps_played"] > before["env_steps_played"]
    assert tree_digest(playing_tree(*read_module(f"{run_dir}:old"))) == digest
    assert len(juggler.evaluate(run_dir, 6).returns) == 6
    policy = juggler.load_policy(run_dir, module_id="old")
    assert policy.action_space.contains(policy.act(np.zeros(3, np.float32))[0])
    record = juggler.play_matches(run_dir, {"right": "old", "left": "random"}, 10).records["right"]
    assert record.wins + record.draws + record.losses == 10
    with pytest.raises(ConfigError, match="agent 'right'"):
        juggler.play_matches(run_dir, {"left": "random"}, 10)
    with pytest.raises(ConfigError, match=r"modules\.old"):
        juggler.resume(run_dir, modules={"old": {"train": False, "from": "elsewhere"}})
