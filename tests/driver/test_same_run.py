"""A run that is resumed keeps its modules, and a league its players."""

from __future__ import annotations

from typing import Any

import pytest

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.same_run import changes, must_be_of_one_run
from juggler.runtime.checkpoints.checkpoint import Checkpoint

ONE, TWO = {"builder": "self_play"}, {"builder": "none", "options": {"mains": 2}}
AGENTS = {"row": ["main-0"], "column": ["main-0"]}


def config(**keys: Any) -> RunConfig:
    return RunConfig.from_flat({"env": "juggler:MatrixGame", "algorithm": "ppo", **keys})


def checkpoint_of(run: RunConfig) -> Checkpoint:
    return Checkpoint((1, 0), {}, {}, {}, run.flat(), {})


def test_a_league_may_be_another_one_that_begins_with_the_same_players() -> None:
    before = config(agents=AGENTS, league=ONE)
    now = config(agents=AGENTS, league={"builder": "fictitious", "max_historical": 5})
    must_be_of_one_run(now, checkpoint_of(before))


def test_a_league_of_other_players_is_told_of_by_its_own_table() -> None:
    before, now = config(agents=AGENTS, league=ONE), config(agents=AGENTS, league=TWO)
    with pytest.raises(ConfigError) as caught:
        must_be_of_one_run(now, checkpoint_of(before))
    assert str(caught.value) == (
        "league: this run began with the players 'main-0', and with what is given it would be "
        "'main-0' and 'main-1': a run that is resumed keeps its players"
    )


@pytest.mark.parametrize(("had", "has"), [({}, ONE), (ONE, {})])
def test_a_run_gets_no_league_and_loses_none(had: dict[str, Any], has: dict[str, Any]) -> None:
    before, now = (config(agents=AGENTS, league=league) for league in (had, has))
    says = f"league: this run has {'a' if had else 'no'} league"
    with pytest.raises(ConfigError, match=says):
        must_be_of_one_run(now, checkpoint_of(before))


def test_connectors_that_a_run_has_not_learned_with_are_told_by_module_and_pipeline() -> None:
    plain = config()
    filtered = config(connectors={"env_to_module": ["mean_std_filter"]})
    assert changes(plain, plain) == changes(filtered, filtered) == []
    (told,) = changes(filtered, plain)
    assert told.startswith(
        "connectors.env_to_module had nothing, and has mean_std_filter now: the weights were"
    )
    agents = {"agents": {"row": "main", "column": "other"}}
    clipped = {"connectors": {"learner": [{"use": "clip_rewards", "limit": 5.0}]}}
    before = config(**agents, modules={"main": {}, "other": clipped})
    now = config(**agents, modules={"main": {}, "other": {}})
    (told,) = changes(now, before)
    assert told.startswith(
        "modules.other: connectors.learner had clip_rewards with {'limit': 5.0}, and has nothing"
    )


@pytest.mark.parametrize("algorithm", ["dqn", "sac", "td3", "iql"])
def test_sums_that_were_kept_with_another_gamma_or_n_step_are_told(algorithm: str) -> None:
    before = config(algorithm=algorithm, gamma=0.9, n_step=3)
    assert changes(config(algorithm=algorithm, gamma=0.9, n_step=3, lr=0.1), before) == []
    now = config(algorithm=algorithm, gamma=0.5, n_step=1)
    of_gamma, of_n_step = changes(now, before)
    assert of_gamma.startswith("gamma was 0.9, and is 0.5 now: steps in the replay of the check")
    assert of_n_step.startswith("n_step was 3, and is 1 now: ")
    unsaved = config(algorithm=algorithm, gamma=0.5, save_replay=False)
    assert changes(unsaved, before) == changes(now, unsaved) == []


def test_steps_that_are_kept_as_they_came_know_no_gamma() -> None:
    for algorithm in ("r2d2", "impala", "ppo"):
        before, now = (config(algorithm=algorithm, gamma=gamma) for gamma in (0.9, 0.5))
        assert changes(now, before) == []
