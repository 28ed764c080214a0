"""A sweep with the real Optuna; but for the last test, runs are scripted."""

from __future__ import annotations

import csv
import sys
import tomllib
from pathlib import Path
from typing import Any

import optuna
import pytest
from support.place import status_of

import juggler
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import load_config_and_keys
from juggler.driver.record.run_directory import RunDirectoryError
from juggler.experiments.sweep import SweepFailed

RUNS = {"stop_steps": 1000, "progress": "plain", "num_env_runners": 1, "value_coefficient": 0.0}


def scripted(directory: Path, space: dict[str, Any], **how: Any) -> Any:
    return juggler.sweep("cartpole", space=space, run_dir=str(directory), **{**RUNS, **how})


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def states(directory: Path) -> list[str]:
    storage = f"sqlite:///{directory / 'study.db'}"
    return [each.state.name for each in optuna.load_study(study_name=None, storage=storage).trials]


@pytest.mark.usefixtures("scripted_runs")
def test_the_best_settings_are_found_and_written_as_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {"lr": [1.0, 3.0, 2.0], "model.hidden_sizes": [[8], [16, 16]]}
    found = scripted(tmp_path / "sweep", space, trials=12, jobs=3, prune=False)
    assert found.settings["lr"] == 3.0
    assert found.value == pytest.approx(30.0)
    best = tomllib.loads(found.config.read_text())
    assert best["model"]["hidden_sizes"] == found.settings["model.hidden_sizes"] in ([8], [16, 16])
    assert best.keys() >= {"env", "algorithm", "lr", "model", "value_coefficient"}
    assert len(best) < 20, "only what differs from the defaults"
    config = RunConfig.from_flat(best)
    shipped = load_config_and_keys("cartpole")[0].flat()
    assert {key for key, value in config.flat().items() if value != shipped[key]} <= {
        *("lr", "model", "value_coefficient", "num_env_runners", "progress")
    }
    assert (config.learner.lr, config.driver.stop_return, config.driver.stop_steps) == (
        *(3.0, 475.0),
        None,
    ), "the configuration's own goal, and not the length of a trial"
    for row in rows(tmp_path / "sweep"):
        assert float(row["episode_return_mean"]) == pytest.approx(10 * float(row["lr"]))
    assert [row["trial"] for row in rows(tmp_path / "sweep")] == [str(i) for i in range(6)]
    pictures = [tmp_path / "sweep" / name for name in ("sweep.png", "history.png")]
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in pictures)
    said = capsys.readouterr().out
    assert "sweep of 6 trials, one of each setting, 3 at once, in" in said
    assert "6 trials complete, 0 pruned, 0 failed" in said
    table = said.partition("0 failed\n")[2].splitlines()
    assert table[0].split() == ["trial", "episode_return_mean", "lr", "model.hidden_sizes"]
    assert table[1].split()[1:3] == ["30.00", "3"], "the best one first"
    assert all(each.name in said for each in pictures)


