"""RunConfig: flat keys, values from files and checkpoints, and what is wrong said in one line."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from support.place import raises_key, status_of

from juggler.driver.checkpoint.restoring import core_of
from juggler.driver.config import ConfigError, RunConfig, converted
from juggler.driver.given_config import load_config, read_shipped, shipped_configs
from juggler.driver.record.run_directory import to_toml
from juggler.driver.script_classes import give_names
from juggler.learner.algorithms.registry import ALGORITHMS


def _error(values: dict[str, Any], where: str = "run.toml") -> str:
    with pytest.raises(ConfigError) as wrong:
        RunConfig.from_flat(values, where=where)
    said = str(wrong.value)
    assert "\n" not in said
    return said


def _as_toml(flat: dict[str, Any]) -> dict[str, Any]:
    """What a file says of a flat configuration."""
    return {key: "none" if value is None else value for key, value in flat.items()}


# -- keys and values ------------------------------------------------------------------------------


def test_every_key_belongs_to_one_room() -> None:
    config = RunConfig()
    owners = Counter(
        key.name for part in fields(config) for key in fields(getattr(config, part.name))
    )
    assert set(owners.values()) == {1}
    empty = {"agents", "league", "mapping", "modules", "shared"}
    assert config.flat().keys() == owners.keys() - empty


def test_a_value_goes_to_the_room_that_owns_its_key() -> None:
    config = RunConfig.from_flat(
        {"seed": 7, "envs_per_runner": 3, "module": "m:C", "lr": 0.5, "rho_bar": 2.0}
    )
    assert config.driver.seed == 7
    assert config.env_runner.envs_per_runner == 3
    assert config.module.module == "m:C"
    assert config.learner.lr == 0.5
    assert config.learner.rho_bar == 2.0  # type: ignore[attr-defined]
    assert config.flat() == RunConfig().flat() | {
        "seed": 7,
        "envs_per_runner": 3,
        "module": "m:C",
        "lr": 0.5,
        "rho_bar": 2.0,
    }


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


def test_whole_numbers_stand_for_floats_and_not_the_other_way_round() -> None:
    assert RunConfig.from_flat({"lr": 1}).learner.lr == 1.0
    assert "batch_size: expected a whole number, not 100.5" in _error({"batch_size": 100.5})
    assert "seed: expected a whole number, not true" in _error({"seed": True})


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


# -- wrong keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("num-env-runners", "num_env_runners"),
        ("batchsize", "batch_size"),
        ("Seed", "seed"),
        ("gama", "gamma"),
        ("lambda", "lambda_"),
        ("stop_step", "stop_steps"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(key: str, nearest: str) -> None:
    assert _error({key: 1}) == f"run.toml: unknown key {key!r}: did you mean {nearest!r}?"


def test_a_table_in_place_of_keys_is_named() -> None:
    assert "unknown key 'driver'" in _error({"driver": {"seed": 1}})


@pytest.mark.parametrize("algorithm", [3, None])
def test_an_algorithm_that_is_no_name_is_refused(algorithm: Any) -> None:
    assert "algorithm = " in _error({"algorithm": algorithm})


# -- ranges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("num_learners", 0),
        ("num_learners", 65),
        ("checkpoint_updates", 0),
        ("keep_checkpoints", 0),
        ("evaluation_episodes", 0),
        ("checkpoint_seconds", 0.0),
        ("worker_timeout_seconds", 0.0),
        ("hang_seconds", -1.0),
        ("stop_seconds", 0.0),
        ("envs_per_runner", 0),
        ("fragment_steps", 0),
        ("step_deadline_seconds", 0.0),
        ("gamma", 1.01),
        ("rmsprop_decay", 1.0),
        ("adam_betas", [0.9, 1.0]),
        ("grad_clip", 0.0),
        ("lambda_", -0.1),
        ("c_bar", 0.0),
        ("rho_bar", 0.5),
        ("lr", [[0, 1e-3], [0, 1e-4]]),
        ("micro_batches", 0),
        ("burn_in", 32),
        ("module", "nowhere"),
        ("env", ""),
        ("devices", "gpu"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key(key: str, value: Any) -> None:
    assert key in _error({key: value})


def test_a_synchronous_run_with_an_interval_between_weights_is_refused() -> None:
    said = _error({"synchronous": True, "weights_interval": 2})
    assert said.startswith("weights_interval = 2 with synchronous = true: ")
    assert "set weights_interval = 1, or synchronous = false" in said
    RunConfig.from_flat({"weights_interval": 2})


@pytest.mark.parametrize(
    ("max_staleness", "weights_interval", "open_updates"), [(6, 1, 3), (6, 3, 2), (6, 6, 1)]
)
def test_less_is_open_where_weights_come_at_intervals(
    max_staleness: int, weights_interval: int, open_updates: int
) -> None:
    config = {"max_staleness": max_staleness, "weights_interval": weights_interval}
    settings = core_of(RunConfig.from_flat(config), None).modules["default"].settings
    assert settings.max_open_updates == open_updates
    assert settings.weights_interval == weights_interval
    assert open_updates + weights_interval - 1 <= max_staleness


@pytest.mark.parametrize("synchronous", [False, True])
def test_an_interval_between_checkpoints_of_the_other_mode_is_refused(synchronous: bool) -> None:
    other, own = ("checkpoint_seconds", 5.0), ("checkpoint_updates", 50)
    if not synchronous:
        other, own = own, other
    said = _error({"synchronous": synchronous, other[0]: other[1]})
    mode = str(synchronous).lower()
    assert f"{other[0]} = {other[1]} with synchronous = {mode}: set {own[0]}" in said
    RunConfig.from_flat({"synchronous": synchronous, own[0]: own[1]})


@pytest.mark.parametrize("key", ["num_evaluators", "evaluation_video"])
def test_keys_of_evaluations_are_refused_where_there_are_none(key: str) -> None:
    assert _error({key: 2}) == f"{key} = 2: there are no evaluations; set evaluation_seconds"
    assert _error({key: 2, "stop_return": 1.0}), "nor are they for confirming that it is solved"
    RunConfig.from_flat({key: 2, "evaluation_seconds": 1.0})


def test_less_than_no_time_between_evaluations_is_refused() -> None:
    assert "evaluation_seconds" in _error({"evaluation_seconds": -1.0})


_FLOATS = [
    *(key for key, value in RunConfig().flat().items() if isinstance(value, float)),
    *("stop_seconds", "stop_return"),
]


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
    assert RunConfig.from_flat(tomllib.loads(tomli_w.dumps(_as_toml(flat)))) == config


def test_a_file_that_cannot_be_read_as_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"env = '\xff'")
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML"):
        load_config(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="resume"):
        load_config(tmp_path)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("lr = 1e-3\n", "utf-8-sig")
    assert load_config(tmp_path / "run.toml").learner.lr == 1e-3


# Errors about keys that no run has.


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("frame_stack", "it is the connector frame_stack"),
        ("framestack", "it is the connector frame_stack here"),
        ("self_play", "it builds a league, as in league"),
        ("optimizer_kwargs", "it is called optimizer_epsilon"),
        ("optimizer_class", "it is called optimizer here, a"),
        ("checkpoint_freq", "it is called checkpoint_seconds"),
        ("gae", "there is no such key here: ppo"),
        ("max_norm", "it is called grad_clip here"),
        ("num_updates", "it is called stop_steps here"),
        ("training_iteration", "it is called stop_steps here"),
        ("weight_decay", "there is no such key here"),
    ],
)
def test_a_name_that_is_usual_elsewhere_is_answered_with_what_it_is_here(
    key: str, answer: str
) -> None:
    with pytest.raises(ConfigError) as wrong:
        RunConfig.from_flat({key: 1}, where="run.toml")
    said = str(wrong.value)
    assert said.startswith(f"run.toml: unknown key {key!r}: {answer}")
    assert "the table model" not in said


# Everything that is wrong in a configuration is told at once.


def _told(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as wrong:
        RunConfig.from_flat(values, where="run.toml")
    return str(wrong.value).splitlines()


def test_unknown_keys_wrong_types_and_values_out_of_range_have_a_line_each() -> None:
    told = _told(
        {
            "gama": 0.9,
            "batchsize": 3,
            "lr": "x",
            "synchronous": 3,
            "num_env_runners": 0,
            "stop_seconds": -1,
            "fragment_steps": 0,
            "c_bar": -1,
            "lambda_": 2,
            "model": {"hidden_size": [8]},
            "optimizers": {"value": {"lr": -1}},
            "connectors": {"learner": ["clip"]},
        }
    )
    about = "gama batchsize synchronous lr num_env_runners stop_seconds fragment_steps model"
    about += " connectors optimizers lambda_ c_bar"
    assert len(told) == len(about.split())
    for key, line in zip(about.split(), told, strict=True):
        assert key in line


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
            {"agents": {"*": "a"}, "league": {"builder": "self_play", "foo": 1, "decay": 3}},
            ["league: league has no key 'foo'", "league: decay = 3"],
        ),
        (
            {"agents": {"*": "a"}, "modules": {"a": {"model": {"foo": 1, "bar": 2}}}},
            ["modules.a: model has no key 'foo'", "modules.a: model has no key 'bar'"],
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


def test_tables_of_modules_are_told_with_all_that_is_wrong_in_each() -> None:
    modules = {"a": {"gama": 1, "seed": 3, "lr": 1e-3}, "b": {"lr": "x", "c_bar": -1}}
    told = _told({"agents": {"a_*": "a", "b_*": "b"}, "modules": modules})
    begins = ["modules.a: unknown key 'gama'", "modules.a: seed is a key of the whole run"]
    begins += ["modules.b: lr: ", "modules.b: c_bar = -1.0: "]
    assert len(told) == len(begins)
    for begin, line in zip(begins, told, strict=True):
        assert line.startswith(begin)


def test_each_line_of_an_error_at_the_command_line_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("gama = 1\nbatchsize = 3\n")
    assert status_of("train", str(path)) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"juggler train: {path}: unknown key 'gama'")
    assert second.startswith(f"juggler train: {path}: unknown key 'batchsize'")


# What can be meant in a configuration, and hardly is, is told when a run starts.


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
