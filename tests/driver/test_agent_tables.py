"""Preflight's findings in environments of several agents, and choices for modules."""

from __future__ import annotations

from typing import Any

import pytest
from support.rehearsing import rehearse
from support.small_games import Tag

from juggler.driver.agent_tables import (
    FoundGroup,
    needs_environment,
    with_agents,
)
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.defaults import settled
from juggler.driver.preflight import PreflightError
from juggler.runtime.wire.spaces import space_to_message

pytestmark = pytest.mark.usefixtures("local_workers")

TAG = "support.small_games:Tag"
MAPPING = {"adversary_0": "adversary", "adversary_1": "adversary", "runner_0": "runner"}
GAME = Tag()
GROUPS = tuple(
    FoundGroup(
        agents,
        space_to_message(GAME.observation_space(agents[0])),
        space_to_message(GAME.action_space(agents[0])),
    )
    for agents in (("adversary_0", "adversary_1"), ("runner_0",))
)


def _config(**keys: Any) -> RunConfig:
    return RunConfig.from_flat({"env": TAG, **keys})


def test_a_rehearsal_finds_agents_and_builds_every_module() -> None:
    told: list[str] = []
    groups = rehearse(_config(), report=told.append)
    assert groups == GROUPS
    built = [text for text in dict.fromkeys(told) if text.startswith("building")]
    assert built == [
        f"building module {name!r} and its learner" for name in ("adversary", "runner")
    ]


def test_infos_without_an_agent_are_a_warning_that_is_given_once() -> None:
    warned: list[str] = []
    rehearse(_config(env="support.small_games:MisnamedTag"), warn=warned.append)
    assert warned == [
        "infos after step have 'touches', and no agent is called so: nothing reads that. Infos "
        "have a dict for each agent, as in {'adversary_0': {...}}"
    ]


def test_a_reward_that_is_not_finite_is_told_with_its_agent() -> None:
    said = r"agent 'runner_0' in environment 0 .* rewards are nan in step 2 after its first reset"
    with pytest.raises(PreflightError, match=said):
        rehearse(_config(env="support.small_games:UnpaidTag"))


def test_an_observation_outside_of_its_space_is_told_with_its_agent() -> None:
    said = r"agent 'runner_0' in environment 0 .* failed in step: its observation holds 9, .*\(4\)"
    with pytest.raises(PreflightError, match=said):
        rehearse(_config(env="support.small_games:MiscountingTag"))


OWN = "support.own_algorithms"


def test_every_algorithm_of_ones_own_makes_an_update_with_what_its_agents_do() -> None:
    told: list[str] = []
    modules = {"adversary": {"algorithm": f"{OWN}:Learning"}, "runner": {"algorithm": "ppo"}}
    assert rehearse(_config(modules=modules), report=told.append) == GROUPS
    assert f"trying an update of module 'adversary' with {OWN}:Learning" in told
    assert not [text for text in told if "update of module 'runner'" in text]


def test_a_replay_that_gets_no_rows_is_a_warning_with_its_module() -> None:
    warned: list[str] = []
    modules = {"adversary": {"algorithm": f"{OWN}:Keeping"}}
    rehearse(_config(modules=modules, fragment_steps=7), warn=warned.append)
    (told,) = warned
    assert told.startswith(
        f"module 'adversary': algorithm = '{OWN}:Keeping': `rows` of its replay kept none of "
        "the 14 steps of a fragment"
    )


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("Failing", "module 'adversary': KeyError: 'advantages'"),
        # Two agents, each of which acts in every step of one environment.
        ("Counting", "module 'adversary': RuntimeError: 14 steps"),
        ("Infinite", " steps, all of whose numbers are"),
        ("Many", "its core is a Population, and"),
    ],
)
def test_an_algorithm_of_ones_own_that_cannot_learn_is_told_with_its_module(
    algorithm: str, words: str
) -> None:
    modules = {"adversary": {"algorithm": f"{OWN}:{algorithm}"}}
    with pytest.raises(PreflightError) as failed:
        rehearse(_config(modules=modules, fragment_steps=7))
    assert words in str(failed.value)