@pytest.mark.usefixtures("scripted_runs")
def test_no_setting_of_a_list_comes_twice_and_the_last_one_ends_the_sweep(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    space = {"lr": [1.0, 2.0, 3.0], "learner_threads": "1..2"}
    scripted(directory, space, trials=5, jobs=2, prune=False)
    assert len({(row["lr"], row["learner_threads"]) for row in rows(directory)}) == 5
    found = juggler.resume_sweep(directory, trials=40)
    assert found.settings["lr"] == 3.0
    assert len(rows(directory)) == 6
    assert len({(row["lr"], row["learner_threads"]) for row in rows(directory)}) == 6


@pytest.mark.usefixtures("scripted_runs")
def test_trials_that_fall_behind_are_ended_and_told(tmp_path: Path) -> None:
    """Those with the least return are below the median from the third tenth on."""
    slow = {"value_coefficient": 1.0}
    space = {"lr": [*range(1, 7), *range(51, 57)]}
    scripted(tmp_path / "sweep", space, trials=12, jobs=4, **slow)
    pruned = [row for row in rows(tmp_path / "sweep") if row["ended"].startswith("pruned after")]
    assert pruned
    assert states(tmp_path / "sweep").count("PRUNED") == len(pruned)
    for row in pruned:
        run = tmp_path / "sweep" / "trials" / f"{int(row['trial']):03}"
        assert list((run / "checkpoints").iterdir()), "it ended in order"
    lengths = [lines(tmp_path / "sweep", int(row["trial"])) for row in pruned]
    assert min(lengths) < 10, "before its end"


@pytest.mark.usefixtures("scripted_runs")
def test_a_killed_trial_is_told_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = scripted(tmp_path / "sweep", {"gamma": [0.5, 0.9], "lr": [1.0, 2.0]}, trials=8)
    killed = [row for row in rows(tmp_path / "sweep") if row["gamma"] == "0.5"]
    assert {row["ended"] for row in killed} == {"failed: ended by SIGKILL"}
    assert {row["episode_return_mean"] for row in killed} == {""}, "it was going to have another"
    assert found.settings["gamma"] == 0.9
    assert f"0 pruned, {len(killed)} failed" in capsys.readouterr().out


@pytest.mark.usefixtures("scripted_runs")
def test_a_sweep_whose_first_trials_all_fail_ends_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(SweepFailed, match="trials"):
        scripted(tmp_path / "sweep", {"lr": "1..2"}, trials=40, gamma=0.25)
    assert {row["ended"] for row in rows(tmp_path / "sweep")} == {
        "failed: juggler train: the mast is broken"
    }
    assert len(rows(tmp_path / "sweep")) == 3


@pytest.mark.usefixtures("scripted_runs")
def test_a_sum_of_returns_that_is_always_0_names_no_best_trial(tmp_path: Path) -> None:
    with pytest.raises(SweepFailed, match="episode_return"):
        scripted(tmp_path / "sweep", {"lr": "1..2"}, trials=40, gamma=0.75)
    assert len(rows(tmp_path / "sweep")) == 3
    assert {row["episode_return_mean"] for row in rows(tmp_path / "sweep")} == {""}
    assert not (tmp_path / "sweep" / "best.toml").exists()


@pytest.mark.usefixtures("scripted_runs")
def test_ctrl_c_ends_trials_in_order_and_a_resumed_sweep_goes_on_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "sweep"
    with pytest.raises(KeyboardInterrupt):
        scripted(directory, {"lr": "1..2"}, trials=3, jobs=2, reward_scale=2.0)
    assert f"to resume: juggler sweep --resume {directory}" in capsys.readouterr().out
    assert states(directory) == ["RUNNING", "RUNNING"]
    settings = [tomllib.loads((directory / f"trials/00{i}.toml").read_text()) for i in (0, 1)]
    (directory / "trials/000/config.toml").write_text(f"lr = {settings[0]['lr']}")  # waits no more
    (directory / "trials/001/config.toml").write_text(f"lr = {settings[1]['lr']}")
    plan = directory / "sweep.toml"
    plan.write_text(plan.read_text().replace("reward_scale = 2.0", "reward_scale = 1.0"))

    assert status_of("sweep", "--resume", directory, "--trials", 4) == 0
    assert [row["ended"] for row in rows(directory)] == ["complete"] * 4
    for row, before in zip(rows(directory), settings, strict=False):
        assert float(row["lr"]) == pytest.approx(before["lr"])
        assert lines(directory, int(row["trial"])) == 10, "its run went on, and was not begun anew"
    assert len({row["lr"] for row in rows(directory)}) == 4


@pytest.mark.usefixtures("scripted_runs")
def test_a_sweep_that_was_killed_can_be_resumed(tmp_path: Path) -> None:
    """Then Optuna has trials that nobody ends, perhaps one that has no run yet."""
    directory = tmp_path / "sweep"
    scripted(directory, {"lr": "1..2"}, trials=2)
    storage = f"sqlite:///{directory / 'study.db'}"
    study = optuna.load_study(study_name=None, storage=storage)
    study.ask()
    half = study.ask()
    half.set_user_attr("run", 2)
    half.suggest_float("lr", 1.0, 2.0)
    found = juggler.resume_sweep(directory, trials=4)
    assert found is not None
    assert [row["trial"] for row in rows(directory)] == ["0", "1", "2", "3"]
    assert len(found.trials) == 4


@pytest.mark.usefixtures("scripted_runs")
def test_one_process_at_a_time_has_a_sweep(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    scripted(directory, {"lr": "1..2"}, trials=1)
    with (directory / "sweep.toml").open() as file:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match="another process is at work in"):
            juggler.resume_sweep(directory)
    with pytest.raises(RunDirectoryError, match="is not empty"):
        scripted(directory, {"lr": "1..2"}, trials=1)
    with pytest.raises(RunDirectoryError, match="sweep"):
        juggler.resume_sweep(tmp_path)


def test_without_optuna_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="install"):
        scripted(tmp_path / "sweep", {"lr": "1..2"})
    assert not (tmp_path / "sweep").exists()


@pytest.mark.long
def test_a_sweep_of_real_runs_ends_with_a_configuration_that_trains(tmp_path: Path) -> None:
    found = juggler.sweep(
        "cartpole",
        space={"lr": "1e-4..1e-2:log", "entropy_coefficient": "0,0.01"},
        trials=2,
        jobs=2,
        run_dir=str(tmp_path / "sweep"),
        stop_steps=4000,
        progress="off",
    )
    assert found is not None
    assert {row["ended"] for row in found.trials} == {"complete"}
    for row in found.trials:
        run = tmp_path / "sweep" / "trials" / f"{row['trial']:03}"
        config = tomllib.loads((run / "config.toml").read_text())
        assert config["lr"] == row["lr"], "the run had its trial's settings"
    keys = {"stop_steps": 1000, "run_dir": str(tmp_path / "run"), "progress": "off"}
    assert juggler.train(found.config, **keys).summary["env_steps_trained"] >= 1000


def lines(directory: Path, number: int) -> int:
    """How many lines of metrics a trial has."""
    file = directory / "trials" / f"{number:03}" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0
