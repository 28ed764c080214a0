"""Tables of agents and modules, before and after a rehearsal; data sets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.rehearsing import rehearse
from support.small_games import Tag

import juggler
from juggler.driver.agent_tables import (
    FoundGroup,
    needs_environment,
    with_agents,
)
from juggler.driver.checkpoint.snapshots import core_of
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.defaults import settled
from juggler.driver.driver_config import AgentsConfig, who_plays
from juggler.driver.module_placement import ModulePlacement
from juggler.driver.preflight import PreflightError
from juggler.driver.run_datasets import is_of_another, must_be_playable, with_dataset
from juggler.driver.script_classes import own_classes
from juggler.driver.start_run import changes, must_be_of_one_run
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.wire.spaces import space_to_message

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


# -- which module plays which agent ---------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"agents": {"adversary_*": "x"}}, "no pattern matches agent"),
        ({"agents": {"advers": "x", "agent_*": "y"}}, "did you mean it with 'advers', which match"),
        ({"agents": {"*": "x", "player_*": "y"}}, "'player_*' matches no agent: the"),
        ({"agents": {"*": "x", "agent_0": "y"}}, "'agent_0' has no effect"),
        ({"modules": {"hunters": {}}}, "modules.hunters: no agent is"),
    ],
)
def test_a_mapping_that_does_not_suit_the_agents_is_an_error(
    tables: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as wrong:
        _mapping(TWO_KINDS, **tables)
    assert words in str(wrong.value)
    assert "\n" not in str(wrong.value)


# -- what each module has -------------------------------------------------------------------------


def test_modules_have_algorithms_side_by_side() -> None:
    config = RunConfig.from_flat(TWO_MODULES)
    assert config.module_ids == ("hunters", "runner")
    hunters, runner = config.of("hunters"), config.of("runner")
    assert isinstance(hunters.learner, ImpalaConfig)
    assert isinstance(runner.learner, PpoConfig)
    assert hunters.learner.grad_clip is None
    assert hunters.learner.batch_size == ImpalaConfig().batch_size != runner.learner.batch_size
    assert hunters.learner.lr == runner.learner.lr == 1e-3, "the run's own, given as a key"
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


def test_the_class_of_an_encoder_is_named_if_workers_can_import_it() -> None:
    keys: dict[str, Any] = {"model": {"encoder": FoundGroup, "activation": "relu"}}
    assert own_classes(keys) == {}
    name = "juggler.driver.agent_tables:FoundGroup"
    assert keys["model"] == {"encoder": name, "activation": "relu"}

    class Mine:
        pass

    with pytest.raises(ConfigError, match=r"model\.encoder.*Mine.*package\.module"):
        own_classes({"model": {"encoder": Mine}})


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


# The table `shared`: which modules share parts, and where they are trained.


FOUR: dict[str, Any] = {"agents": {name: name for name in "abcd"}}
PAIR = {"encoder.*": ["d", "b"]}


def of_run(learners: int, trained: Iterable[str] = "abcd", **values: Any) -> ModulePlacement:
    return ModulePlacement(
        RunConfig.from_flat({**FOUR, "num_learners": learners, **values}), trained
    )


def hosting(learners: int, processes: int, **values: Any) -> list[list[str]]:
    """The modules of N processes, in a run with `learners` at first."""
    return [of_run(learners, **values).modules_of(index) for index in range(processes)]


@pytest.mark.parametrize(
    ("shared", "together"),
    [
        ({}, [("a",), ("b",), ("c",), ("d",)]),
        (PAIR, [("a",), ("b", "d"), ("c",)]),
        ({"x.*": ["d", "a"], "y.*": ["c", "b"]}, [("a", "d"), ("b", "c")]),
        ({"x.*": ["d", "a"], "y.*": ["b", "d"]}, [("a", "b", "d"), ("c",)]),
    ],
)
def test_modules_that_share_parts_directly_or_through_others_are_trained_together(
    shared: dict[str, list[str]], together: list[tuple[str, ...]]
) -> None:
    config = RunConfig.from_flat({**FOUR, "shared": shared})
    assert list(config.agents.trained_together) == together
    assert ("shared" in config.flat()) == bool(shared)
    assert RunConfig.from_flat(config.flat()) == config
    assert config.of("b").agents == AgentsConfig()


def test_a_process_hosts_all_modules_that_share_parts_or_none_of_them() -> None:
    assert hosting(2, 3, shared=PAIR) == [["a", "c"], ["b", "d"], ["a", "c"]]
    five = [["a"], ["b", "d"], ["c"], ["a"], ["b", "d"]]
    assert hosting(5, 5, shared=PAIR) == five
    counts = of_run(5, shared=PAIR)
    assert [counts.processes_of(module_id) for module_id in "abcd"] == [2, 2, 1, 2]


def test_a_module_has_as_many_processes_to_itself_as_its_table_says() -> None:
    of_b = {"modules": {"b": {"num_learners": 2}}}
    assert hosting(5, 7, **of_b) == [["a"], ["b"], ["c"], ["d"], ["b"], ["a"], ["b"]]
    more = hosting(8, 8, **of_b)
    assert more[5:] == [["a"], ["c"], ["d"]], "the others have what is left"
    with_a_pair = hosting(5, 5, shared=PAIR, modules={"a": {"num_learners": 2}})
    assert with_a_pair == [["a"], ["b", "d"], ["c"], ["a"], ["b", "d"]]
    counts = {"a": 1, "b": 3, "c": 1, "d": 2}
    every = {"modules": {each: {"num_learners": count} for each, count in counts.items()}}
    assert hosting(7, 7, **every) == [["a"], ["b"], ["c"], ["d"], ["b"], ["d"], ["b"]]
    assert of_run(7, **every).processes_of("b") == 3


def test_a_further_module_goes_where_the_fewest_are_and_no_other_moves() -> None:
    hosting = of_run(4, shared=PAIR)  # three groups, the first of which two processes train
    hosting.add("new")
    assert [hosting.modules_of(index) for index in range(4)] == [
        ["a", "new"],
        ["b", "d"],
        ["c"],
        ["a", "new"],
    ]
    assert hosting.processes_of("new") == 2
    hosting.add("other", here=[1, 3])
    assert hosting.modules_of(1) == ["b", "d"]
    assert "other" in hosting.modules_of(0), "one of the processes that are here"
    hosting.remove("a")
    hosting.remove("new")
    again = of_run(4, ["b", "c", "d", "other"], shared=PAIR)
    assert again.modules_of(0) == hosting.modules_of(0) == ["other"]


def test_the_table_is_kept_where_the_agents_are_found_in_the_environment() -> None:
    config = RunConfig.from_flat({"env": "x:Y", "shared": {"encoder.*": ["cat", "mouse"]}})
    assert config.agents.has_patterns
    groups = [FoundGroup((name,), None, None) for name in ("cat_0", "mouse_0")]
    found = with_agents(config, groups)
    assert found.agents.shared == config.agents.shared
    assert found.agents.trained_together == (("cat", "mouse"),)
    others = [FoundGroup((name,), None, None) for name in ("dog_0", "mouse_0")]
    with pytest.raises(ConfigError, match=r"shared: 'encoder\.\*': there is"):
        with_agents(config, others)
    with pytest.raises(ConfigError, match="shared: the environment x:Y has one agent"):
        with_agents(config, [FoundGroup((), None, None)])
    with pytest.raises(ConfigError, match="shared: the agents of"):
        with_agents(config, ())


# A run that is resumed keeps its modules, and a league its players.


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
        "league: this run began with the players 'main-0', and now has "
        "'main-0' and 'main-1': a resumed run keeps its players"
    )


def test_a_run_keeps_its_algorithm() -> None:
    with pytest.raises(ConfigError, match="algorithm = 'appo': this run uses 'ppo'"):
        must_be_of_one_run(config(algorithm="appo"), checkpoint_of(config()))


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
        "connectors.env_to_module had nothing, and now has mean_std_filter: the weights were"
    )
    agents = {"agents": {"row": "main", "column": "other"}}
    clipped = {"connectors": {"learner": [{"use": "clip_rewards", "limit": 5.0}]}}
    before = config(**agents, modules={"main": {}, "other": clipped})
    now = config(**agents, modules={"main": {}, "other": {}})
    (told,) = changes(now, before)
    assert told.startswith(
        "modules.other: connectors.learner had clip_rewards with {'limit': 5.0}, and now has"
    )


@pytest.mark.parametrize("algorithm", ["dqn", "sac", "td3", "iql"])
def test_sums_that_were_kept_with_another_gamma_or_n_step_are_told(algorithm: str) -> None:
    before = config(algorithm=algorithm, gamma=0.9, n_step=3)
    assert changes(config(algorithm=algorithm, gamma=0.9, n_step=3, lr=0.1), before) == []
    now = config(algorithm=algorithm, gamma=0.5, n_step=1)
    of_gamma, of_n_step = changes(now, before)
    assert of_gamma.startswith("gamma was 0.9, and is now 0.5: steps in the replay of the check")
    assert of_n_step.startswith("n_step was 3, and is now 1: ")
    unsaved = config(algorithm=algorithm, gamma=0.5, save_replay=False)
    assert changes(unsaved, before) == changes(now, unsaved) == []


def test_steps_that_are_kept_as_they_came_know_no_gamma() -> None:
    for algorithm in ("r2d2", "impala", "ppo"):
        before, now = (config(algorithm=algorithm, gamma=gamma) for gamma in (0.9, 0.5))
        assert changes(now, before) == []


# Preflight's findings in environments of several agents, and choices for modules.


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


@pytest.mark.usefixtures("local_workers")
def test_a_rehearsal_finds_agents_and_builds_every_module() -> None:
    told: list[str] = []
    groups = rehearse(_config(), report=told.append)
    assert groups == GROUPS
    built = [text for text in dict.fromkeys(told) if text.startswith("building")]
    assert built == [
        f"building module {name!r} and its learner" for name in ("adversary", "runner")
    ]


@pytest.mark.usefixtures("local_workers")
def test_infos_without_an_agent_are_a_warning_that_is_given_once() -> None:
    warned: list[str] = []
    rehearse(_config(env="support.small_games:MisnamedTag"), warn=warned.append)
    assert warned == [
        "infos after step have 'touches', and no agent is called so: nothing reads that. Infos "
        "have a dict for each agent, as in {'adversary_0': {...}}"
    ]


@pytest.mark.usefixtures("local_workers")
def test_a_reward_that_is_not_finite_is_told_with_its_agent() -> None:
    said = r"agent 'runner_0' in environment 0 .* rewards are nan in step 2 after its first reset"
    with pytest.raises(PreflightError, match=said):
        rehearse(_config(env="support.small_games:UnpaidTag"))


@pytest.mark.usefixtures("local_workers")
def test_an_observation_outside_of_its_space_is_told_with_its_agent() -> None:
    said = r"agent 'runner_0' in environment 0 .* failed in step: its observation holds 9, .*\(4\)"
    with pytest.raises(PreflightError, match=said):
        rehearse(_config(env="support.small_games:MiscountingTag"))


OWN = "support.own_algorithms"


@pytest.mark.usefixtures("local_workers")
def test_every_algorithm_of_ones_own_makes_an_update_with_what_its_agents_do() -> None:
    told: list[str] = []
    modules = {"adversary": {"algorithm": f"{OWN}:Learning"}, "runner": {"algorithm": "ppo"}}
    assert rehearse(_config(modules=modules), report=told.append) == GROUPS
    assert f"trying an update of module 'adversary' with {OWN}:Learning" in told
    assert not [text for text in told if "update of module 'runner'" in text]


@pytest.mark.usefixtures("local_workers")
def test_a_replay_that_gets_no_rows_is_a_warning_with_its_module() -> None:
    warned: list[str] = []
    modules = {"adversary": {"algorithm": f"{OWN}:Keeping"}}
    rehearse(_config(modules=modules, fragment_steps=7), warn=warned.append)
    (told,) = warned
    assert told.startswith(
        f"module 'adversary': algorithm = '{OWN}:Keeping': `rows` of its replay kept none of "
        "the 14 steps of a fragment"
    )


@pytest.mark.usefixtures("local_workers")
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


@pytest.mark.usefixtures("local_workers")
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"agents": {"*": "all"}}, "have different spaces, and both"),
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
    one_agent = FoundGroup((), GROUPS[0].observation, GROUPS[0].action)
    alone = settled(RunConfig.from_flat({}), (), [one_agent])[0]
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


# What a run with a data set is told before it begins.


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The parts of a data set that the driver reads."""
    data = tmp_path / "mine" / "data"
    data.mkdir(parents=True)
    metadata = {
        "observation_space": "",
        "action_space": "",
        "dataset_id": "mine-v0",
        "total_episodes": 1,
        "env_spec": json.dumps({"id": "Pendulum-v1", "kwargs": {"g": 9.0}}),
    }
    (data / "metadata.json").write_text(json.dumps(metadata))
    return tmp_path / "mine"


