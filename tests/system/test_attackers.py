"""A run goes on beside clients without its token that open all the calls that they can."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from support.attacker import attacker
from support.network import free_address
from support.place import Place, assert_books_balance, env_runners, eventually, trained_steps


@pytest.mark.slow
def test_workers_come_and_train_whatever_strangers_hold_open(place: Place) -> None:
    secret = ["--token-file", place.write("token", "a secret\n")]
    directory = place.path / "run"
    at_driver, at_learner = free_address(), free_address()
    options = ["--stop-return", 501, "--run-dir", "run", "--bind", at_driver]
    driver = place.start("driver", "cartpole", *options, *secret)
    driver.wait_for("waiting for workers at")
    with ExitStack() as attackers:
        for kind in ("watch", "attach"):
            attackers.enter_context(attacker(at_driver, kind, connections=280))
        learner = place.start("learner", "--driver", at_driver, "--bind", at_learner, *secret)
        eventually(lambda: "attached" in learner.output, 60, lambda: learner.output)
        attackers.enter_context(attacker(at_learner, "check", connections=100))
        runners = [place.start("envrunner", "--driver", at_driver, *secret) for _ in range(2)]
        eventually(
            lambda: env_runners(directory) == 2 and trained_steps(directory) > 20_000,
            180,
            lambda: driver.output + runners[0].output,
        )
        probe = place.run("healthcheck", at_driver)
        assert probe.status == 0, probe.output
        told = place.run("status", at_driver, "--once", *secret)
        assert told.status == 0, told.output
    driver.process.terminate()
    assert driver.wait(60) == 143, driver.output
    for worker in (learner, *runners):
        assert worker.wait(30) == 0, worker.output
    assert_books_balance(directory)
    place.assert_nothing_is_left()
