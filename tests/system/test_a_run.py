"""A run from its command to its summary, scaled and followed."""

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
    env_runners,
    eventually,
    metrics,
    status_of,
    summary,
    trained_steps,
    trains_on,
    workers_in,
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


# `juggler scale`, on a run of one host.


@pytest.mark.slow
def test_env_runners_come_and_go_while_a_run_goes_on_and_lose_nothing(place: Place) -> None:
    run_dir = place.path / "run"
    options = ["--stop-return", "501", "--run-dir", "run", "--progress", "plain"]
    run = place.start("train", "cartpole", *options)
    eventually(lambda: trained_steps(run_dir), 60, lambda: run.output)
    scaled = place.run("scale", "run", "--env-runners", "3")
    assert scaled.output == "EnvRunners: 3 instead of 1\n"
    eventually(lambda: env_runners(run_dir) == 3, 60, lambda: run.output)
    assert place.run("scale", "run", "--env-runners", "1").status == 0
    run.wait_for("envrunner-2 has left, as requested", 60)
    run.wait_for("envrunner-1 has left, as requested", 60)
    eventually(lambda: env_runners(run_dir) == 1, 60, lambda: run.output)
    eventually(lambda: len(workers_in(place.path, "envrunner")) == 1, 30)
    trains_on(run_dir, run)
    # The numbers of departed workers are reused.
    assert place.run("scale", "run", "--env-runners", "2").status == 0
    eventually(lambda: env_runners(run_dir) == 2, 60, lambda: run.output)
    workers_in(place.path, "envrunner 1")[0].kill()
    run.wait_for("envrunner-1 left", 30)  # and is started again, since it is wanted
    eventually(lambda: env_runners(run_dir) == 2, 60, lambda: run.output)
    refused = place.run("scale", "run", "--env-runners", "1", "--evaluators", "2")
    assert "`juggler train` keeps its evaluators" in refused.output
    run.interrupt()
    assert run.wait(30) == 130
    assert_books_balance(run_dir)
    assert "warning: envrunner-2 left" not in run.output
    assert (
        summary(run_dir)["env_steps_lost_unreported"] <= 2 * 64 * 32
    )  # of the one that was killed
    assert "is not running" in place.run("scale", "run", "--env-runners", "2").output


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


# A run of an earlier version of Juggler, unchanged.


#: CartPole by IMPALA, 2 updates, written under version 2 of the protocol: one module, whose id is
#: "default" in the tree and stands nowhere else.
KEPT = Path(__file__).parents[1] / "support" / "run_of_protocol_2"


@pytest.mark.usefixtures("local_workers")
def test_an_older_checkpoint_resumes_and_plays(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, run = summary(KEPT), in_a_directory / "run"
    shutil.copytree(KEPT, run)
    assert status_of("evaluate", "run", "--episodes", 3) == 0
    assert "3 episodes" in capsys.readouterr().out
    assert status_of("train", "--resume", "run", "--stop-steps", 9000) == 0
    after = summary(run)
    assert_books_balance(run)
    assert after["updates"] > before["updates"]
    assert after["env_steps_trained"] >= 9000
    assert after["weights_version"][0] == before["weights_version"][0] + 1
    assert "restart" in after["env_steps_dropped"], "what was in flight at the cut"