def begin(**given: Any) -> RunConfig:
    return with_dataset(RunConfig.from_flat(given), given.keys(), is_here=True, is_new=True)


def test_evaluations_play_what_the_data_set_is_of_unless_somebody_says_otherwise(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.parent)
    runner = begin(algorithm="bc", dataset="mine").env_runner
    assert (runner.env, runner.env_kwargs) == ("Pendulum-v1", {"g": 9.0})
    assert runner.dataset == str(place)
    runner = begin(algorithm="bc", dataset="mine", env="Acrobot-v1").env_runner
    assert (runner.env, runner.env_kwargs) == ("Acrobot-v1", {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"algorithm": "bc"}, "'bc' learns from a data set: name"),
        ({"dataset": "mine"}, "algorithm = 'impala', which"),
        ({"dataset": "mine", "stop_return": 1.0}, "choose bc or iql, or"),
        ({"algorithm": "bc", "dataset": "yours"}, "dataset: there is no data set 'yours'"),
        ({"algorithm": "bc", "dataset": "mine", "stop_return": 1.0}, "stop_return = 1.0 with data"),
        ({"algorithm": "bc", "dataset": "mine", "gateway": "localhost:0"}, "leave out the other"),
        (
            {"algorithm": "bc", "dataset": "mine", "agents": {"a": "default"}},
            "a data set has the steps of one",
        ),
    ],
)
def test_what_does_not_go_with_a_data_set_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(place.parent)
    with pytest.raises(ConfigError, match=said):
        begin(**given)


