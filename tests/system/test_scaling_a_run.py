"""`juggler scale`, on a run of one host."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.place import (
    Command,
    Place,
    assert_books_balance,
    env_runners,
    eventually,
    metrics,
    summary,
    trained_steps,
    workers_in,
)

pytestmark = [pytest.mark.slow]


def test_env_runners_come_and_go_while_a_run_goes_on_and_lose_nothing(place: Place) -> None:
    run_dir = place.path / "run"
    options = ["--stop-return", "501", "--run-dir", "run", "--progress", "plain"]
    run = place.start("train", "cartpole", *options)
    eventually(lambda: trained_steps(run_dir), 60, lambda: run.output)
    scaled = place.run("scale", "run", "--env-runners", "3")
    assert scaled.output == "EnvRunners: 3 are wanted now, in place of 1\n"
    eventually(lambda: env_runners(run_dir) == 3, 60, lambda: run.output)
    assert place.run("scale", "run", "--env-runners", "1").status == 0
    run.wait_for("envrunner-2 has left, as asked", 60)
    run.wait_for("envrunner-1 has left, as asked", 60)
    eventually(lambda: env_runners(run_dir) == 1, 60, lambda: run.output)
    eventually(lambda: len(workers_in(place.path, "envrunner")) == 1, 30)
    before = trained_steps(run_dir)
    eventually(lambda: trained_steps(run_dir) > before, 60, lambda: run.output)
    # The numbers of those that left are given again.
    assert place.run("scale", "run", "--env-runners", "2").status == 0
    eventually(lambda: env_runners(run_dir) == 2, 60, lambda: run.output)
    workers_in(place.path, "envrunner 1")[0].kill()
    run.wait_for("envrunner-1 left", 30)  # and is started again, since it is wanted
    eventually(lambda: env_runners(run_dir) == 2, 60, lambda: run.output)
    refused = place.run("scale", "run", "--env-runners", "1", "--evaluators", "2")
    assert "the evaluators of a run of `juggler train` stay" in refused.output
    run.interrupt()
    assert run.wait(30) == 130
    assert_books_balance(run_dir)
    assert "warning: envrunner-2 left" not in run.output
    assert (
        summary(run_dir)["env_steps_lost_unreported"] <= 2 * 64 * 32
    )  # of the one that was killed
    assert "is not running" in place.run("scale", "run", "--env-runners", "2").output


@pytest.mark.long
def test_a_second_learner_joins_a_run_and_leaves_it_again_and_loses_nothing(place: Place) -> None:
    run_dir = place.path / "run"
    options = ["--stop-return", "501", "--run-dir", "run", "--progress", "plain"]
    run = place.start("train", "cartpole", "--num-env-runners", "2", *options)
    eventually(lambda: trained_steps(run_dir), 60, lambda: run.output)
    for _ in range(2):  # its number is given again
        scaled = place.run("scale", "run", "--learners", "2")
        assert scaled.output == "learners: 2 are wanted now, in place of 1\n"
        _trains_with(2, run_dir, run)
        assert place.run("scale", "run", "--learners", "1").status == 0
        _trains_with(1, run_dir, run)
        eventually(lambda: len(workers_in(place.path, "learner")) == 1, 30)
    refused = place.run("scale", "run", "--learners", "65", "--env-runners", "1")
    told = "juggler scale: run: 65 learners: must be at most max_learners = 64\n"
    assert refused.output == told, "it names the run, and no socket"
    run.interrupt()
    assert run.wait(30) == 130
    assert run.output.count("learner-1 has left, as asked") == 2
    assert "EnvRunners: 1 are wanted" not in run.output, "it was refused as a whole"
    assert_books_balance(run_dir)
    ended = summary(run_dir)
    assert "learner_lost" not in ended["env_steps_dropped"]
    assert ended["env_steps_lost_unreported"] == 0
    assert ended["restarts"] == 0
    assert "warning" not in run.output


def _trains_with(learners: int, run_dir: Path, run: Command) -> None:
    """The run has so many learners, and goes on training."""
    eventually(lambda: metrics(run_dir)[-1]["num_learners"] == learners, 60, lambda: run.output)
    before = trained_steps(run_dir)
    eventually(lambda: trained_steps(run_dir) > before, 60, lambda: run.output)


@pytest.mark.long
def test_a_synchronous_run_keeps_its_workers(place: Place) -> None:
    options = ["--synchronous", "--stop-return", "501", "--run-dir", "run", "--progress", "plain"]
    run = place.start("train", "cartpole", *options)
    eventually(lambda: trained_steps(place.path / "run"), 60, lambda: run.output)
    for role in ("--env-runners", "--learners"):
        refused = place.run("scale", "run", role, "2")
        assert refused.status == 1
        assert "a synchronous run has the same workers in each turn" in refused.output
    run.interrupt()
    assert run.wait(30) == 130
