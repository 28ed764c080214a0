"""Whole runs with several agents and several modules."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.place import assert_books_balance, metrics, summary

import juggler
from juggler.driver.config import ConfigError
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.checkpoints.weights import playing_tree, read_module, tree_digest
from juggler.runtime.wire.trees import flatten

pytestmark = pytest.mark.usefixtures("local_workers")


# A run with several agents and two algorithms: training, resuming, evaluating, acting.


RUN: dict[str, Any] = {
    "env": "support.small_games:Tag",
    "modules": {"runner": {"algorithm": "ppo", "batch_size": 64, "minibatches": 1}},
    "num_env_runners": 1,
    "progress": "off",
}


@pytest.fixture(scope="module")
def trained(workers_of_module: None, tmp_path_factory: pytest.TempPathFactory) -> juggler.Result:
    run_dir = tmp_path_factory.mktemp("runs") / "tag"
    return juggler.train(**RUN, stop_steps=2000, run_dir=str(run_dir))


@pytest.mark.slow
def test_modules_with_different_algorithms_learn_side_by_side(trained: juggler.Result) -> None:
    assert trained.checkpoint is not None
    saved = read(trained.checkpoint)
    assert saved.module_ids == ("adversary", "runner")
    algorithms = {name: saved.modules[name]["extra"]["algorithm"] for name in saved.modules}
    assert algorithms == {"adversary": "impala", "runner": "ppo"}
    steps = {name: saved.counters_of(name)["trained"] for name in saved.modules}
    assert min(steps.values()) > 0
    assert sum(steps.values()) == saved.counters["trained"] >= 2000
    assert saved.config["agents"] == {
        "adversary_0": "adversary",
        "adversary_1": "adversary",
        "runner_0": "runner",
    }


def test_such_a_run_is_resumed_with_every_module_at_its_version(
    trained: juggler.Result, tmp_path: Path
) -> None:
    assert trained.checkpoint is not None
    before = read(trained.checkpoint)
    later = juggler.resume(trained.run_dir, stop_steps=3000)
    assert later.checkpoint is not None
    after = read(later.checkpoint)
    for module_id in before.module_ids:
        (generation, update), newer = before.version_of(module_id), after.version_of(module_id)
        assert newer[0] == generation + 1
        assert newer[1] > update
    assert later.summary["env_steps_trained"] >= 3000


def test_whole_episodes_of_all_agents_are_evaluated(trained: juggler.Result) -> None:
    played = juggler.evaluate(trained.run_dir, 3)
    assert played.returns == [15.0] * 3, "the sum over three agents, each of which gets 1 a step"
    assert played.lengths == [5] * 3


# Runs whose value functions see the game's state, or all observations.


OF_BITS: dict[str, Any] = {
    "env": "support.small_games:HiddenBits",
    "algorithm": "ppo",
    "batch_size": 192,
    "minibatches": 1,
    "envs_per_runner": 4,
    "fragment_steps": 8,
    "num_env_runners": 1,
    "progress": "off",
    "synchronous": True,
    "checkpoint_updates": 2,
    "stop_steps": 800,
}


@pytest.fixture(scope="module")
def trained_on_bits(tmp_path_factory: pytest.TempPathFactory) -> juggler.Result:
    run_dir = tmp_path_factory.mktemp("runs") / "bits"
    return juggler.train(**OF_BITS, critic_sees="state", run_dir=str(run_dir))


def critics_inputs(state: Any) -> int:
    """The numbers that the value function of a saved module takes."""
    first = min(
        name for name in state["parameters"] if "value_encoder" in name and name.endswith("weight")
    )
    return int(state["parameters"][first].shape[1])


@pytest.mark.slow
def test_its_policy_acts_with_what_its_agent_sees(
    trained_on_bits: juggler.Result, tmp_path: Path
) -> None:
    policy = juggler.load_policy(trained_on_bits.run_dir)
    action, _ = policy.act(np.ones(1, np.float32))
    assert policy.action_space.contains(action)
    played = juggler.evaluate(trained_on_bits.run_dir, 4)
    assert played.lengths == [3] * 4
    assert critics_inputs(read(trained_on_bits.run_dir).tree["default"]) == 3, (
        "its own bit, and both"
    )


def test_modules_of_a_run_have_critics_of_their_own(tmp_path: Path) -> None:
    result = juggler.train(
        **{**OF_BITS, "batch_size": 96},
        agents={"left": "one", "right": "other"},
        modules={"other": {"critic_sees": "all_observations", "algorithm": "impala"}},
        run_dir=str(tmp_path / "run"),
    )
    tree = read(result.run_dir).tree
    assert critics_inputs(tree["one"]) == 1
    assert critics_inputs(tree["other"]) == 3


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"env": "CartPole-v1"}, "has one agent, whose value function sees its observation"),
        ({"env": "support.small_games:Tag"}, r"the environment Tag has no state\(\)"),
        ({"algorithm": "pqn"}, "the values of QNetwork come only from observations"),
        ({"gateway": "127.0.0.1:0"}, "simulators send what an agent observes"),
        ({"critic_sees": "stat"}, "'stat' is not known: did you mean 'state'"),
    ],
)
def test_where_there_is_no_more_to_see_is_told_before_the_run_begins(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    run = {**OF_BITS, "critic_sees": "state", "run_dir": str(tmp_path / "run"), **keys}
    if keys.get("algorithm") == "pqn":
        del run["minibatches"]
    with pytest.raises(ConfigError, match=said):
        juggler.train(**run)
    assert not (tmp_path / "run").exists()


# Runs with modules that only play, and line-ups for each episode.


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


# Runs whose modules share an encoder: trained by both, and resumed.


SHARING: dict[str, Any] = {
    "env": "juggler:MatrixGame",
    "agents": {"row": "row", "column": "column"},
    "modules": {"column": {"algorithm": "ppo", "lr": 1e-3}},
    "shared": {"encoder.*": ["row", "column"]},
    "model": {"hidden_sizes": [8]},
    "batch_size": 64,
    "num_env_runners": 1,
    "progress": "off",
}
EXACT: dict[str, Any] = {**SHARING, "synchronous": True, "checkpoint_updates": 4}


def parts(tree: Mapping[str, Any], module_id: str, prefix: str) -> dict[str, Any]:
    """A module's parameters with this prefix, and their moments."""
    own = tree[module_id]
    branches = {"parameters": own["parameters"], **own["moments"]}
    return {
        f"{branch} {name}": array
        for branch, arrays in branches.items()
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def counts(tree: Mapping[str, Any], module_id: str, prefix: str) -> set[float]:
    """Number of updates of these parameters."""
    found = parts(tree, module_id, f"{prefix}")
    return {float(x) for name, each in found.items() if name[:7] == "updates" for x in each.flat}


def assert_encoders_are_equal(run_dir: Path) -> Mapping[str, Any]:
    tree = read(run_dir).tree
    row, column = (parts(tree, each, "encoder.") for each in ("row", "column"))
    assert len(row) > 4
    np.testing.assert_equal(row, column)
    heads = (parts(tree, each, "policy_head.") for each in ("row", "column"))
    one, other = (each["parameters policy_head.weight"] for each in heads)
    assert not np.array_equal(one, other)
    return tree


@pytest.mark.slow
def test_a_resumed_synchronous_run_equals_one_without_a_break(tmp_path: Path) -> None:
    whole = juggler.train(**EXACT, stop_steps=1500, run_dir=str(tmp_path / "whole"))
    names = sorted(each.name for each in (tmp_path / "whole" / "checkpoints").glob("0*"))
    half = read(tmp_path / "whole" / "checkpoints" / names[0])
    juggler.train(**EXACT, stop_steps=half.counters["trained"], run_dir=str(tmp_path / "broken"))
    at_half = read(tmp_path / "broken")
    assert flatten_equal(at_half.tree, half.tree), "a second run of the same seed"
    juggler.resume(tmp_path / "broken", stop_steps=1500)
    end = read(whole.run_dir)
    assert end.counters["trained"] > half.counters["trained"]
    assert flatten_equal(read(tmp_path / "broken").tree, end.tree)

    tree = assert_encoders_are_equal(whole.run_dir)
    steps = {each: counts(tree, each, "policy_head.") for each in ("row", "column")}
    assert all(len(each) == 1 for each in steps.values())
    (shared,) = counts(tree, "row", "encoder.")
    assert shared == sum(min(each) for each in steps.values()), "both have trained it"
    with pytest.raises(ConfigError, match="share"):
        juggler.resume(tmp_path / "broken", stop_steps=3000, shared={"*": ["row", "column"]})


def flatten_equal(one: Any, other: Any) -> bool:
    first, second = dict(flatten(one)), dict(flatten(other))
    return first.keys() == second.keys() and all(
        np.array_equal(first[path], second[path]) for path in first
    )
