"""RunConfig: flat keys, files, checkpoints, and errors of one line."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from support.place import raises_key, status_of

from juggler.driver.config import ConfigError, RunConfig, converted
from juggler.driver.config_files import load_config_and_keys, read_shipped, shipped_configs
from juggler.driver.reporting.run_directory import to_toml
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
        load_config_and_keys(tmp_path / "run.toml")[0]
    with pytest.raises(ConfigError, match="resume"):
        load_config_and_keys(tmp_path)[0]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("lr = 1e-3\n", "utf-8-sig")
    assert load_config_and_keys(tmp_path / "run.toml")[0].learner.lr == 1e-3


# Everything that is wrong in a configuration is told at once.


def _told(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as wrong:
        RunConfig.from_flat(values, where="run.toml")
    return str(wrong.value).splitlines()


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
