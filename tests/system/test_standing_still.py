"""Runs whose processes stand still, and people who lose patience."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil
import pytest
from support.place import Command, Place, assert_books_balance, eventually, summary, trained_steps


def _forkserver(place: Place) -> psutil.Process | None:
    for process in place.processes():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if "multiprocessing.forkserver" in line or line.strip() == "juggler: forkserver":
                return process
    return None


def _start(place: Place, *options: object) -> Command:
    return place.start("train", "cartpole", "--run-dir", "run", "--stop-return", 501, *options)


@pytest.mark.long
def test_a_signal_ends_a_run_whose_forkserver_is_not_ready_yet(place: Place) -> None:
    run = _start(place)
    eventually(lambda: _forkserver(place), 30, lambda: run.output).suspend()
    run.wait_for("starting: importing torch")
    before = time.monotonic()
    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert time.monotonic() - before < 10, "5 where nothing else keeps the machine busy"
    assert not (place.path / "run").exists(), "nothing has begun"
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_the_sockets_of_an_envrunner_that_stands_still_go_with_its_run(place: Place) -> None:
    # Only weights of this size are handed on from one EnvRunner to the others.
    large = ["--model", '{"hidden_sizes": [512, 512]}', "--num-env-runners", 1]
    run = _start(place, *large)
    sockets = place.path / "tmp" / f"juggler-{os.geteuid()}"
    eventually(lambda: sockets.is_dir() and [*sockets.iterdir()], 60, lambda: run.output)
    place.worker("envrunner 0").suspend()
    run.interrupt()
    assert run.wait(60) == 130, run.output
    place.assert_nothing_is_left()


@pytest.mark.long
def test_a_forkserver_that_stands_still_is_not_waited_for_for_ever(place: Place) -> None:
    run = _start(place, "--worker-timeout-seconds", 3)
    eventually(lambda: _forkserver(place), 30, lambda: run.output).suspend()
    assert run.wait(60) == 2, run.output
    last = run.output.splitlines()[-1]
    assert "the forkserver does not answer: it has done nothing for 3 s" in last
    assert not (place.path / "run").exists()
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_run_goes_on_after_its_forkserver_was_killed_with_all_its_workers(place: Place) -> None:
    run = _start(place, "--checkpoint-seconds", 600)
    eventually(lambda: trained_steps(place.path / "run") > 0, 60, lambda: run.output)
    server = _forkserver(place)
    assert server is not None
    server.kill()  # and its workers with it
    run.wait_for("the learners' weights are lost: learner-0 goes on from new weights", 60)
    reached = trained_steps(place.path / "run")
    eventually(lambda: trained_steps(place.path / "run") > reached, 30, lambda: run.output)
    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()


@pytest.mark.long
def test_impatience_does_not_cut_the_clean_up_short(place: Place) -> None:
    run = _start(place)
    eventually(lambda: trained_steps(place.path / "run") > 0, 60, lambda: run.output)
    for worker in ("envrunner 0", "learner 0"):
        place.worker(worker).suspend()  # nobody answers any more
    for _ in range(5):
        run.interrupt()
        time.sleep(0.3)
    assert run.wait(30) in (1, 130), run.output
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()


@pytest.mark.long
def test_a_learner_too_many_is_told_so(place: Place) -> None:
    options = ["--stop-return", 501, "--run-dir", "run", "--bind", "127.0.0.1:0"]
    options += ["--max-learners", 1]
    driver = place.start("driver", "cartpole", *options)
    driver.wait_for("waiting for workers at")
    line = next(line for line in driver.output.splitlines() if "waiting for workers at" in line)
    learner = place.start("learner", "--driver", line.split()[-1])
    place.start("envrunner", "--driver", line.split()[-1])
    eventually(lambda: trained_steps(place.path / "run") > 0, 60, lambda: driver.output)
    second = place.run("learner", "--driver", line.split()[-1])
    assert second.status == 1
    assert "this run has its 1 learner already" in second.output
    reached = trained_steps(place.path / "run")
    eventually(lambda: trained_steps(place.path / "run") > reached, 30, lambda: driver.output)
    driver.process.terminate()
    assert driver.wait(30) == 143, driver.output
    assert learner.wait(30) == 0, learner.output
    place.assert_nothing_is_left()


@pytest.mark.long
def test_a_pause_of_the_driver_alone_costs_a_run_nothing(place: Place) -> None:
    """Longer than anything over a network may be silent."""
    run = _start(place)
    directory = place.path / "run"
    eventually(lambda: trained_steps(directory) > 0, 60, lambda: run.output)
    os.kill(run.process.pid, signal.SIGSTOP)
    time.sleep(40)
    reached = trained_steps(directory)
    os.kill(run.process.pid, signal.SIGCONT)
    eventually(lambda: trained_steps(directory) > reached, 60, lambda: run.output)
    time.sleep(2)  # for whatever has been lost to be noticed
    run.interrupt()
    assert run.wait(30) == 130, run.output
    end = summary(directory)
    assert (end["restarts"], end["weights_version"][0]) == (0, 1), run.output
    assert end["env_steps_lost_unreported"] == 0
    place.assert_nothing_is_left()


@pytest.mark.long
def test_a_run_goes_on_after_ctrl_z(place: Place) -> None:
    run = _start(place, "--hang-seconds", 8)
    directory = place.path / "run"
    eventually(lambda: trained_steps(directory) > 0, 60, lambda: run.output)
    os.killpg(run.process.pid, signal.SIGSTOP)
    time.sleep(12)  # longer than a worker may be silent
    reached = trained_steps(directory)
    os.killpg(run.process.pid, signal.SIGCONT)
    eventually(lambda: trained_steps(directory) > reached, 30, lambda: run.output)
    time.sleep(2)
    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert summary(directory)["restarts"] == 0, run.output
    place.assert_nothing_is_left()
