"""Workers that dial in over TCP."""

from __future__ import annotations

import sys
from pathlib import Path

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
def test_driver_learner_and_envrunner_meet_over_tcp(place: Place) -> None:
    token = place.write("token", "a secret\n")
    secret = ["--token-file", token]
    directory = place.path / "run"
    options = ["--stop-return", 501, "--run-dir", "run", "--bind", "127.0.0.1:0"]
    driver = place.start("driver", "cartpole", *options, *secret)
    address = driver.address()

    stranger = place.run("envrunner", "--driver", address)
    assert stranger.status == 1
    assert "the token is missing or wrong" in stranger.output

    runner = place.start("envrunner", "--driver", address, *secret)  # may come before a learner
    learner = place.start("learner", "--driver", address, JUGGLER_TOKEN="a secret")
    eventually(lambda: trained_steps(directory), 60, lambda: driver.output)
    driver.process.terminate()
    assert driver.wait(30) == 143, driver.output
    for worker in (runner, learner):
        assert worker.wait(30) == 0, worker.output
    assert summary(directory)["env_steps_trained"] > 0
    assert_books_balance(directory)
    place.assert_nothing_is_left()


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


@pytest.mark.long
def test_learners_come_and_go_while_a_run_that_began_with_one_goes_on(place: Place) -> None:
    directory = place.path / "run"
    options = ["--stop-return", 501, "--run-dir", "run", "--max-learners", 3, *EVERY_SECOND]
    driver = place.start("driver", "cartpole", "--bind", "127.0.0.1:0", *options)
    dial = ["--driver", driver.address()]
    runner = place.start("envrunner", *dial)
    learners = [place.start("learner", *dial)]

    def trains_with(number: int) -> None:
        reached = trained_steps(directory)

        def does() -> bool:
            last = metrics(directory)[-1:]
            return trained_steps(directory) > reached and last[0]["num_learners"] == number

        eventually(does, 60, lambda: driver.output)

    trains_on(directory, driver)
    for number in (2, 3):
        learners.append(place.start("learner", *dial))
        trains_with(number)
    too_many = place.start("learner", *dial)
    assert too_many.wait(30) == 1
    assert "this run already has its 3 learner, and admits no more" in too_many.output
    learners.pop(0).process.kill()
    trains_with(2)
    leaves = learners.pop(0)
    leaves.process.terminate()
    assert leaves.wait(30) == 0, leaves.output
    trains_with(1)
    learners.append(place.start("learner", *dial))
    trains_with(2)

    driver.interrupt()
    assert driver.wait(30) == 130, driver.output
    for worker in (runner, *learners):
        assert worker.wait(30) == 0, worker.output
    updates = [line["updates"] for line in metrics(directory)]
    assert updates == sorted(updates), "no update was lost"
    assert "weights are lost" not in driver.output
    assert_books_balance(directory)
    end = summary(directory)
    own = sum(counts["trained"] for counts in end["learner_steps"].values())
    assert own <= end["env_steps_trained"] <= own + end["env_steps_dropped"]["learner_lost"]
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


@pytest.mark.slow
def test_a_run_spans_two_hosts(place: Place, two_hosts: tuple[list[str], list[str], str]) -> None:
    first, second, host = two_hosts
    juggler = [sys.executable, "-m", "juggler"]
    token = place.write("token", "a secret\n")
    secret = ["--token-file", str(token)]
    options = ["--run-dir", "run", "--stop-steps", "100000", "--bind", "0.0.0.0:5005"]
    driver = place.start_program(
        [*first, *juggler, "driver", "cartpole", *options, "--insecure", *secret]
    )
    driver.wait_for("waiting for workers at")
    dial = ["--driver", f"{host}:5005", *secret]
    data = ["--bind", "0.0.0.0:0", "--advertise", f"{host}:0", "--insecure"]
    learner = place.start_program([*first, *juggler, "learner", *dial, *data])
    runner = place.start_program([*second, *juggler, "envrunner", *dial])
    assert driver.wait(110) == 0, driver.output
    assert learner.wait(30) == 0, learner.output
    assert runner.wait(30) == 0, runner.output
    assert_books_balance(Path(place.path, "run"))
    place.assert_nothing_is_left()
