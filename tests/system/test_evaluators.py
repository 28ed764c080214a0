"""Evaluations on several processes, with videos, and on other hosts."""

from __future__ import annotations

import json

import pytest
from support.place import Place, eventually, metrics

import juggler

pytestmark = [pytest.mark.slow]


def test_an_evaluator_that_dials_in_leaves_the_best_checkpoint(place: Place) -> None:
    options = ["--stop-return", "none", "--evaluation-seconds", 0.5]
    options += ["--bind", "127.0.0.1:0", "--run-dir", "run"]
    driver = place.start("driver", "cartpole", *options)
    address = driver.address()
    roles = ("evaluator", "learner", "envrunner")
    workers = [place.start(role, "--driver", address) for role in roles]
    best = place.path / "run" / "best"
    # Of update 0 it may be there before an EnvRunner is.
    eventually(lambda: any(int(each.name) for each in best.glob("0*")), 90, lambda: driver.output)
    driver.interrupt()
    assert driver.wait(60) == 130, driver.output
    for worker in workers:
        assert worker.wait(60) == 0, worker.output
    record = json.loads(next(best.glob("0*/evaluation.json")).read_text())
    assert record["episodes"] == 10
    assert record["return_mean"] >= metrics(place.path / "run")[-1]["evaluation_return_mean"]
    assert juggler.evaluate(best, episodes=2).mean > 0
    place.assert_nothing_is_left()
