"""What happens to a run whose disk fails it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.disk import Disk
from support.league_runs import LEAGUE
from support.place import (
    Command,
    Place,
    assert_books_balance,
    checkpoints,
    eventually,
    metrics,
    status,
    summary,
)


@pytest.fixture
def disk(place: Place) -> Iterator[Disk]:
    made = Disk(place.path / "disk")
    yield made
    made.close()


class Watched:
    """A run that trains whatever becomes of its directory, and what it says."""

    def __init__(self, place: Place, directory: Path) -> None:
        self.directory = directory
        options = ["--stop-return", 501, "--checkpoint-seconds", 1]
        self.run: Command = place.start("train", "cartpole", "--run-dir", directory, *options)

    def trains_on(self) -> dict[str, Any]:
        """What its status says by then: the directory may be the last to know."""
        reached = status(self.directory)["steps"]["trained"]

        def further() -> dict[str, Any] | None:
            now = status(self.directory)
            return now if now["steps"]["trained"] > reached else None

        found: dict[str, Any] = eventually(further, 60, lambda: self.run.output)
        return found

    def checkpoints(self) -> list[Path]:
        return checkpoints(self.directory)

    def makes_a_checkpoint(self) -> None:
        before = set(self.checkpoints())
        eventually(lambda: set(self.checkpoints()) - before, 60, lambda: self.run.output)


def _said(found: dict[str, Any], text: str) -> bool:
    return any(text in message["text"] for message in found["log_messages"])


@pytest.mark.slow
def test_training_goes_on_whatever_becomes_of_the_disk(place: Place, disk: Disk) -> None:
    directory = disk.path / "run"
    watched = Watched(place, directory)
    run = watched.run
    eventually(watched.checkpoints, 60, lambda: run.output)

    disk.fill(run.process.pid)
    run.wait_for("cannot be written")
    run.wait_for(f"error: cannot write metrics in {directory}")
    full = watched.trains_on()
    assert _said(full, "checkpoint"), full
    assert _said(full, "cannot write metrics"), full
    disk.empty(run.process.pid)
    run.wait_for(f"metrics are written in {directory} again")
    watched.makes_a_checkpoint()

    disk.protect(directory)
    told = len(run.output)
    eventually(lambda: "cannot be written" in run.output[told:], 60, lambda: run.output)
    assert _said(watched.trains_on(), "cannot be written")
    disk.unprotect(directory)
    watched.makes_a_checkpoint()
    assert_books_balance_so_far(directory)

    shutil.rmtree(directory)
    run.wait_for("was deleted or moved. It is made again")
    watched.makes_a_checkpoint()
    assert _said(watched.trains_on(), "was deleted or moved")

    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert_books_balance(directory)
    assert summary(directory)["env_steps_trained"] > full["steps"]["trained"]
    assert "Traceback" not in run.output
    resumed = place.run("train", "--resume", directory, "--stop-steps", 1)
    assert "going on from update" in resumed.output
    place.assert_nothing_is_left()


@pytest.mark.long
def test_a_league_goes_on_without_the_copies_that_a_full_disk_refuses(
    place: Place, disk: Disk
) -> None:
    directory = disk.path / "run"
    place.write("league.toml", LEAGUE)
    options = ["--run-dir", directory, "--stop-steps", 10**9, "--checkpoint-seconds", 1]
    run = place.start("train", "league.toml", *options)
    frozen = directory / "frozen"
    eventually(lambda: frozen.is_dir() and any(frozen.iterdir()), 60, lambda: run.output)

    disk.fill(run.process.pid)
    run.wait_for("there is no copy ")
    reached = status(directory)["league"]["learning"]
    eventually(lambda: _all_learn(directory, reached), 60, lambda: run.output)
    copies = {each.name for each in frozen.iterdir()}
    disk.empty(run.process.pid)
    eventually(lambda: {each.name for each in frozen.iterdir()} - copies, 60, lambda: run.output)

    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert_books_balance(directory)
    assert "Traceback" not in run.output
    resumed = place.run("train", "--resume", directory, "--stop-steps", 1)
    assert "going on from update" in resumed.output
    assert "there is no copy" not in resumed.output, "those of the checkpoint are whole"
    place.assert_nothing_is_left()


def _all_learn(directory: Path, reached: list[dict[str, Any]]) -> bool:
    now = {each["player_id"]: each["steps"] for each in status(directory)["league"]["learning"]}
    return all(now[each["player_id"]] > each["steps"] for each in reached)


def assert_books_balance_so_far(directory: Path) -> None:
    for line in metrics(directory):  # every one of them whole
        dropped = sum(line["env_steps_dropped"].values())
        accounted = line["env_steps_trained"] + dropped + line["env_steps_in_flight"]
        assert line["env_steps_sampled"] == accounted, line


@pytest.mark.long
def test_a_learner_goes_on_from_the_checkpoint_before_a_damaged_one(place: Place) -> None:
    watched = Watched(place, place.path / "run")
    run = watched.run
    eventually(lambda: len(watched.checkpoints()) > 2, 60, lambda: run.output)
    learner = place.worker("learner 0")
    watched.makes_a_checkpoint()  # the next one is not due before another second
    learner.kill()
    run.wait_for("learner-0 (pid")
    *_, before, newest = watched.checkpoints()  # nobody is there to make another
    state = newest / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    run.wait_for(f"learner-0 goes on from update {int(before.name)}", 30)
    assert f"checkpoint {newest}: state.safetensors is truncated" in run.output
    watched.trains_on()
    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert_books_balance(watched.directory)
    place.assert_nothing_is_left()


@pytest.mark.long
def test_training_goes_on_without_the_recording_that_a_full_disk_refuses(
    place: Place, disk: Disk
) -> None:
    pytest.importorskip("minari", reason="needs juggler[datasets]")
    sampled = disk.path / "sampled"
    options = ("--record", sampled, "--num-env-runners", 1, "--stop-return", 501)
    run = place.start("train", "cartpole", *options, "--run-dir", "run")
    eventually(lambda: list(sampled.glob(".envrunner-0-part-*/data/*.hdf5")), 60)
    disk.fill(place.worker("envrunner 0").pid)
    run.wait_for("records no more episodes, and samples on: cannot write the data set")
    assert not list(sampled.iterdir()), "nothing half-written"
    reached = status(place.path / "run")["steps"]["trained"]
    eventually(lambda: status(place.path / "run")["steps"]["trained"] > reached, 60)
    disk.empty(place.worker("envrunner 0").pid)
    run.interrupt()
    assert run.wait(60) == 130, run.output
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()
