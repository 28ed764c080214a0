"""Workers that dial in over TCP."""

from __future__ import annotations

import pytest
from support.place import (
    Place,
    assert_books_balance,
    eventually,
    summary,
    trained_steps,
    trains_on,
)


@pytest.mark.slow
def test_a_worker_may_leave_and_another_one_join(place: Place) -> None:
    directory = place.path / "run"
    options = ["--stop-steps", 10**9, "--stop-return", 501, "--run-dir", "run"]
    driver = place.start("driver", "cartpole", "--bind", "127.0.0.1:0", *options)
    address = driver.address()
    learner = place.start("learner", "--driver", address)
    first = place.start("envrunner", "--driver", address)
    trains_on(directory, driver)
    first.process.terminate()
    assert first.wait(30) == 0, first.output
    driver.wait_for("envrunner-0 left: terminated")
    reached = trained_steps(directory)
    second = place.start("envrunner", "--driver", address)
    eventually(lambda: trained_steps(directory) > reached + 50_000, 60, lambda: driver.output)
    driver.interrupt()
    assert driver.wait(30) == 130, driver.output
    for worker in (second, learner):
        assert worker.wait(30) == 0, worker.output
    assert_books_balance(directory)
    end = summary(directory)
    assert end["env_steps_lost_unreported"] == 0, "it told what it had sampled before it left"
    assert end["env_steps_trained"] == end["learner_steps"]["learner-0"]["trained"]
    place.assert_nothing_is_left()
