"""RunConfig: keys, files, errors, choices, and what ships."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tomli_w
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pages import ROOT
from support.place import raises_key, status_of
from support.small_cores import acts_in_choices, needs_memory

import juggler.driver.configs
from juggler.driver import config_files as shipped
from juggler.driver.agent_tables import FoundGroup
from juggler.driver.config import ConfigError, RunConfig, converted
from juggler.driver.config_files import (
    MedianResults,
    differing,
    load_config_and_keys,
    read_shipped,
    shipped_configs,
)
from juggler.driver.defaults import settled, with_models
from juggler.driver.reporting.run_directory import to_toml
from juggler.driver.script_classes import give_names
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_module_to_env
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wrong_value import WrongValue


def _told(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as wrong:
        RunConfig.from_flat(values, where="run.toml")
    return str(wrong.value).splitlines()


def _error(values: dict[str, Any]) -> str:
    (said,) = _told(values)
    return said


# -- keys and values ------------------------------------------------------------------------------


def test_configurations_share_no_tables() -> None:
    table = {"size": 1}
    first, second = RunConfig.from_flat({"env_kwargs": table}), RunConfig()
    first.env_runner.env_kwargs["size"] = 2
    first.module.model["hidden_sizes"] = [8]
    first.flat()["env_kwargs"]["size"] = 3
    assert table == {"size": 1}
    assert first.env_runner.env_kwargs == {"size": 2}
    assert second.env_runner.env_kwargs == second.module.model == {}


def test_numbers_of_numpy_and_paths_stand_for_values_of_a_file_in_tables_too() -> None:
    values = {
        "lr": np.logspace(-4, -2, 3)[1],
        "batch_size": np.int64(512),
        "lambda_": np.float32(0.5),
        "synchronous": np.bool_(True),
        "from_checkpoint": Path("runs/first/checkpoints/3"),
        "env_kwargs": {"size": np.int64(8), "map": Path("maps/a"), "at": [np.float64(0.5)]},
    }
    flat = RunConfig.from_flat(values).flat()
    said = tomllib.loads(to_toml(flat).decode())
    assert said["lr"] == pytest.approx(1e-3)
    assert (said["batch_size"], said["lambda_"], said["synchronous"]) == (512, 0.5, True)
    assert said["from_checkpoint"] == "runs/first/checkpoints/3"
    assert said["env_kwargs"] == {"size": 8, "map": "maps/a", "at": [0.5]}


def test_a_value_of_env_kwargs_that_no_file_can_hold_is_refused_with_what_to_do() -> None:
    said = _error({"env_kwargs": {"sizes": np.zeros(3)}})
    assert "env_kwargs" in said
    assert "ndarray" in said
    assert "env=lambda" in said


def test_an_environment_given_as_an_instance_is_answered_with_a_function() -> None:
    with pytest.raises(ConfigError, match="gymnasium"):
        give_names(object(), None, {})  # type: ignore[arg-type]


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    config = RunConfig.from_flat({"stop_steps": 1e6, "batch_size": 5e2})
    assert (config.driver.stop_steps, config.learner.batch_size) == (1_000_000, 500)
    assert type(config.driver.stop_steps) is type(config.learner.batch_size) is int
    with raises_key(ConfigError, "stop_steps"):
        RunConfig.from_flat({"stop_steps": 1e6 + 0.5})


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_the_example_in_an_error_about_a_type_is_a_value_that_the_key_takes(algorithm: str) -> None:
    given: dict[str, Any] = {"algorithm": algorithm}
    config = RunConfig.from_flat(given)
    for part in fields(config):
        kind = type(getattr(config, part.name))
        for key in fields(kind):
            _, (wrong,) = converted(kind, {key.name: object()}, "run.toml")
            example = str(wrong).partition(", as in ")[2]
            if "known are" not in str(wrong):
                values = tomllib.loads(example)
                assert values.keys() == {key.name}
                assert converted(kind, values, "run.toml")[1] == []


def test_what_is_wrong_in_a_schedule_is_told_with_a_schedule() -> None:
    example = _error({"lr": [1, 2]}).partition(", as in ")[2]
    assert example == "lr = [[0, 1e-3], [1000000, 1e-4]]"
    assert RunConfig.from_flat(tomllib.loads(example)).learner.lr == [(0, 1e-3), (1e6, 1e-4)]


# -- ranges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["num_evaluators", "evaluation_video"])
def test_keys_of_evaluations_are_refused_where_there_are_none(key: str) -> None:
    assert _error({key: 2}) == f"{key} = 2: there are no evaluations; set evaluation_seconds"
    assert _error({key: 2, "stop_return": 1.0}), "nor are they for confirming that it is solved"
    RunConfig.from_flat({key: 2, "evaluation_seconds": 1.0})


_FLOATS = [
    *(key for key, value in RunConfig().flat().items() if isinstance(value, float)),
    *("stop_seconds", "stop_return"),
]


@pytest.mark.parametrize(
    "key", ["checkpoint_seconds", "evaluation_seconds", "hang_seconds", "worker_timeout_seconds"]
)
def test_an_infinite_time_stands_for_never(key: str) -> None:
    assert getattr(RunConfig.from_flat({key: math.inf}).driver, key) == math.inf


@pytest.mark.parametrize("key", ["epochs", "clip", "reward_scale", "optimizer_epsilon"])
def test_none_is_refused_for_a_key_that_cannot_be_none(key: str) -> None:
    with raises_key(WrongValue, key):
        PpoConfig(**{key: None}).validate()
    PpoConfig(grad_clip=None, value_clip=None, target_kl=None).validate()


@pytest.mark.parametrize("key", _FLOATS)
def test_nan_is_refused_wherever_a_number_is_expected(key: str) -> None:
    assert key in _error({key: float("nan")})


# -- round trips ----------------------------------------------------------------------------------


_changes = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**62),
        "run_dir": st.none() | st.text("abc/. ", min_size=1),
        "synchronous": st.booleans(),
        "stop_return": st.none() | st.floats(-1e6, 1e6),
        "stop_steps": st.none() | st.integers(1, 10**12),
        "grad_clip": st.none() | st.floats(1e-3, 1e3),
        "lr": st.floats(1e-9, 1.0) | st.just([(0.0, 1e-3), (1e6, 0.0)]),
        "adam_betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
        "env_kwargs": st.dictionaries(
            st.text(max_size=5), st.integers(-5, 5) | st.text(max_size=5) | st.just([1, 2])
        ),
        "model": st.just({"hidden_sizes": [8, 8], "recurrent": "none"}),
        "vectorize": st.sampled_from(["auto", "native", "sync", "async"]),
        "progress": st.sampled_from(["auto", "off"]),
    },
)


@settings(max_examples=60)
@given(_changes)
def test_a_configuration_comes_back_from_toml_from_json_and_from_itself(
    changes: dict[str, Any],
) -> None:
    config = RunConfig.from_flat(changes)
    flat = config.flat()
    assert flat == RunConfig().flat() | changes
    assert RunConfig.from_flat(flat) == config
    assert RunConfig.from_flat(json.loads(json.dumps(flat))) == config
    in_a_file = {key: "none" if value is None else value for key, value in flat.items()}
    assert RunConfig.from_flat(tomllib.loads(tomli_w.dumps(in_a_file))) == config


def test_a_file_that_cannot_be_read_as_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"env = '\xff'")
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML"):
        load_config_and_keys(tmp_path / "run.toml")[0]
    with pytest.raises(ConfigError, match="resume"):
        load_config_and_keys(tmp_path)[0]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("lr = 1e-3\n", "utf-8-sig")
    assert load_config_and_keys(tmp_path / "run.toml")[0].learner.lr == 1e-3


# Everything that is wrong in a configuration is told at once.


@pytest.mark.parametrize("off", ["", "none"])
def test_a_retired_key_is_dropped_at_its_old_default_alone(off: str) -> None:
    assert RunConfig.from_flat({"trace": off}) == RunConfig()
    (told,) = _told({"trace": "traces.jsonl"})
    assert "unknown key 'trace'" in told
    assert "remove it" in told


def test_what_only_follows_from_a_wrong_key_is_not_told() -> None:
    values = {"evaluation_second": 5, "evaluation_video": 2}
    (told,) = _told(values)
    assert told == "run.toml: unknown key 'evaluation_second': did you mean 'evaluation_seconds'?"
    (told,) = _told({"evaluation_video": 2})
    assert "there are no evaluations" in told
    (told,) = _told({"max_staleness": 0, "weights_interval": 3})  # too large beside it, too
    assert told.startswith("max_staleness = 0")


@pytest.mark.parametrize(
    ("values", "begins"),
    [
        (
            {"model": {"hiden_sizes": [3], "activation": "x", "foo": 1}, "batch_size": -1},
            ["batch_size", "model has no key 'hiden_sizes'", "model has no key 'foo'", "model.act"],
        ),
        (
            {"optimizers": {"a": {"lrr": 1, "paramters": []}, "b": {"lr": "x"}}},
            [f"optimizers.a has no key '{key}'" for key in ("lrr", "paramters")]
            + ["optimizers.b.lr: expected"],
        ),
        (
            {"connectors": {"learnr": [], "learner": ["x"], "env_to_module": ["y"]}},
            ["connectors has no key 'learnr'", "connectors.env_to_module", "connectors.learner"],
        ),
        (
            {"imitation": {"demonstrations": 3, "foo": 1}},
            ["imitation.demonstrations: expected", "imitation has no key 'foo'"],
        ),
        (
            {"intrinsic": {"coeficient": 1.0, "kind": "rdn"}},
            ["intrinsic has no key 'coeficient'", "intrinsic.kind: 'rdn' is not"],
        ),
        (
            {"agents": {"*": "a"}, "league": {"builder": "self_play", "foo": 1, "decay": 3}},
            ["league: league has no key 'foo'", "league: decay = 3"],
        ),
    ],
)
def test_all_mistakes_within_a_table_have_a_line_each(
    values: dict[str, Any], begins: list[str]
) -> None:
    told = sorted(_told(values))
    assert len(told) == len(begins), told
    for begin, line in zip(sorted(begins), told, strict=True):
        assert line.startswith(begin)


# What can be meant in a configuration, and hardly is, is told when a run starts.


def test_each_line_of_an_error_at_the_command_line_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("gama = 1\nbatchsize = 3\n")
    assert status_of("train", str(path)) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"juggler train: {path}: unknown key 'gama'")
    assert second.startswith(f"juggler train: {path}: unknown key 'batchsize'")


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
    assert doubt.startswith("replay_share = 0.5 asks for 512 old steps with the 512 new ones")


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


# A run's choices for keys that were not given.


VECTOR = spaces.Box(-1, 1, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (10, 10, 1), np.uint8)


ACTION = space_to_message(spaces.Discrete(2))
BOX_ACTION = space_to_message(spaces.Box(-1, 1, (1,), np.float32))


def group(*agents: str, space: spaces.Space[Any] = VECTOR, action: Any = ACTION) -> FoundGroup:
    return FoundGroup(agents, space_to_message(space), action)


def settle(space: spaces.Space[Any] = VECTOR, **given: Any) -> RunConfig:
    return settled(RunConfig.from_flat(given), given.keys(), [group(space=space)])[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_short_file_leaves_nothing_to_be_chosen_that_was_given(algorithm: str) -> None:
    everything = RunConfig.from_flat({"algorithm": algorithm, "num_env_runners": 3}).flat()
    short = differing(everything)
    assert len(short) < len(everything) / 2
    for action in (ACTION, BOX_ACTION):
        found, _ = settled(RunConfig.from_flat(short), short.keys(), [group(action=action)])
        assert found.flat() == everything


def test_a_vector_of_floats_is_filtered_and_nothing_else_is() -> None:
    assert settle(VECTOR).connectors.connectors["env_to_module"] == ["mean_std_filter"]
    as_it_is: list[spaces.Space[Any]] = [
        IMAGE,
        spaces.Discrete(5),
        spaces.MultiBinary(4),
        spaces.MultiDiscrete([2, 3]),
        spaces.Box(0, 5, (3,), np.int64),
        spaces.Dict({"at": VECTOR, "which": spaces.Discrete(2)}),
        spaces.Box(-1, 1, (5, 5), np.float32),
    ]
    for each in as_it_is:
        assert "env_to_module" not in settle(each).connectors.connectors, each


def test_rewards_are_normalized_with_the_runs_discount_unless_they_are_scaled_already() -> None:
    pieces = settle(gamma=0.9).connectors.connectors["learner"]
    assert pieces == [{"use": "normalize_rewards", "gamma": 0.9}]
    assert settle(reward_scale=1.0).connectors.connectors == {}
    assert settle(connectors={}).connectors.connectors == {}


def test_samples_grow_with_what_is_sampled_at_a_time() -> None:
    assert settle(envs_per_runner=64, fragment_steps=32).learner.batch_size == 64 * 32
    two, eight = (settle(num_env_runners=each).learner.batch_size for each in (2, 8))
    assert eight == 4 * two
    assert settle(num_learners=2).learner.batch_size == 2 * two
    large = settle(algorithm="ppo", batch_size=8192)
    assert large.flat()["minibatches"] == 8192 // 64


def test_a_memory_keeps_fragments_in_which_something_can_be_remembered() -> None:
    general = RunConfig().env_runner.fragment_steps
    assert settle(model={"recurrent": "lstm"}).env_runner.fragment_steps == general
    assert settle(burn_in=20).env_runner.fragment_steps == general


def test_an_age_that_has_no_effect_is_not_chosen() -> None:
    config = settle(algorithm="ppo", synchronous=True)
    assert config.learner.max_staleness == type(config.learner).max_staleness
    assert config.doubts() == []


def test_a_model_that_an_algorithm_needs_is_there_before_the_spaces_are_known() -> None:
    needs = RunConfig.from_flat({"algorithm": "r2d2"})
    assert with_models(needs, {"algorithm"}).module.model == {"recurrent": "lstm"}
    assert with_models(needs, {"algorithm", "model"}) is needs
    own = RunConfig.from_flat({"algorithm": "r2d2", "module": "my_module:Mine"})
    assert with_models(own, {"algorithm", "module"}) is own
    tables = {"agents": {"*": "main"}, "modules": {"main": {"algorithm": "r2d2"}}}
    several = with_models(RunConfig.from_flat(tables), tables.keys())
    assert several.agents.modules["main"]["model"] == {"recurrent": "lstm"}


def in_toml(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    pairs = ", ".join(f"{key} = {json.dumps(each)}" for key, each in value.items())
    return f"`{{{pairs}}}`"


def test_the_page_of_algorithms_has_what_is_chosen() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    section = page.partition("## What a run chooses")[2].partition("\n## ")[0]
    found: dict[tuple[str, str, str], str] = {}  # by key, condition and algorithm
    for table in section.split("\n\n"):
        rows = [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in table.splitlines()
            if line.startswith("|")
        ]
        for first, *values in rows[2:]:
            name, _, condition = first.removeprefix("`").partition("`")
            for column, value in zip(rows[0][1:], values, strict=True):
                found[name, condition, column.strip("`")] = value
    expected = {}
    for name, algorithm in ALGORITHMS.items():
        tables = {
            f", where {kind} is observed": table for kind, table in algorithm.chosen_for.items()
        }
        boxed = tables.pop(", where a Box action is observed", {})
        tables |= {"": algorithm.chosen, ", where the action is a Box": boxed}
        for where, chosen in tables.items():
            for key, value in chosen.items():
                only = ", where `weights_interval` is 1 and `synchronous` is false"
                condition = only if key == "max_staleness" else where
                expected[key, condition, name] = in_toml(value)
    told = {place: value for place, value in found.items() if value}
    others = {place: value for place, value in told.items() if place not in expected}
    assert {place: told.get(place) for place in expected} == expected
    assert {key for key, _, _ in others} == {"batch_size", "minibatches"}


BOUNDS = {
    "far": spaces.Box(5, 9, (1,), np.float32),
    "positive": spaces.Box(0, 1, (2,), np.float64),
    "uneven": spaces.Box(-100, 3, (2, 2), np.float32),
    "mixed": spaces.Box(np.array([-np.inf, 0, 5], np.float32), np.array([1, np.inf, 9], "f4")),
}
RESCALE = ["rescale_actions"]


def to_env(action: spaces.Space[Any] | None, **given: Any) -> Any:
    """What is chosen of connectors.module_to_env."""
    found = () if action is None else [group(action=space_to_message(action))]
    config, _ = settled(RunConfig.from_flat(given), given.keys(), found)
    return config.connectors.connectors.get("module_to_env")


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("algorithm", ["impala", "ppo", "appo", "bc", "iql"])
def test_a_policys_range_is_mapped_to_finite_bounds(algorithm: str, name: str) -> None:
    space = BOUNDS[name]
    for whole in (space, spaces.Dict({"move": spaces.Discrete(2), "push": space})):
        assert to_env(whole, algorithm=algorithm) == RESCALE
    built = build_module_to_env(ConnectorsConfig(module_to_env=RESCALE), VECTOR, space)
    both = space.bounded_below & space.bounded_above  # [...]
    sent = [built(np.full((1, *space.shape), x, np.float32))[0] for x in (-1, 0, 1)]
    for at, right in zip(sent, (space.low, (space.low + space.high) / 2, space.high), strict=True):
        np.testing.assert_allclose(at[both], right[both], rtol=1e-5)
        assert space.contains(at)
    back = built.undo(sent[2][None])[0]
    np.testing.assert_allclose(back[both], 1, rtol=1e-5)


def test_what_is_squashed_given_or_imitated_is_not_rescaled() -> None:
    far = BOUNDS["far"]
    for algorithm in ("sac", "td3"):
        assert to_env(far, algorithm=algorithm) is None
    for keys in ({"model": {"squash": True}}, {"connectors": {}}):
        assert to_env(far, algorithm="ppo", **keys) is None
    assert to_env(far, algorithm="ppo", imitation={"demonstrations": "there"}) is None


def test_actions_are_rescaled_with_own_algorithms_too_and_if_spaces_are_not_known() -> None:
    assert to_env(BOUNDS["far"], algorithm="support.own_algorithms:Many") == RESCALE
    assert to_env(BOUNDS["far"], algorithm="ppo", reward_scale=2.0) == RESCALE
    assert to_env(None, algorithm="ppo") == RESCALE
    assert to_env(None, algorithm="sac") is None


@pytest.mark.parametrize("before", [True, False])
def test_weights_of_another_run_act_as_they_did_there(before: bool) -> None:
    for action in (BOX_ACTION, space_to_message(BOUNDS["far"])):
        config, _ = settled(RunConfig(), (), [group(action=action)], {"default": before})
        found = config.connectors.connectors.get("module_to_env")
        assert found == (RESCALE if before and action != BOX_ACTION else None)
    agents = {"agents": {"a": "one", "b": "two"}, "modules": {"one": {}, "two": {}}}
    unknown, _ = settled(RunConfig.from_flat(agents), agents.keys(), (), {"one": before})
    assert unknown.connectors.connectors.get("module_to_env") == (RESCALE if before else None)
    both = [group("a", "b", action=space_to_message(BOUNDS["far"]))]
    config, _ = settled(RunConfig.from_flat(agents), agents.keys(), both, {"one": before})
    pieces = [config.of(each).connectors.connectors.get("module_to_env") for each in ("one", "two")]
    assert pieces == [RESCALE if before else None, RESCALE]


def test_what_ships_is_complete_and_a_file_of_ones_own_is_not(tmp_path: Path) -> None:
    for name in shipped_configs():
        config, given = load_config_and_keys(name)
        assert given == config.flat().keys()
    (tmp_path / "mine.toml").write_text('env = "Acrobot-v1"\nlr = 5e-4\n')
    assert load_config_and_keys(tmp_path / "mine.toml")[1] == {"env", "lr"}
    assert load_config_and_keys(tmp_path / "mine.toml", "ppo")[1] == {"env", "lr", "algorithm"}
    assert load_config_and_keys(None)[1] == set()


# Shipped configurations, and the results that their files state.


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
    with pytest.raises(msgspec.ValidationError, match=words):
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
    with pytest.raises(ConfigError, match="--algorithm bc --dataset DATASET trains with"):
        load_config_and_keys("cartpole", "bc")[0]
    with pytest.raises(ConfigError, match="'td3' needs a Box"):
        load_config_and_keys("cartpole", "td3")[0]
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
