"""`juggler scale`, on a run of one host."""

from __future__ import annotations

import pytest
from support.place import (
    Place,
    assert_books_balance,
    env_runners,
    eventually,
    summary,
    trained_steps,
    trains_on,
    workers_in,
)

pytestmark = [pytest.mark.slow]


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
