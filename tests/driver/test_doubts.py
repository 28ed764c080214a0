"""What can be meant in a configuration, and hardly is, is told when a run starts."""

from __future__ import annotations

import pytest

from juggler.driver.config import RunConfig
from juggler.driver.shipped import read_shipped, shipped_configs


@pytest.mark.parametrize("piece", ["clip_rewards", "normalize_rewards"])
def test_rewards_that_are_scaled_twice_are_a_doubt_that_names_both(piece: str) -> None:
    learner = {"connectors": {"learner": [piece]}}
    (doubt,) = RunConfig.from_flat({**learner, "reward_scale": 0.02}).doubts()
    assert "reward_scale = 0.02" in doubt
    assert f"{piece} in connectors.learner" in doubt
    assert RunConfig.from_flat({**learner, "reward_scale": 1.0}).doubts() == []
    assert RunConfig.from_flat({"reward_scale": 0.02}).doubts() == []


@pytest.mark.parametrize("algorithm", ["dqn", "r2d2", "sac", "td3", "iql"])
def test_rewards_that_are_normalized_before_they_are_kept_are_doubted(algorithm: str) -> None:
    learner = {"connectors": {"learner": ["normalize_rewards"]}}
    (doubt,) = RunConfig.from_flat({**learner, "algorithm": algorithm}).doubts()
    assert "normalize_rewards" in doubt
    assert algorithm in doubt
    assert "reward_scale" in doubt
    assert RunConfig.from_flat({**learner, "algorithm": "pqn"}).doubts() == []


def test_runners_that_would_always_wait_for_requests_are_doubted() -> None:
    sizes = {"envs_per_runner": 16, "fragment_steps": 32, "batch_size": 480, "max_staleness": 6}
    assert RunConfig.from_flat({**sizes, "num_env_runners": 3}).doubts() == []
    (doubt,) = RunConfig.from_flat({**sizes, "num_env_runners": 15}).doubts()
    assert doubt.startswith("at most 3 of the 15 EnvRunners sample at a time")
    assert "batch_size = 2560" in doubt
    several = {"agents": {"*": "default"}}  # whose number is not known
    for other in ({"batch_size": 2560}, {"synchronous": True}, several):
        assert RunConfig.from_flat({**sizes, "num_env_runners": 15, **other}).doubts() == []
    # Each fragment is an update of a learner by itself, and three may be open.
    two = {**sizes, "num_learners": 2}
    assert RunConfig.from_flat({**two, "num_env_runners": 6}).doubts() == []
    (doubt,) = RunConfig.from_flat({**two, "num_env_runners": 7}).doubts()
    assert doubt.startswith("at most 6 of the 7 EnvRunners sample at a time")
    assert RunConfig.from_flat({**two, "num_env_runners": 7, "batch_size": 1536}).doubts() == []
    assert "batch_size = 1536" in doubt


def test_keys_without_effect_are_doubted_and_not_refused_since_older_runs_have_them() -> None:
    (doubt,) = RunConfig.from_flat({"evaluation_episodes": 20}).doubts()
    assert doubt.startswith("evaluation_episodes = 20 has no effect: there are no evaluations")
    evaluated = {"evaluation_episodes": 20, "evaluation_seconds": 1.0}
    assert RunConfig.from_flat(evaluated).doubts() == []
    agents = {"agents": {"*": "a"}, "modules": {"a": {"waited_for": False}}}
    assert RunConfig.from_flat(agents).doubts() == []
    (doubt,) = RunConfig.from_flat({**agents, "synchronous": True}).doubts()
    assert doubt.startswith("modules.a: waited_for = false with synchronous = true has no effect")


def test_more_old_steps_than_are_kept_are_doubted() -> None:
    share = {"replay_share": 0.5, "batch_size": 512}
    assert RunConfig.from_flat({**share, "replay_capacity": 512}).doubts() == []
    (doubt,) = RunConfig.from_flat({**share, "replay_capacity": 511}).doubts()
    assert doubt.startswith("replay_share = 0.5 asks for 512 old steps beside the 512 new ones")


def test_a_synchronous_run_is_told_that_an_age_has_no_effect() -> None:
    assert RunConfig.from_flat({"max_staleness": 3}).doubts() == []
    assert RunConfig.from_flat({"synchronous": True}).doubts() == []
    (doubt,) = RunConfig.from_flat({"max_staleness": 3, "synchronous": True}).doubts()
    assert doubt.startswith("max_staleness = 3 with synchronous = true has no effect")


@pytest.mark.parametrize("name", shipped_configs())
def test_what_ships_leaves_no_doubt(name: str) -> None:
    assert read_shipped(name).config.doubts() == []


def test_a_league_with_evaluations_is_told_that_it_keeps_no_best_checkpoint() -> None:
    flat = read_shipped("rock-paper-scissors-league").config.flat()
    (doubt,) = RunConfig.from_flat({**flat, "evaluation_seconds": 30.0}).doubts()
    assert "evaluation_seconds = 30 keeps no best checkpoint" in doubt
