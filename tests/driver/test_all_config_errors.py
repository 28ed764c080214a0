"""Everything that is wrong in a configuration is told at once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from support.commands import status_of

from juggler.driver.config import ConfigError, RunConfig
from juggler.runtime.wrong_value import WrongValue


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


def test_parts_that_contradict_themselves_have_a_line_each() -> None:
    told = _told({"evaluation_video": 2, "rho_bar": 0.5})
    assert [each.split()[0] for each in told] == ["evaluation_video", "rho_bar"]


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


def test_a_table_without_what_it_needs_has_one_line() -> None:
    assert len(_told({"optimizers": {"a": {"lr": 1e-3}}})) == 1


def test_tables_of_modules_are_told_with_all_that_is_wrong_in_each() -> None:
    modules = {"a": {"gama": 1, "seed": 3, "lr": 1e-3}, "b": {"lr": "x", "c_bar": -1}}
    told = _told({"agents": {"a_*": "a", "b_*": "b"}, "modules": modules})
    begins = ["modules.a: unknown key 'gama'", "modules.a: seed is a key of the run"]
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


def test_values_of_options_that_are_out_of_range_are_told_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of("train", "cartpole", "--gamma", "2", "--hang-seconds", "-3") == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in told] == ["hang_seconds", "gamma"]


def test_an_error_about_a_value_can_be_copied() -> None:
    error = WrongValue("gamma", "gamma = 2: too large")
    again = copy.copy(error)  # in the way that pickle has, too
    assert (again.key, str(again)) == ("gamma", "gamma = 2: too large")
