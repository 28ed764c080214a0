"""What happens to a run over a network that fails it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.network import Network, free_address
from support.place import (
    Place,
    assert_books_balance,
    env_runners,
    eventually,
    status,
    summary,
    trained_steps,
)

_CUT_SECONDS = 20  # more than a worker may be silent, less than TCP notices


def _all_ready(directory: Path, restarts: int) -> dict[str, Any] | None:
    """The status, once so many processes have taken the place of others."""
    found = status(directory)
    states = [worker["state"] for worker in found["workers"]]
    return found if found["restarts"] == restarts and states == ["ready"] * 3 else None


def _mean(histogram: dict[str, Any], before: dict[str, Any]) -> float:
    """Of what came since."""
    count = sum(histogram["counts"]) - sum(before["counts"])
    return float((histogram["sum"] - before["sum"]) / count)


@pytest.mark.long
def test_training_goes_on_whatever_the_network_does(place: Place) -> None:
    directory, draws = place.path / "run", random.Random(7)
    options = ["--run-dir", "run", "--stop-return", 501, "--checkpoint-seconds", 1]
    with Network() as network:
        driver = place.start("driver", "cartpole", "--bind", "127.0.0.1:0", *options)
        to_driver = network.link(driver.address())
        dial, bind = ["--driver", to_driver], free_address()
        to_learner = network.link(bind)
        data = ["--bind", bind, "--advertise", to_learner]
        workers = [place.start("learner", *dial, *data)]
        workers += [place.start("envrunner", *dial) for _ in range(2)]

        def said() -> str:
            return "\n".join(command.output for command in (driver, *workers))

        def everybody_trains(seconds: float) -> None:
            eventually(lambda: env_runners(directory) == 2, seconds, said)
            reached = trained_steps(directory)
            eventually(lambda: trained_steps(directory) > reached + 1000, seconds, said)

        everybody_trains(60)
        before = status(directory)

        network.delay = 0.1
        time.sleep(4)
        everybody_trains(40)
        late = status(directory)
        # There and back, for the request, the batch and its acknowledgement.
        assert _mean(late["sample_request_seconds"], before["sample_request_seconds"]) > 0.2

        network.delay, network.rate = 0.0, 1e6
        time.sleep(4)
        everybody_trains(40)
        slow = status(directory)
        assert [worker["state"] for worker in slow["workers"]] == ["ready"] * 3, slow
        network.rate = float("inf")

        def batches_were_under_way() -> bool:
            network.break_one(to_learner, draws)
            time.sleep(draws.uniform(0.5, 1.5))
            return "learner_lost" in status(directory)["steps"]["dropped"]

        network.delay = 0.05
        eventually(batches_were_under_way, 60, said)
        network.delay = 0.0
        everybody_trains(40)
        patched = status(directory)
        assert [worker["state"] for worker in patched["workers"]] == ["ready"] * 3, patched
        assert patched["restarts"] == 0
        assert patched["steps"]["dropped"]["learner_lost"] > 0

        for restarts in (1, 2):  # a connection that is made anew has no worker to be lost yet
            network.break_one(to_driver, draws)
            broken = eventually(lambda: _all_ready(directory, restarts), 60, said)  # noqa: B023
        everybody_trains(40)
        errors = [worker["last_error"] for worker in broken["workers"]]
        of_connections = sum(each.startswith("the connection ") for each in errors)
        assert of_connections in (1, 2), broken  # it may have been the same worker's twice

        network.cut()
        time.sleep(_CUT_SECONDS)
        cut = status(directory)
        assert {worker["state"] for worker in cut["workers"]} == {"left"}, cut
        for worker in cut["workers"]:
            # gRPC's pings are as patient as the driver.
            found = worker["last_error"]
            seconds = 6 if worker["role"] == "learner" else 10  # others may wait for a learner
            assert found.startswith((f"no heartbeat for {seconds} s", "the connection ")), cut
        network.heal()
        eventually(lambda: _all_ready(directory, restarts=5), 60, said)
        everybody_trains(40)

        driver.process.terminate()
        assert driver.wait(30) == 143, said()
        for worker in workers:
            assert worker.wait(30) == 0, said()
    assert_books_balance(directory)
    end = summary(directory)
    own = end["learner_steps"]["learner-0"]
    assert own["trained"] == end["env_steps_trained"], "the learner counts for itself"
    assert end["env_steps_dropped"]["learner_lost"] > 0
    place.assert_nothing_is_left()
