"""Runs that share a place for temporary files, and runs that lose their own in it."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from support.place import (
    Place,
    assert_books_balance,
    checkpoints,
    eventually,
    summary,
    train_beyond_a_checkpoint,
    trained_steps,
)

_ENDLESS = ["cartpole", "--stop-return", 501, "--run-dir"]


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="making a namespace takes root")
def test_a_run_of_another_pid_namespace_keeps_its_sockets(place: Place) -> None:
    """As containers that share /tmp have it. The second run begins while the first one is there."""
    in_another = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    options = map(str, [*_ENDLESS, "first", "--checkpoint-seconds", 1])
    first = place.start_program([*in_another, sys.executable, "-m", "juggler", "train", *options])
    eventually(lambda: trained_steps(place.path / "first") > 0, 60, lambda: first.output)
    second = place.run("train", "cartpole", "--stop-steps", 1000, "--run-dir", "second")
    assert second.status == 0, second.output
    learner = place.worker("learner 0")
    train_beyond_a_checkpoint(place.path / "first", lambda: first.output)
    learner.kill()
    first.wait_for("learner-0 goes on from")
    reached = trained_steps(place.path / "first")
    eventually(lambda: trained_steps(place.path / "first") > reached, 60, lambda: first.output)
    first.interrupt()
    first.wait(60)
    assert_books_balance(place.path / "first")
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_run_whose_sockets_are_removed_says_so_and_ends_in_order(place: Place) -> None:
    run = place.start("train", *_ENDLESS, "run")
    eventually(lambda: trained_steps(place.path / "run") > 0, 60, lambda: run.output)
    for path in (place.path / "tmp").iterdir():
        shutil.rmtree(path)
    assert run.wait(60) == 1, run.output
    assert "Traceback" not in run.output
    last = run.output.splitlines()[-2:]
    assert last[0].endswith(f"the directory of this run's sockets in {place.path}/tmp was removed")
    assert last[1].startswith("To go on from update ")
    assert checkpoints(place.path / "run")
    assert_books_balance(place.path / "run")
    assert summary(place.path / "run")["failure"]
    place.assert_nothing_is_left()


@pytest.mark.long
def test_a_driver_of_workers_elsewhere_goes_on_without_its_own_socket(place: Place) -> None:
    options = ["--bind", "127.0.0.1:0", "--stop-steps", 3000]
    driver = place.start("driver", "cartpole", "--run-dir", "run", *options)
    driver.wait_for("waiting for workers at")
    line = next(line for line in driver.output.splitlines() if "waiting for workers at" in line)
    address = line.rpartition(" ")[2]
    for path in (place.path / "tmp").iterdir():
        shutil.rmtree(path)
    driver.wait_for("was removed; workers do not need it")
    place.start("learner", "--driver", address)
    place.start("envrunner", "--driver", address)
    assert driver.wait(120) == 0, driver.output
    place.assert_nothing_is_left()
