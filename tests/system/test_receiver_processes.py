"""A run whose learner has receiver processes."""

from __future__ import annotations

import pytest
from support.place import (
    Place,
    assert_books_balance,
    env_runners,
    eventually,
    summary,
    trained_steps,
)

LONG = ["--stop-return", 501, "--run-dir", "run", "--bind", "127.0.0.1:0"]


@pytest.mark.long
def test_a_run_over_tls_goes_on_when_its_receivers_are_killed_or_stand_still(place: Place) -> None:
    directory = place.path / "run"
    made = place.run("certs", "tls")
    assert made.status == 0, made.output
    driver = place.start("driver", "cartpole", *LONG, "--tls", "tls")
    driver.wait_for("waiting for workers at")
    line = next(line for line in driver.output.splitlines() if "waiting for workers at" in line)
    dial = ["--driver", line.split()[-1], "--tls", "tls"]
    # Whatever its size, a batch goes through shared memory.
    learner = place.start("learner", *dial, "--receivers", 2, JUGGLER_SHARED_MEMORY="0")
    workers = [learner, *(place.start("envrunner", *dial) for _ in range(2))]

    def said() -> str:
        return "\n".join(each.output for each in (driver, *workers))

    eventually(lambda: trained_steps(directory) and env_runners(directory) == 2, 60, said)
    receivers = [place.worker(f"receiver {number}") for number in (0, 1)]
    written = [each.path for receiver in receivers for each in receiver.memory_maps()]
    assert any("memfd:juggler" in path for path in written)
    for number in (0, 1, 0):
        place.worker(f"receiver {number}").kill()
        reached = trained_steps(directory)
        eventually(lambda reached=reached: trained_steps(directory) > reached + 20_000, 60, said)
    lost = "lost its receiver-0 (killed by SIGKILL): it starts again in"
    eventually(lambda: driver.output.count(lost) == 2, 10, said)
    assert driver.output.count("lost its receiver-1 (killed by SIGKILL)") == 1
    place.worker("receiver 1").suspend()
    stands_still = "kills its receiver-1, which stands still or hangs"
    eventually(lambda: stands_still in driver.output, 60, said)
    reached = trained_steps(directory)
    eventually(lambda: trained_steps(directory) > reached + 20_000, 60, said)
    eventually(lambda: place.worker("receiver 1").status() != "stopped", 60, said)
    driver.process.terminate()
    for each, status in ((driver, 143), *((worker, 0) for worker in workers)):
        assert each.wait(30) == status, said()
    assert_books_balance(directory)
    end = summary(directory)
    own = sum(counts["trained"] for counts in end["learner_steps"].values())
    assert own == end["env_steps_trained"]
    place.assert_nothing_is_left()