def test_a_run_has_no_population() -> None:
    for keys in ({"population": 3}, {"modules": {"runner": {"population": 3}}}):
        with pytest.raises(ConfigError, match=r"not in a run; .* with juggler.Population"):
            _config(**keys).validate()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"agents": {"*": "all"}}, "have different spaces, and both"),
        ({"modules": {"hunts": {}}}, "no agent is mapped to module"),
        ({"league": {"builder": "none"}}, "have different spaces, and every"),
        ({"modules": {"runer": {}}}, "'runer': did you mean 'runner'?"),
        ({"modules": {"runner": {"algorithm": "pqn"}}}, "module 'runner': algorithm 'pqn'"),
    ],
)
def test_what_does_not_suit_the_agents_is_told_with_the_module(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(PreflightError) as failed:
        rehearse(_config(**keys))
    assert words in str(failed.value)


def test_those_who_act_find_the_module_of_each_algorithm_without_the_algorithm() -> None:
    groups = (GROUPS[0], FoundGroup(("other",), GROUPS[0].observation, GROUPS[0].action))
    tables = {"agents": {"a*": "a", "*": "b"}, "modules": {"b": {"algorithm": "impala"}}}
    config = with_agents(_config(algorithm="pqn", **tables), groups)
    acting = RunConfig.to_act(config.flat())
    for module_id in ("a", "b"):
        assert acting.of(module_id).module == config.of(module_id).module
    assert acting.of("a").module != acting.of("b").module


def test_where_environments_are_elsewhere_agents_are_to_be_named() -> None:
    named = _config(agents=MAPPING)
    assert with_agents(named, ()) is named
    for keys in ({"agents": {"*": "all"}}, {"modules": {"runner": {}}}):
        with pytest.raises(ConfigError, match="name every agent in the table agents"):
            with_agents(_config(**keys), ())


def test_with_a_gateway_patterns_stay_since_simulators_tell_their_agents_later() -> None:
    at = {"gateway": "127.0.0.1:0"}
    table = {"agents": {"player_*": "a", "*": "b"}, "modules": {"b": {"algorithm": "ppo"}}}
    config = _config(**at, **table)
    assert not needs_environment(config)
    found = with_agents(config, ())
    assert found.played_by == {"player_*": ("a",), "*": ("b",)}
    assert found.module_ids == ("a", "b")
    assert found.agents.modules["b"] == {"algorithm": "ppo", "module": "none"}
    assert found.played_by_in([["player_0", "x"]]) == {"player_0": ("a",), "x": ("b",)}
    with pytest.raises(ConfigError, match="unless the table agents has several"):
        with_agents(_config(**at, modules={"b": {}}), ())
    assert with_agents(_config(**at), ()).played_by == {}


def test_with_a_gateway_a_league_names_its_agents_in_teams() -> None:
    at = {"gateway": "127.0.0.1:0", "league": {"teams": [["b"], ["a", "c"]]}}
    found = with_agents(_config(**at), ())
    assert found.played_by == dict.fromkeys(("b", "a", "c"), ("main-0",))
    assert found.agent_names == ("b", "a", "c")
    assert with_agents(found, ()).played_by == found.played_by, "when it is resumed"
    with pytest.raises(ConfigError, match="name every agent in teams"):
        with_agents(_config(**{**at, "league": {"builder": "self_play"}}), ())
    with pytest.raises(ConfigError, match="leave out the table agents"):
        with_agents(_config(**at, agents={"*": "main-0"}), ())


def test_with_a_gateway_modules_are_drawn_from_a_table() -> None:
    drawn = {"agents": {"*": ["a", "random"]}, "mapping": "os:getcwd"}
    found = with_agents(_config(gateway="127.0.0.1:0", **drawn), ())
    assert (found.module_ids, found.others, found.agent_names) == (("a",), ("random",), ())
    with pytest.raises(ConfigError, match="add the table agents"):
        with_agents(_config(gateway="127.0.0.1:0", mapping="os:getcwd"), ())


def test_with_a_gateway_only_modules_have_goals() -> None:
    at = {"gateway": "127.0.0.1:0"}
    table = {"agents": {"player_*": "a", "*": "b"}, "modules": {"b": {"algorithm": "ppo"}}}
    assert with_agents(_config(**at, **table, stop_return={"a": 1.0}), ())
    for nobody in ("player_*", "player_0", "*"):
        with pytest.raises(ConfigError, match="only modules have goals: name 'a' or 'b'"):
            with_agents(_config(**at, **table, stop_return={nobody: 1.0}), ())
    with pytest.raises(ConfigError, match="has one agent: give a number alone"):
        with_agents(_config(**at, stop_return={"main": 1.0}), ())


@pytest.mark.parametrize(
    ("env", "needed"),
    [("open_spiel:kuhn_poker", True), ("pettingzoo:classic/go_v5", True), ("CartPole-v1", False)],
)
def test_a_driver_makes_environments_of_libraries_for_several_agents(
    env: str, needed: bool
) -> None:
    assert needs_environment(RunConfig.from_flat({"env": env})) == needed


# -- what is chosen -------------------------------------------------------------------------------


def _settled(**keys: Any) -> tuple[RunConfig, str]:
    return settled(with_agents(_config(**keys), GROUPS), keys.keys(), GROUPS)


def test_values_are_chosen_for_each_module_by_its_algorithm_and_its_spaces() -> None:
    config, said = _settled(modules={"runner": {"algorithm": "appo"}})
    adversary, runner = config.of("adversary"), config.of("runner")
    alone = settled(RunConfig.from_flat({}), (), [FoundGroup((), *_spaces(0))])[0]
    assert adversary.learner.grad_clip == alone.learner.grad_clip == 0.5
    assert adversary.connectors == alone.connectors
    assert runner.flat()["buffer_batches"] == 16, "for actions in a Box"
    assert runner.learner.gamma == 0.95
    assert adversary.learner.gamma == 0.99
    first, second = said.splitlines()
    assert first.startswith("chosen for impala in module 'adversary': envs_per_runner = 8, ")
    assert second.startswith("chosen for appo in module 'runner': ")
    assert "envs_per_runner" not in second, "all modules share it"
    assert RunConfig.from_flat(config.flat()) == config


def test_modules_that_the_environment_tells_have_the_learners_that_they_need() -> None:
    table = {"runner": {"num_learners": 2}}
    config = _config(modules=table)
    found, _ = _settled(modules=table)
    assert (found.driver.learners, config.driver.learners) == (3, 1), "one for the hunters"
    assert RunConfig.from_flat(found.flat()) == found
    with pytest.raises(ConfigError, match="that makes 3, but the run has 2; set"):
        _settled(modules=table, num_learners=2)


def _spaces(group: int) -> tuple[Any, Any]:
    return GROUPS[group].observation, GROUPS[group].action


def test_a_table_of_a_player_that_a_league_does_not_have_is_told_with_those_that_it_has() -> None:
    config = RunConfig.from_flat(
        {
            "env": "juggler:MatrixGame",
            "league": {"builder": "rllib"},
            "modules": {"main-9": {"algorithm": "ppo"}},
        }
    )
    with pytest.raises(ConfigError) as failed:
        with_agents(config, [FoundGroup(("row", "column"), None, None)])
    assert str(failed.value).startswith(
        "modules.main-9: the league has no player 'main-9': did you mean 'main-0'? The run has "
        "'main-0', 'main_exploiter-0', "
    )


def test_a_module_that_is_not_trained_may_be_a_fixed_player_of_a_league() -> None:
    config = RunConfig.from_flat(
        {
            "env": "juggler:MatrixGame",
            "league": {"builder": "self_play", "fixed": ["old", "random"]},
            "modules": {"old": {"train": False, "from": "runs/old"}},
        }
    )
    groups = [FoundGroup(("row", "column"), None, None)]
    assert with_agents(config, groups).played_by == {
        "row": ("main-0", "old", "random"),
        "column": ("main-0", "old", "random"),
    }
