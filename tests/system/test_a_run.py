"""A run from its command to its summary."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest
from support.network import free_address
from support.place import (
    Place,
    assert_books_balance,
    checkpoints,
    eventually,
    metrics,
    status_of,
    summary,
    trains_on,
)

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
    assert "has ended (stop_steps): nothing is left to do. To" in said
    assert "give it another stop_steps than 40000" in said
    assert status_of("train", "--resume", "run", "--lr", 1e-4) == 0
    assert "so the new values of 'lr' have no effect" in capsys.readouterr().out
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


# One command for a driver, given again and again as containers do.


@pytest.mark.slow
def test_the_same_command_begins_a_run_goes_on_with_it_and_finds_it_ended(place: Place) -> None:
    directory = place.path / "run"
    token = place.write("token", "a secret\n")
    secret = ["--token-file", token]
    start = ["driver", "cartpole", "--run-dir", "run", "--go-on", *secret]
    address = free_address()
    seldom = ["--checkpoint-seconds", 600]
    first = place.start(*start, "--bind", address, "--stop-return", 501, *seldom)
    first.wait_for(f"waiting for workers at {address}")
    workers = [place.start(role, "--driver", address, *secret) for role in ("learner", "envrunner")]
    trains_on(directory, first)
    assert not checkpoints(directory)
    first.process.kill()

    second = place.start(*start, "--bind", address, "--checkpoint-seconds", 1, "--stop-return", 501)
    eventually(lambda: checkpoints(directory), 90, lambda: second.output)
    assert "resuming" not in second.output, "there was nothing to go on from"
    second.process.kill()

    reached = [
        *start,
        "--bind",
        address,
        "--stop-steps",
        max(1, metrics(directory)[-1]["env_steps_trained"]),
    ]
    third = place.start(*reached)
    third.wait_for("resuming from update ")
    assert third.wait(110) == 0, third.output
    assert summary(directory)["weights_version"][0] > 1, "another generation"
    for each in workers:
        assert each.wait(30) == 0, each.output
    assert summary(directory)["reason_for_stop"] == "stop_steps"
    assert_books_balance(directory)

    fourth = place.run(*reached)
    assert fourth.status == 0
    assert "has ended (stop_steps): nothing is left to do. To" in fourth.output


# A run that begins with the weights of another one, by the real command.


#: Nothing is learned meanwhile: what a run plays is what it has begun with. Drawn from a seed, a
#: policy gets to 22.
KEEPS = ("--lr", 1e-9, "--stop-steps", 60_000)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that plays CartPole well."""
    place = Place()
    try:
        run = place.run("train", "cartpole", "--stop-return", 400, "--run-dir", "run")
        assert run.status == 0, run.output
        return Path(shutil.copytree(place.path / "run", tmp_path_factory.mktemp("t") / "run"))
    finally:
        place.close()


@pytest.mark.slow
def test_several_learners_begin_with_them_and_a_run_that_is_resumed_does_not_load_again(
    place: Place, trained: Path
) -> None:
    directory = place.path / "run"
    begun = shutil.copytree(trained, place.path / "before")
    run = place.run(
        *("train", "cartpole", "--from", "before", "--num-learners", 2, "--run-dir", "run"), *KEEPS
    )
    assert run.status == 0, run.output
    assert summary(directory)["episode_return_mean"] > 150
    updates = summary(directory)["updates"]
    shutil.rmtree(begun)
    run = place.run("train", "--resume", "run", "--stop-steps", 80_000)
    assert run.status == 0, run.output
    assert f"resuming from update {updates}" in run.output
    assert "beginning with" not in run.output
    assert len(checkpoints(directory)) >= 2
    assert_books_balance(directory)
    place.assert_nothing_is_left()
