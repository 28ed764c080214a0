"""Tables of agents, modules and shared parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

import juggler
from juggler.driver.agent_tables import FoundGroup, with_agents
from juggler.driver.checkpoint.snapshots import core_of
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.driver_config import AgentsConfig, who_plays
from juggler.driver.module_placement import ModulePlacement
from juggler.driver.script_classes import own_classes
from juggler.driver.start_run import changes, must_be_of_one_run
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.runtime.checkpoints.checkpoint import Checkpoint

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
