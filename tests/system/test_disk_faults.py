"""What happens to a run whose disk fails it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.made_files import Disk
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
    run.wait_for("was deleted or moved. It is created again")
    watched.makes_a_checkpoint()
    assert _said(watched.trains_on(), "was deleted or moved")

    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert_books_balance(directory)
    assert summary(directory)["env_steps_trained"] > full["steps"]["trained"]
    assert "Traceback" not in run.output
    resumed = place.run("train", "--resume", directory, "--stop-steps", 1)
    assert "resuming from update" in resumed.output
    place.assert_nothing_is_left()


def assert_books_balance_so_far(directory: Path) -> None:
    for line in metrics(directory):  # every one of them whole
        dropped = sum(line["env_steps_dropped"].values())
        accounted = line["env_steps_trained"] + dropped + line["env_steps_in_flight"]
        assert line["env_steps_sampled"] == accounted, line
