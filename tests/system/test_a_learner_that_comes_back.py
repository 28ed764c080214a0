"""A learner whose connection to the driver breaks, and which has newer weights than the disk."""

from __future__ import annotations

import random
import re
import time

import pytest
from support.network import Network
from support.place import (
    Place,
    assert_books_balance,
    eventually,
    metrics,
    status,
    summary,
    trained_steps,
)


@pytest.mark.slow
def test_learners_that_lost_their_driver_go_on_from_the_weights_they_had(place: Place) -> None:
    directory = place.path / "run"
    options = ["--run-dir", "run", "--stop-return", 501, "--checkpoint-seconds", 600]
    options += ["--num-learners", 2]
    with Network() as network:
        driver = place.start("driver", "cartpole", "--bind", "127.0.0.1:0", *options)
        address = driver.address()
        links = [network.link(address) for _ in range(2)]
        workers = [place.start("learner", "--driver", link) for link in links]
        workers.append(place.start("envrunner", "--driver", address))

        def said() -> str:
            return "\n".join(command.output for command in (driver, *workers))

        eventually(lambda: trained_steps(directory) > 10_000, 60, said)
        network.cut("there")  # learners still hear, and make what they are asked for
        eventually(lambda: status(directory)["queues"]["updates_in_flight"] == 2, 5, said)
        time.sleep(2)  # and it is all the same before a silent learner counts as lost, in 6
        heard = metrics(directory)[-1]["weights_version"][1]
        for link in links:
            network.break_one(link, random.Random())
        network.heal()
        driver.wait_for("is back with its weights of update ")
        back = re.search(
            r"of update (\d+), and with (\d+) unreported steps trained on", driver.output
        )
        assert back is not None, said()
        update, reached = int(back[1]), trained_steps(directory)
        eventually(lambda: trained_steps(directory) > reached + 5000, 60, said)

        def all_are_back() -> bool:
            return {worker["state"] for worker in status(directory)["workers"]} == {"ready"}

        eventually(all_are_back, 60, said)  # one that waits for a driver would not hear of the end
        driver.process.terminate()
        assert driver.wait(30) == 143, said()
        for worker in workers:
            assert worker.wait(30) == 0, said()
    assert "weights are lost" not in driver.output
    assert_books_balance(directory)
    versions = [line["weights_version"] for line in metrics(directory)]
    assert versions == sorted(versions)
    assert update > heard, "the newest weights, which nobody had heard of"
    end = summary(directory)
    assert end["weights_version"][0] >= 2
    assert end["weights_version"][1] > update
    own = sum(counts["trained"] for counts in end["learner_steps"].values())
    assert own == end["env_steps_trained"]
    place.assert_nothing_is_left()
