"""Workers that dial in over TCP."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from queue import SimpleQueue

import numpy as np
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
    train_beyond_a_checkpoint,
    trained_steps,
)

from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.wire.v1 import episodes_pb2, training_pb2

EVERY_SECOND = ["--checkpoint-seconds", 1]


def _address(output: str) -> str:
    line = next(line for line in output.splitlines() if "waiting for workers at" in line)
    return line.split()[-1]


def _pushed_batch(rows: int, steps: int) -> EpisodeBatch:
    """Of CartPole: a learner would take it, were it asked for."""
    no, numbers = np.zeros((rows, steps), np.bool_), np.arange(rows)
    columns = {
        "observations": np.zeros((rows, steps, 4), np.float32),
        "actions": np.zeros((rows, steps), np.int64),
        "rewards": np.full((rows, steps), -9, np.float32),
        "terminated": no,
        "truncated": no,
        "live": ~no,
        "action_logp": np.full((rows, steps), -0.7, np.float32),
        "last_observations": np.zeros((rows, 4), np.float32),
        "states": {},
        "final_observations": np.zeros((0, 4), np.float32),
        "final_rows": np.zeros(0, np.int32),
        "final_steps": np.zeros(0, np.int32),
        "segment_episodes": numbers.astype(np.uint64),
        "segment_rows": numbers.astype(np.int32),
        "segment_starts": np.zeros(rows, np.int32),
        "segment_lengths": np.full(rows, steps, np.int32),
        "segment_offsets": np.zeros(rows, np.int32),
        "segment_generations": np.ones(rows, np.uint64),
        "segment_updates": np.ones(rows, np.uint64),
    }
    return EpisodeBatch.from_tree(columns)


@pytest.mark.slow
def test_driver_learner_and_envrunner_meet_over_tcp(place: Place) -> None:
    token = place.write("token", "a secret\n")
    secret = ["--token-file", token]
    directory = place.path / "run"
    options = ["--stop-return", 501, "--run-dir", "run", "--bind", "127.0.0.1:0"]
    driver = place.start("driver", "cartpole", *options, *secret)
    driver.wait_for("waiting for workers at")
    address = _address(driver.output)

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


@pytest.mark.long
def test_batches_that_nobody_asked_for_do_not_keep_those_of_the_run_out(
    place: Place,
) -> None:
    secret, directory = ["--token-file", place.write("token", "a secret\n")], place.path / "run"
    options = ["--stop-return", 501, "--run-dir", "run", "--bind", "127.0.0.1:0"]
    driver = place.start("driver", "cartpole", *options, *secret)
    driver.wait_for("waiting for workers at")
    dial = ["--driver", _address(driver.output), *secret]
    data_address = free_address()
    workers = [
        place.start("learner", *dial, "--bind", data_address),
        place.start("envrunner", *dial),
    ]
    eventually(lambda: trained_steps(directory) > 0, 60, lambda: driver.output)

    run_id = json.loads((directory / "driver.json").read_text())["run"]
    settled: SimpleQueue[str] = SimpleQueue()
    metadata = call_metadata("a secret", run_id, "attacker")
    sender = EpisodeSender(data_address, metadata, lambda *each: settled.put(each[2]))
    batch, newest = _pushed_batch(rows=16, steps=32), metrics(directory)[-1]["updates"]
    for batch_id in range(5000):  # far ahead of what the run gets to meanwhile
        header = episodes_pb2.BatchHeader(
            batch_id=batch_id,
            envrunner="envrunner-0",
            generation=1,
            live_steps=batch.live_steps,
            version=training_pb2.WeightsVersion(generation=1, update=newest),
        )
        sender.send(header, {"default": batch.to_tree()})
    why = {settled.get(timeout=60) for _ in range(5000)}
    assert any("has no permit of the driver's" in each for each in why), why
    reached = trained_steps(directory)
    eventually(lambda: trained_steps(directory) > reached + 50_000, 60, lambda: driver.output)
    sender.close()
    driver.interrupt()
    assert driver.wait(30) == 130, driver.output
    for worker in workers:
        assert worker.wait(30) == 0, worker.output
    assert_books_balance(directory)
    end = summary(directory)
    assert not end["env_steps_dropped"].keys() & {"refused", "learner_lost"}, "no honest one was"
    assert end["env_steps_trained"] == end["learner_steps"]["learner-0"]["trained"]
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_worker_may_leave_and_another_one_join(place: Place) -> None:
    directory = place.path / "run"
    options = ["--stop-steps", 10**9, "--stop-return", 501, "--run-dir", "run"]
    driver = place.start("driver", "cartpole", "--bind", "127.0.0.1:0", *options)
    driver.wait_for("waiting for workers at")
    address = _address(driver.output)
    learner = place.start("learner", "--driver", address)
    first = place.start("envrunner", "--driver", address)
    eventually(lambda: trained_steps(directory) > 0, 60, lambda: driver.output)
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
def test_learners_of_several_hosts_are_a_group_that_loses_and_finds_members(place: Place) -> None:
    directory = place.path / "run"
    options = ["--stop-return", 501, "--run-dir", "run", "--num-learners", 2, *EVERY_SECOND]
    driver = place.start("driver", "cartpole", "--bind", "127.0.0.1:0", *options)
    driver.wait_for("waiting for workers at")
    dial = ["--driver", _address(driver.output)]
    first, second = (place.start("learner", *dial, "--index", index) for index in range(2))
    runners = [place.start("envrunner", *dial) for _ in range(2)]
    eventually(lambda: trained_steps(directory) > 0, 60, lambda: driver.output)

    first.process.kill()
    driver.wait_for("learner group 2: learner-1 on cpu", 30)
    third = place.start("learner", *dial)
    driver.wait_for("learner group 3: learner-1 on cpu, learner-0 on cpu", 60)
    reached = trained_steps(directory)
    eventually(lambda: trained_steps(directory) > reached, 30, lambda: driver.output)

    train_beyond_a_checkpoint(directory, lambda: driver.output)
    for learner in (second, third):
        learner.process.kill()
    fourth = place.start("learner", *dial)
    driver.wait_for("the learners' weights are lost: learner-", 30)
    driver.wait_for("learner group 5: ", 30)
    reached = trained_steps(directory)
    eventually(lambda: trained_steps(directory) > reached, 30, lambda: driver.output)
    driver.interrupt()
    assert driver.wait(30) == 130, driver.output
    for worker in (fourth, *runners):
        assert worker.wait(30) == 0, worker.output
    assert_books_balance(directory)
    place.assert_nothing_is_left()


@pytest.mark.long
def test_learners_come_and_go_while_a_run_that_began_with_one_goes_on(place: Place) -> None:
    directory = place.path / "run"
    options = ["--stop-return", 501, "--run-dir", "run", "--max-learners", 3, *EVERY_SECOND]
    driver = place.start("driver", "cartpole", "--bind", "127.0.0.1:0", *options)
    driver.wait_for("waiting for workers at")
    dial = ["--driver", _address(driver.output)]
    runner = place.start("envrunner", *dial)
    learners = [place.start("learner", *dial)]

    def trains_with(number: int) -> None:
        reached = trained_steps(directory)

        def does() -> bool:
            last = metrics(directory)[-1:]
            return trained_steps(directory) > reached and last[0]["num_learners"] == number

        eventually(does, 60, lambda: driver.output)

    eventually(lambda: trained_steps(directory) > 0, 60, lambda: driver.output)
    for number in (2, 3):
        learners.append(place.start("learner", *dial))
        trains_with(number)
    too_many = place.start("learner", *dial)
    assert too_many.wait(30) == 1
    assert "this run has its 3 learner already, and takes no more" in too_many.output
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


@pytest.mark.long
def test_a_run_begins_without_a_learner_that_does_not_come_and_takes_it_later(
    place: Place,
) -> None:
    directory = place.path / "run"
    options = ["--stop-return", 501, "--run-dir", "run", "--num-learners", 2]
    options += ["--worker-timeout-seconds", 6]
    driver = place.start("driver", "cartpole", "--bind", "127.0.0.1:0", *options)
    driver.wait_for("waiting for workers at")
    dial = ["--driver", _address(driver.output)]
    workers = [place.start(role, *dial) for role in ("envrunner", "learner")]
    driver.wait_for("waiting for 1 more learner, for up to 6 s", 60)
    assert trained_steps(directory) == 0
    driver.wait_for("1 more learner did not come within 6 s: the run begins without", 30)
    eventually(lambda: trained_steps(directory) > 0, 30, lambda: driver.output)
    workers.append(place.start("learner", *dial))
    driver.wait_for("learner group 2: learner-0 on cpu, learner-1 on cpu", 60)
    driver.interrupt()
    assert driver.wait(30) == 130, driver.output
    for each in workers:
        assert each.wait(30) == 0, each.output
    assert_books_balance(directory)
    place.assert_nothing_is_left()


@pytest.mark.long
def test_workers_that_shall_not_wait_for_another_driver_say_so_and_leave(place: Place) -> None:
    options = ["--run-dir", "run", "--bind", "127.0.0.1:0", "--stop-return", 501]
    driver = place.start("driver", "cartpole", *options)
    driver.wait_for("waiting for workers at")
    address = _address(driver.output)
    dial = ["--driver", address, "--reattach-seconds", 0]
    workers = [place.start(role, *dial) for role in ("envrunner", "learner")]
    patient = place.start("envrunner", "--driver", address)
    for worker in (*workers, patient):
        worker.wait_for("attached to the driver")
    eventually(lambda: trained_steps(place.path / "run") > 0, 60, lambda: driver.output)
    driver.process.kill()
    for worker in workers:
        assert worker.wait(30) == 1, worker.output
        assert "lost the driver" in worker.output
    patient.wait_for("waiting up to 600 s for a driver")
    patient.process.terminate()
    assert patient.wait(30) == -signal.SIGTERM, "one that waits can be told to leave"


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
    again.wait_for("going on from update")

    def all_are_back() -> bool:
        line = metrics(directory)[-1]
        return line["weights_version"][0] == 2 and line["num_env_runners"] == 2

    eventually(all_are_back, 60, lambda: again.output)
    reached = trained_steps(directory)
    eventually(lambda: trained_steps(directory) > reached, 30, lambda: again.output)
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
