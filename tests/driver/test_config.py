"""RunConfig: flat keys, values from files and checkpoints, and what is wrong said in one line."""

from __future__ import annotations

import json
import re
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
from support.errors import raises_key

from juggler.driver.checkpoint.restoring import core_of
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_keys import converted
from juggler.driver.given_config import load_config
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


def test_no_values_are_the_defaults() -> None:
    assert RunConfig.from_flat({}) == RunConfig()


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


def test_none_stands_for_no_value_where_there_may_be_none() -> None:
    config = RunConfig.from_flat({"grad_clip": "none", "run_dir": "none", "stop_steps": "none"})
    assert config.learner.grad_clip is None
    assert config.driver.run_dir is None
    assert config.driver.stop_steps is None
    assert RunConfig.from_flat({"grad_clip": None}).learner.grad_clip is None


def test_none_is_a_word_like_others_where_there_must_be_a_value() -> None:
    assert RunConfig.from_flat({"env": "none"}).env_runner.env == "none"
    own = {"module": "package:Module", "model": {"a": "none"}}
    assert RunConfig.from_flat(own).module.model == {"a": "none"}
    assert _error({"gamma": "none"}) == (
        'run.toml: gamma: expected a number, not "none", as in gamma = 0.99'
    )
    assert "gamma: expected a number, not none" in _error({"gamma": None})
    said = _error({"algorithm": "sac", "target_entropy": "auto"})
    assert said.endswith('not "auto": "auto" is "none" here, or target_entropy left out')


def test_an_array_in_the_place_of_a_number_is_refused_as_other_values_are() -> None:
    for key in ("gamma", "grad_clip", "lr"):
        said = _error({key: np.array([1.0, 2.0])})
        assert re.fullmatch(
            rf"run.toml: {key}: expected a number.*, not an object of type ndarray, as in .+", said
        ), said


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


def test_a_wrong_value_within_a_list_is_told_with_what_the_list_has() -> None:
    said = _error({"adam_betas": [0.9, "x"]})
    assert said == (
        'run.toml: adam_betas: expected a list of 2 numbers, not [0.9, "x"], as in adam_betas = '
        "[0.9, 0.999]"
    )
    assert "adam_betas: expected a list of 2 numbers, not [0.9]" in _error({"adam_betas": [0.9]})
    assert "track: this is a list: track = ['wandb']" in _error({"track": "wandb"})


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


@pytest.mark.parametrize("key", ["num_learners", "burn_in", "num_env_runners", "batch_size"])
def test_the_example_of_a_number_is_one_that_a_run_takes(key: str) -> None:
    example = _error({key: "x"}).partition(", as in ")[2]
    RunConfig.from_flat(tomllib.loads(example)).validate()


def test_examples_of_tables_are_tables_that_a_run_takes() -> None:
    for key in RunConfig.from_flat({"algorithm": "sac"}).flat():
        with pytest.raises(ConfigError) as wrong:
            RunConfig.from_flat({key: object()})
        example = str(wrong.value).partition(", as in ")[2]
        if "{" in example:
            assert RunConfig.from_flat(tomllib.loads(example)).flat()[key]


def test_what_is_wrong_in_a_schedule_is_told_with_a_schedule() -> None:
    example = _error({"lr": [1, 2]}).partition(", as in ")[2]
    assert example == "lr = [[0, 1e-3], [1000000, 1e-4]]"
    assert RunConfig.from_flat(tomllib.loads(example)).learner.lr == [(0, 1e-3), (1e6, 1e-4)]


def test_a_word_that_is_near_to_no_allowed_one_is_told_with_those_that_are_allowed() -> None:
    assert _error({"progress": "none"}).endswith(
        "progress: 'none' is not known: known are auto, json, live, off, plain"
    )
    assert _error({"vectorize": "asnyc"}).endswith(
        "'asnyc' is not known: did you mean 'async'? Known are async, auto, native, sync"
    )


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


def test_a_key_that_is_near_to_two_is_named_with_both() -> None:
    said = _error({"modle": {"hidden_sizes": [8]}})
    assert said == "run.toml: unknown key 'modle': did you mean 'model' or 'module'?"


def test_a_key_that_begins_as_a_shorter_one_is_named_with_that() -> None:
    assert _error({"enviroment": "x"}) == "run.toml: unknown key 'enviroment': did you mean 'env'?"


def test_a_key_that_is_near_to_none_is_named_with_what_lists_them_all() -> None:
    said = _error({"zzz": 1})
    assert said == "run.toml: unknown key 'zzz': `juggler train --help` lists those that are known"
    said = _error({"zzz": 1, "algorithm": "sac"})
    assert said.endswith("'zzz': `juggler train --algorithm sac --help` lists those that are known")
    said = _error({"modules": {"a": {"zzz": 1, "algorithm": "sac"}}})
    assert said.endswith("'zzz': `juggler train --algorithm sac --help` lists those that are known")


def test_a_table_in_place_of_keys_is_named() -> None:
    assert "unknown key 'driver'" in _error({"driver": {"seed": 1}})


@pytest.mark.parametrize("algorithm", [3, None])
def test_an_algorithm_that_is_no_name_is_refused(algorithm: Any) -> None:
    assert "algorithm = " in _error({"algorithm": algorithm})


@pytest.mark.parametrize("algorithm", [["impala"], {"name": "impala"}])
def test_a_list_or_table_of_algorithms_is_refused(algorithm: Any) -> None:
    assert "algorithm" in _error({"algorithm": algorithm})


# -- ranges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("num_learners", 0),
        ("num_learners", 65),
        ("max_learners", 0),
        ("requests_per_runner", 0),
        ("updates_in_flight", 0),
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


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("gamma = true")
    with pytest.raises(ConfigError) as wrong:
        load_config(path)
    assert str(wrong.value) == f"{path}: gamma: expected a number, not true, as in gamma = 0.99"
