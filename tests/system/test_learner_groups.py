"""Runs with several learners: what they reach, and what becomes of them when members go."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.place import (
    Place,
    assert_books_balance,
    eventually,
    first_of,
    metrics,
    summary,
    trained_steps,
)

#: Two learners with a batch of the runner each make up the batch of one.
HALVES = ["--envs-per-runner", 32, "--num-learners", 2, "--devices", "fake:2"]


def assert_learners_agree(directory: Path) -> None:
    """With the driver, about how many steps were trained on."""
    end = summary(directory)
    own = sum(counts["trained"] for counts in end["learner_steps"].values())
    assert own == end["env_steps_trained"]
    assert_books_balance(directory)


def goes_on(directory: Path, seconds: float) -> None:
    reached = trained_steps(directory)
    eventually(lambda: trained_steps(directory) > reached, seconds, "no training any more")


@pytest.mark.slow
@pytest.mark.parametrize("rank", first_of([0, 1]))
def test_a_group_goes_on_without_a_member_that_is_killed_until_it_is_back(
    place: Place, rank: int
) -> None:
    directory = place.path / "run"
    run = place.start("train", "cartpole", "--run-dir", "run", "--stop-return", 501, *HALVES)
    goes_on(directory, 60)
    place.worker(f"learner {rank}").kill()
    run.wait_for(f"learner group 2: learner-{1 - rank} on fake:{1 - rank}", 30)
    run.wait_for("learner group 3: ", 60)
    goes_on(directory, 30)
    run.interrupt()
    assert run.wait(30) == 130, run.output
    place.assert_nothing_is_left()
    assert_learners_agree(directory)
    end = summary(directory)
    assert end["num_learners"] == 2
    assert end["env_steps_dropped"]["learner_lost"] > 0
    updates = [line["updates"] for line in metrics(directory)]
    assert updates == sorted(updates), "no update was lost"
    assert "weights are lost" not in run.output


@pytest.mark.slow
@pytest.mark.parametrize("rank", first_of([2, 0]))
def test_a_member_that_hangs_is_replaced(place: Place, rank: int) -> None:
    directory = place.path / "run"
    options = ["--num-learners", 3, "--stop-return", 501, "--run-dir", "run"]
    run = place.start("train", "cartpole", *options)
    goes_on(directory, 60)
    place.worker(f"learner {rank}").send_signal(signal.SIGSTOP)
    run.wait_for("learner group 2: ", 60)
    goes_on(directory, 30)
    run.wait_for("learner group 3: ", 60)
    goes_on(directory, 30)
    run.interrupt()
    assert run.wait(30) == 130, run.output
    place.assert_nothing_is_left()
    assert_learners_agree(directory)
    assert f"learner-{rank} left: no heartbeat for 6 s" in run.output
