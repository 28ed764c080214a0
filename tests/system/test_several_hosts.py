"""Workers that dial in over TCP."""

from __future__ import annotations

import pytest
from support.network import free_address
from support.place import (
    Place,
    assert_books_balance,
    checkpoints,
    env_runners,
    eventually,
    metrics,
    summary,
    trained_steps,
    trains_on,
)

EVERY_SECOND = ["--checkpoint-seconds", 1]


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


@pytest.mark.slow
def test_workers_go_on_with_a_driver_that_takes_the_place_of_theirs(place: Place) -> None:
    directory = place.path / "run"
    options = ["--stop-return", 501, *EVERY_SECOND]
    address = free_address()
    driver = place.start("driver", "cartpole", "--run-dir", "run", "--bind", address, *options)
    driver.wait_for("waiting for workers at")
    workers = [
        place.start(role, "--driver", address) for role in ("learner", "envrunner", "envrunner")
    ]
    eventually(lambda: checkpoints(directory), 60, lambda: driver.output)
    eventually(lambda: env_runners(directory) == 2, 60, lambda: driver.output)
    driver.process.kill()
    for worker in workers:
        worker.wait_for(f"waiting up to 600 s for a driver at {address}", 60)
    again = place.start("driver", "--resume", "run", "--bind", address, *options)
    again.wait_for("resuming from update")

    def all_are_back() -> bool:
        line = metrics(directory)[-1]
        return line["weights_version"][0] == 2 and line["num_env_runners"] == 2

    eventually(all_are_back, 60, lambda: again.output)
    trains_on(directory, again)
    again.process.terminate()
    assert again.wait(30) == 143, again.output
    for worker in workers:
        assert worker.wait(30) == 0, worker.output
    assert summary(directory)["weights_version"][0] == 2
    assert_books_balance(directory)
