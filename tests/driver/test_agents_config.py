"""The tables of agents and modules: which module plays which agent, and what each module has."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import tomli_w

import juggler
from juggler.driver.agents_config import AgentsConfig
from juggler.driver.checkpoint.restoring import core_of
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.script_classes import own_classes
from juggler.driver.who_plays import who_plays
from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.ppo.config import PpoConfig

TWO_KINDS = [["adversary_0", "adversary_1"], ["agent_0"]]
TWO_MODULES: dict[str, Any] = {
    "algorithm": "ppo",
    "lr": 1e-3,
    "model": {"hidden_sizes": [8]},
    "agents": {"adversary_*": "hunters", "*": "runner"},
    "modules": {"hunters": {"algorithm": "impala", "grad_clip": None, "waited_for": False}},
}


def _mapping(groups: list[list[str]], **tables: Any) -> dict[str, Any]:
    return who_plays(AgentsConfig(**tables), groups)


def _error(**values: Any) -> str:
    with pytest.raises(ConfigError) as wrong:
        RunConfig.from_flat(values)
    assert "\n" not in str(wrong.value)
    return str(wrong.value)


# -- which module plays which agent ---------------------------------------------------------------


def test_the_first_pattern_that_matches_decides() -> None:
    patterns = {"adversary_1": "one", "adversary_*": "others", "*": "rest"}
    found = _mapping(TWO_KINDS, agents=patterns)
    assert found == {"adversary_0": "others", "adversary_1": "one", "agent_0": "rest"}


def test_agents_of_different_spaces_may_share_a_pattern_and_never_a_module() -> None:
    with pytest.raises(ConfigError, match="'adversary_0' and 'agent_0' have different spaces"):
        _mapping(TWO_KINDS, agents={"*": "all"})


def test_agents_of_equal_spaces_share_the_default_module() -> None:
    assert _mapping([["red", "blue"]]) == {"red": "default", "blue": "default"}


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        (TWO_KINDS, ["adversary", "agent"]),
        ([["player_1", "player_10"], ["judge"]], ["player", "judge"]),
        ([["a_0"], ["a_1"]], ["a", "a_2"]),
        ([["0", "1"], ["x", "y"]], ["agents", "agents_2"]),
        ([["red team 0", "red team 1"], ["blau/1"]], ["red_team", "blau"]),
        ([["connectors_0"], ["learner_pipelines"]], ["connectors_2", "learner_pipelines_2"]),
        ([["x" * 100], ["y"]], ["x" * 60, "y"]),
    ],
)
def test_modules_are_named_after_what_their_agents_names_begin_with(
    groups: list[list[str]], names: list[str]
) -> None:
    found = _mapping(groups)
    assert [found[group[0]] for group in groups] == names
    assert all(len({found[agent] for agent in group}) == 1 for group in groups)
    config = RunConfig.from_flat({"agents": found})
    assert list(config.module_ids) == names, "these are ids"


def test_an_agent_whose_name_looks_like_a_pattern_can_be_named() -> None:
    assert _mapping([["agent[0]"]], agents={"agent[0]": "main"}) == {"agent[0]": "main"}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"agents": {"adversary_*": "x"}}, "no pattern matches agent 'agent_0': add one for it"),
        ({"agents": {"advers": "x", "agent_*": "y"}}, "did you mean it with 'advers', which match"),
        ({"agents": {"*": "x", "player_*": "y"}}, "'player_*' matches no agent: the environment"),
        ({"agents": {"*": "x", "agent_0": "y"}}, "'agent_0' decides nothing"),
        ({"modules": {"hunters": {}}}, "modules.hunters: no agent is mapped to module 'hunters'"),
    ],
)
def test_a_mapping_that_does_not_suit_the_agents_is_an_error(
    tables: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as wrong:
        _mapping(TWO_KINDS, **tables)
    assert words in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_patterns_and_tables_of_modules_without_agents_need_to_know_the_environment() -> None:
    assert AgentsConfig(agents={"a_*": "x"}).has_patterns
    assert AgentsConfig(modules={"x": {}}).has_patterns
    assert not AgentsConfig(agents={"a_0": "x"}, modules={"x": {}}).has_patterns
    assert not AgentsConfig(modules={"default": {}}).has_patterns


# -- what each module has -------------------------------------------------------------------------


def test_a_run_with_one_agent_has_one_module_and_no_tables() -> None:
    config = RunConfig.from_flat({})
    assert config.module_ids == ("default",)
    assert config.played_by == {}
    assert config.of("default") is config
    assert not config.flat().keys() & {"agents", "modules"}


def test_modules_have_algorithms_side_by_side() -> None:
    config = RunConfig.from_flat(TWO_MODULES)
    assert config.module_ids == ("hunters", "runner")
    hunters, runner = config.of("hunters"), config.of("runner")
    assert isinstance(hunters.learner, ImpalaConfig)
    assert isinstance(runner.learner, PpoConfig)
    assert hunters.learner.grad_clip is None
    assert hunters.learner.batch_size == ImpalaConfig().batch_size != runner.learner.batch_size
    assert hunters.learner.lr == runner.learner.lr == 1e-3, "the run's, which somebody gave"
    assert hunters.module == runner.module == config.module
    assert hunters.driver is config.driver
    assert (config.waits_for("hunters"), config.waits_for("runner")) == (False, True)


def test_a_module_has_its_own_staleness_batches_and_weights_interval() -> None:
    tables = {"a": {"batch_size": 128, "max_staleness": 8, "weights_interval": 2}}
    config = RunConfig.from_flat({"agents": {"x": "a", "y": "b"}, "modules": tables})
    cores = core_of(config, None).modules
    assert list(cores) == ["a", "b"]
    settings = [
        (each.settings.batch_size, each.settings.max_open_updates, each.settings.weights_interval)
        for each in cores.values()
    ]
    assert settings == [(128, 4, 2), (1024, 3, 1)]


def test_a_module_of_another_algorithm_has_the_class_that_its_algorithm_brings() -> None:
    for run, other in (("impala", "pqn"), ("pqn", "impala")):
        tables = {"agents": {"x": "a"}, "modules": {"a": {"algorithm": other}}}
        config = RunConfig.from_flat({"algorithm": run, **tables})
        assert config.of("a").module == RunConfig.from_flat({"algorithm": other}).module


def test_tables_come_back_from_toml_and_json() -> None:
    config = RunConfig.from_flat(TWO_MODULES)
    flat = config.flat()
    assert RunConfig.from_flat(json.loads(json.dumps(flat))) == config
    as_toml = {key: "none" if value is None else value for key, value in flat.items()}
    again = RunConfig.from_flat(tomllib.loads(tomli_w.dumps(as_toml)))
    assert again == config
    assert again.of("hunters").learner.grad_clip is None


def test_what_acts_needs_no_algorithm() -> None:
    tables = {"a": {"algorithm": "nowhere:Own", "model": {"hidden_sizes": [3]}, "module": "none"}}
    values = {"algorithm": "elsewhere:Own", "agents": {"x": "a", "y": "b"}, "modules": tables}
    config = RunConfig.to_act(values)
    assert config.of("a").module.model == {"hidden_sizes": [3]}
    assert config.of("b").module.model == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"agents": {"*": "connectors"}}, "'connectors' cannot be a module's id, because check"),
        ({"agents": {"*": "learner_pipelines"}}, "choose another"),
        ({"modules": {"replay": {}}}, "'replay' cannot be a module's id, because checkpoints"),
        ({"modules": {"rnd": {}}}, "'rnd' cannot be a module's id, because checkpoints"),
        (
            {"modules": {"imitation": {}}},
            "'imitation' cannot be a module's id, because check",
        ),
        ({"modules": {"random": {}}}, "'random' cannot be a module's id, because it is"),
        ({"agents": {"*": "a b"}}, "'a b' cannot be a module's id: use 1 to 64 letters"),
        ({"agents": {"*": ""}}, "'' cannot be a module's id"),
        ({"agents": {"*": "x" * 65}}, "use 1 to 64 letters"),
        ({"agents": {"*": 3}}, "expected a table of strings or lists, not"),
        ({"modules": {"a/b": {}}}, "modules: 'a/b' cannot be a module's id"),
        ({"module": {"a": {"gamma": 0.9}}}, "module is a name: did you mean the table 'modules'?"),
        ({"modules": {"a": 3}}, "expected a table of tables, not"),
        ({"modules": {"a": {"gama": 1}}}, "modules.a: unknown key 'gama': did you mean 'gamma'?"),
        ({"modules": {"a": {"seed": 1}}}, "seed is a key of the run as a whole, and the same"),
        ({"modules": {"a": {"num_env_runners": 1}}}, "set it outside of [modules.a]"),
        ({"modules": {"a": {"epochs": 1}}}, "modules.a: 'epochs' is a key of ppo and pqn"),
        ({"modules": {"a": {"gamma": 2}}}, "modules.a: gamma = 2"),
        ({"modules": {"a": {"gamma": "x"}}}, "modules.a: gamma: expected a number"),
        ({"modules": {"a": {"algorithm": "pppo"}}}, "modules.a: algorithm = 'pppo' is not known"),
        ({"modules": {"a": {"hidden_sizes": [1]}}}, "modules.a: unknown key 'hidden_sizes': it is"),
        ({"modules": {"a": {"num_learners": 0}}}, "num_learners = 0: expected an integer of at"),
        ({"modules": {"a": {"num_learners": True}}}, "modules.a: num_learners = True: expected"),
        ({"modules": {"a": {"waited_for": 1}}}, "waited_for = 1: expected true or false"),
        ({"agents": {"x": "b"}, "modules": {"a": {}}}, "no agent is mapped to module 'a'; there"),
        ({"agents": {"x": "b"}, "env": "dm_env_rpc://h:1"}, "with env = 'dm_env_rpc://h:1': its e"),
        (
            {"modules": {"default": {}}, "env": "dm_env_rpc://h:1"},
            "its environments have one agent",
        ),
        (
            {"synchronous": True, "modules": {"a": {"weights_interval": 2}}},
            "modules.a: weights_interval = 2 with synchronous = true",
        ),
    ],
)
def test_a_wrong_table_is_one_sentence_that_names_it(values: dict[str, Any], words: str) -> None:
    assert words in _error(**values)


@pytest.mark.parametrize(
    ("player", "doubts"), [("randm", 1), ("Random", 1), ("random", 0), ("hard", 0)]
)
def test_a_module_that_is_almost_called_random_is_doubted(player: str, doubts: int) -> None:
    told = RunConfig.from_flat({"agents": {"x": "main", "y": ["main", player]}}).doubts()
    assert len(told) == doubts
    assert all(f"module {player!r} learns" in each and "'random'" in each for each in told)


def test_a_class_of_a_script_in_a_table_is_named_and_travels() -> None:
    class Alone(juggler.Algorithm):
        config = ImpalaConfig
        core = "nowhere:Core"

    class Net:
        pass

    keys: dict[str, Any] = {"modules": {"a": {"algorithm": Alone, "module": Net}, "b": {}}}
    given = keys["modules"]["a"]
    own = own_classes(keys)
    named = keys["modules"]["a"]
    assert own == {named["algorithm"]: Alone, named["module"]: Net}
    assert all(isinstance(name, str) for name in named.values())
    assert given["algorithm"] is Alone, "the caller's table is as it was"
    assert RunConfig.from_flat(keys).of("a").learner.algorithm == named["algorithm"]