def name_no_environment(place: Path) -> None:
    file = place / "data" / "metadata.json"
    metadata = json.loads(file.read_text())
    del metadata["env_spec"]
    file.write_text(json.dumps(metadata))


def test_an_evaluation_needs_an_environment(place: Path) -> None:
    name_no_environment(place)
    given = {"algorithm": "bc", "dataset": str(place), "evaluation_seconds": 1.0}
    with pytest.raises(ConfigError, match="does not name its environment"):
        begin(**given)
    assert begin(**given, env="CartPole-v1").env_runner.env == "CartPole-v1"
    unnamed = begin(algorithm="bc", dataset=str(place))
    assert not unnamed.plays
    assert unnamed.env_runner.env == "mine", "and not the default environment"


@pytest.mark.parametrize("name", ["link", "mine/.", "mine/data/.."])
def test_a_data_set_that_names_no_environment_is_called_by_the_place_where_it_is(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    name_no_environment(place)
    (place.parent / "link").symlink_to(place)
    monkeypatch.chdir(place.parent)
    runner = begin(algorithm="bc", dataset=name).env_runner
    assert (runner.env, runner.dataset) == ("mine", str(place))
    assert not is_of_another(runner)
    with pytest.raises(ConfigError, match="without an environment"):
        must_be_playable({"dataset": runner.dataset}, runner.env)
    monkeypatch.chdir(place)
    assert begin(algorithm="bc", dataset=".").env_runner == runner


def test_code_that_a_data_set_names_is_run_only_if_somebody_says_so(place: Path) -> None:
    file = place / "data" / "metadata.json"
    metadata = json.loads(file.read_text())
    named = {"id": "robots:Arm", "kwargs": {"joints": 3}}
    file.write_text(json.dumps({**metadata, "env_spec": json.dumps(named)}))
    given = {"algorithm": "bc", "dataset": str(place)}
    with pytest.raises(ConfigError) as raised:
        begin(**given, evaluation_seconds=1.0)
    assert "set env = 'robots:Arm' and env_kwargs = {'joints': 3} yourself" in str(raised.value)
    unplayed = begin(**given).env_runner
    assert (unplayed.env, unplayed.env_kwargs) == ("mine", {})
    assert not is_of_another(unplayed)
    said = {"env": "robots:Arm", "env_kwargs": {"joints": 3}}
    played = begin(**given, **said, evaluation_seconds=1.0).env_runner
    assert (played.env, played.env_kwargs) == ("robots:Arm", {"joints": 3})
    assert not is_of_another(played)
    assert is_of_another(begin(**given, env="robots:Leg").env_runner)


def test_who_plays_what_was_learned_from_a_data_set_that_names_no_environment_is_told() -> None:
    with pytest.raises(ConfigError, match="from the data set /data/shown"):
        must_be_playable({"dataset": "/data/shown"}, "shown")
    must_be_playable({"dataset": "/data/shown"}, "envs:Robot")
    must_be_playable({"dataset": "/data/CartPole-v1"}, "CartPole-v1")
    must_be_playable({}, "shown")


@pytest.mark.parametrize("with_simulator", [True, False])
def test_a_run_of_simulators_says_what_it_needs_to_be_played(with_simulator: bool) -> None:
    of_simulators = {"gateway": "127.0.0.1:5005", "env": "catch"}
    with pytest.raises(ConfigError, match="'catch' is only a name") as refused:
        must_be_playable(of_simulators, "catch", with_simulator=with_simulator)
    assert ("--simulator" in str(refused.value)) == with_simulator, "matches have no simulators"
    must_be_playable(of_simulators, "CartPole-v1")
    must_be_playable(of_simulators, "envs:Robot")


def test_what_a_run_records_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = begin(record="sampled")
    assert config.env_runner.record == str(tmp_path / "sampled")
    (tmp_path / "sampled").mkdir()
    assert begin(record="sampled").env_runner == config.env_runner
    (tmp_path / "sampled" / "file").touch()
    with pytest.raises(ConfigError, match=r"record = 'sampled': .* already exists"):
        begin(record="sampled")
    resumed = with_dataset(config, config.flat(), is_here=True, is_new=False)
    assert resumed.env_runner == config.env_runner
    assert RunConfig.to_act(config.flat()).env_runner.record == ""
