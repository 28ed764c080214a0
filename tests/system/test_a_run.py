"""A run from its command to its summary."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from support.commands import status_of
from support.place import REPOSITORY, Place, assert_books_balance, eventually, metrics, summary

from juggler.driver.record.wording import clock

LINE_KEYS = {
    "wall_time",
    "training_time",
    "env_steps_sampled",
    "env_steps_trained",
    "env_steps_dropped",
    "env_steps_in_flight",
    "updates",
    "weights_version",
    "staleness_mean",
    "staleness_max",
    "episode_return_mean",
    "episode_return_age",
    "episode_length_mean",
    "steps_per_second",
    "modules",
}
MODULE_KEYS = {
    "policy_loss",
    "value_loss",
    "entropy",
    "kl",
    "clip_fraction",
    "explained_variance",
    "grad_norm",
    "lr",
}


@pytest.mark.usefixtures("local_workers")
def test_a_run_writes_what_happened(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--run-dir", "run", "--stop-steps", 20_000, "--stop-return", 501, "--seed", 3]
    assert status_of("train", "cartpole", *options) == 0
    output = capsys.readouterr().out
    directory = in_a_directory / "run"
    names = {path.name.partition(".")[0] for path in directory.iterdir()}
    assert names == {"config", "metrics", "summary", "checkpoints", "events"}

    assert_books_balance(directory)
    lines, end = metrics(directory), summary(directory)
    first = lines[0]
    trained = first["steps_per_second"] * first["training_time"]
    assert trained == pytest.approx(first["env_steps_trained"]), "starting up is no part of it"
    for line in lines:
        assert line.keys() >= LINE_KEYS
    assert [line["wall_time"] for line in lines] == sorted(line["wall_time"] for line in lines)
    assert lines[-1]["modules"]["default"].keys() >= MODULE_KEYS
    assert end.keys() >= LINE_KEYS
    assert end["reason_for_stop"] == "stop_steps"
    assert end["env_steps_trained"] >= 20_000
    assert end["solved"] is False
    assert 0 < end["wall_seconds_to_first_update"] < end["wall_time"]
    assert end["wall_seconds_to_solved"] is None
    assert end["weights_version"] == [1, end["updates"]]
    config = tomllib.loads((directory / "config.toml").read_text())
    assert (config["env"], config["seed"], config["stop_steps"]) == ("CartPole-v1", 3, 20_000)
    assert (directory / "checkpoints" / f"{end['updates']:09d}" / "state.safetensors").exists()
    assert "steps" in output
    assert "\x1b" not in output, "no escape sequences where there is no terminal"


@pytest.mark.long
def test_a_run_trains_on_the_public_api_of_grpc(place: Place) -> None:
    options = ["--run-dir", "run", "--stop-steps", 20_000, "--stop-return", 501]
    run = place.run("train", "cartpole", *options, JUGGLER_GRPC="public")
    assert run.status == 0, run.output
    assert "public API" not in run.output, "it was asked for"
    assert_books_balance(place.path / "run")
    assert summary(place.path / "run")["env_steps_trained"] >= 20_000


@pytest.mark.long
def test_a_script_is_told_that_private_names_of_grpc_are_missing_and_trains_without_torch(
    place: Place,
) -> None:
    hidden = 'import sys; sys.modules["juggler.runtime.actors.core_calls"] = None'
    place.write("sitecustomize.py", hidden)  # as if it could not be imported
    script = place.write(
        "script.py",
        "import sys, juggler\n"
        "juggler.train('cartpole', stop_steps=20_000, stop_return=501, run_dir='run')\n"
        "print('torch' in sys.modules)\n",
    )
    run = place.start_program([sys.executable, str(script)])
    assert run.wait(300) == 0, run.output
    assert run.output.splitlines()[-1] == "False", "the driver does without torch"
    said = [line for line in run.output.splitlines() if "public API of grpcio" in line]
    assert len(said) == 1, run.output
    assert "envrunner-0 uses the public API of grpcio, which is slower" in said[0]
    assert "ModuleNotFoundError" in said[0]
    assert_books_balance(place.path / "run")
    assert summary(place.path / "run")["env_steps_trained"] >= 20_000
    place.assert_nothing_is_left()


@pytest.mark.usefixtures("local_workers")
def test_a_run_goes_on_from_its_checkpoint(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = in_a_directory / "run"
    assert status_of("train", "cartpole", "--run-dir", "run", "--stop-steps", 20_000) == 0
    before = summary(directory)
    assert status_of("train", "--resume", "run", "--stop-steps", 40_000) == 0
    after = summary(directory)
    assert_books_balance(directory)
    assert after["env_steps_trained"] >= 40_000
    assert after["updates"] > before["updates"]
    assert after["weights_version"] > before["weights_version"]
    assert after["weights_version"][0] == before["weights_version"][0] + 1
    assert after["episodes"] > before["episodes"]
    versions = [line["weights_version"] for line in metrics(directory)]
    assert versions == sorted(versions), "weights never go backwards"

    files = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    capsys.readouterr()
    assert status_of("train", "--resume", "run") == 0
    said = capsys.readouterr().out
    assert "has ended (stop_steps): nothing to go on with. To" in said
    assert "give it another stop_steps than 40000" in said
    assert status_of("train", "--resume", "run", "--lr", 1e-4) == 0
    assert "so that what was given for 'lr' has no effect" in capsys.readouterr().out
    further = ("--stop-steps", 60_000, "--env", "Acrobot-v1")
    assert status_of("train", "--resume", "run", *further) == 2
    assert "the observation space of its environment was Box(" in capsys.readouterr().err
    assert files == {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.mark.slow
def test_an_evaluation_runs_beside_training_and_a_checkpoint_can_be_played(place: Place) -> None:
    options = ["--run-dir", "run", "--stop-return", 501, "--evaluation-seconds", 1]
    run = place.start("train", "cartpole", *options)
    directory = place.path / "run"

    def evaluated() -> bool:
        return any((line["evaluation_return_mean"] or 0) > 9 for line in metrics(directory))

    eventually(evaluated, 90, lambda: run.output)
    run.interrupt()
    assert run.wait(30) == 130, run.output
    played = place.run("evaluate", "run", "--episodes", 5)
    assert played.status == 0, played.output
    assert "5 episodes: return" in played.output
    drawn = place.run("plot", "run")
    assert drawn.status == 0, drawn.output
    assert (directory / "plot.png").read_bytes().startswith(b"\x89PNG")
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_synchronous_run_trains_on_fresh_steps_alone(place: Place) -> None:
    options = ["--run-dir", "run", "--stop-steps", 60_000, "--num-env-runners", 2]
    run = place.run("train", "cartpole", "--synchronous", *options)
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    end = summary(place.path / "run")
    assert end["staleness_max"] == 0
    assert end["env_steps_dropped"].keys() <= {"shutdown"}


@pytest.mark.slow
def test_environments_may_have_processes_of_their_own(place: Place) -> None:
    options = ["--run-dir", "run", "--stop-steps", 2000, "--vectorize", "async"]
    sizes = ["--envs-per-runner", 4, "--fragment-steps", 16, "--batch-size", 100]
    run = place.run("train", "--env", "CartPole-v1", "--num-env-runners", 2, *options, *sizes)
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_stop_seconds_are_of_training_and_go_on_where_a_run_is_resumed(place: Place) -> None:
    place.write(
        "slow_start.py",
        "import time, gymnasium\n"
        "def make():\n"
        "    time.sleep(5)\n"
        "    return gymnasium.make('CartPole-v1')\n",
    )
    directory, python_path = place.path / "run", {"PYTHONPATH": f"{REPOSITORY}:{place.path}"}
    options = ["--env", "slow_start:make", "--envs-per-runner", 1, "--batch-size", 32]
    run = place.run("train", *options, "--run-dir", "run", "--stop-seconds", 3, **python_path)
    assert run.status == 0, run.output
    first = summary(directory)
    assert first["reason_for_stop"] == "stop_seconds"
    assert first["startup_time"] >= 5
    assert first["training_time"] >= 3
    assert first["env_steps_trained"] > 0
    parts = first["startup_time"] + first["training_time"]
    assert parts == pytest.approx(first["wall_time"])
    assert f"(start-up {clock(first['startup_time'])}, training " in run.output

    newest = place.path / first["checkpoint"]
    saved = json.loads((newest / "checkpoint.json").read_text())["counters"]
    more = saved["training_time"] + 2
    run = place.run("train", "--resume", "run", "--stop-seconds", more, **python_path)
    assert run.status == 0, run.output
    end = summary(directory)
    assert end["training_time"] >= more
    assert end["startup_time"] >= first["startup_time"] + 5, "both starts"
    assert end["env_steps_trained"] > first["env_steps_trained"]
    assert end["wall_time"] >= saved["wall_time"] + 7
    place.assert_nothing_is_left()


@pytest.mark.long
def test_what_a_run_chose_is_said_and_kept_and_nothing_that_was_given_is_replaced(
    place: Place,
) -> None:
    options = ["--env", "FrozenLake-v1", "--lr", 2e-3, "--run-dir", "run", "--stop-steps", 500]
    run = place.run("train", *options)
    assert run.status == 0, run.output
    chosen = next(line for line in run.output.splitlines() if line.startswith("chosen for impala"))
    assert "value_lr_scale = 1.0" in chosen
    assert " lr = " not in chosen
    config = tomllib.loads((place.path / "run" / "config.toml").read_text())
    assert config["lr"] == 2e-3
    assert config["value_lr_scale"] == 1.0
    again = place.run("train", "--resume", "run", "--stop-steps", 1000)
    assert again.status == 0, again.output
    assert "chosen for" not in again.output
    assert tomllib.loads((place.path / "run" / "config.toml").read_text()) == {
        **config,
        "stop_steps": 1000,
    }
