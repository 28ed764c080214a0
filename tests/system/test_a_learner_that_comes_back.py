"""A learner whose connection to the driver breaks, and which has newer weights than the disk."""

from __future__ import annotations

import random
import re
import time

from network import Network
from place import (
    Place,
    assert_books_balance,
    eventually,
    metrics,
    status,
    summary,
    trained_steps,
)


def test_a_learner_that_lost_its_driver_goes_on_from_the_weights_it_had(place: Place) -> None:
    directory = place.path / "run"
    options = ["--run-dir", "run", "--stop-return", 501, "--checkpoint-seconds", 600]
    with Network() as network:
        driver = place.start("driver", "cartpole", "--bind", "127.0.0.1:0", *options)
        driver.wait_for("waiting for workers at")
        line = next(line for line in driver.output.splitlines() if "waiting for" in line)
        address = line.split()[-1]
        to_driver = network.link(address)
        learner = place.start("learner", "--driver", to_driver)
        runner = place.start("envrunner", "--driver", address)

        def said() -> str:
            return f"{driver.output}\n{learner.output}\n{runner.output}"

        eventually(lambda: trained_steps(directory) > 10_000, 60, said)
        network.cut("there")  # the learner still hears, and makes what it is asked for
        eventually(lambda: status(directory)["queues"]["updates_in_flight"] == 2, 5, said)
        time.sleep(1)
        network.break_one(to_driver, random.Random())
        network.heal()
        driver.wait_for("learner-0 is back with its weights of update ")
        back = re.search(r"of update (\d+), and with (\d+) steps trained on that", driver.output)
        assert back is not None, said()
        update = int(back[1])
        before = max(line["weights_version"][1] for line in metrics(directory))
        assert update >= before, "the newest weights that anybody had"
        reached = trained_steps(directory)
        eventually(lambda: trained_steps(directory) > reached + 5000, 30, said)
        driver.process.terminate()
        for command in (driver, learner, runner):
            assert command.wait(10) == 0, said()
    assert "weights are lost" not in driver.output
    assert_books_balance(directory)
    end = summary(directory)
    assert end["weights_version"][0] == 2
    assert end["weights_version"][1] > update
    assert end["learner_steps"]["learner-0"]["trained"] == end["env_steps_trained"]
    lines = [line["weights_version"] for line in metrics(directory)]
    assert lines == sorted(lines), "no update was lost"
    place.assert_nothing_is_left()
