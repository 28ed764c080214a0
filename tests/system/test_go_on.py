"""One command for a driver, given again and again as containers do."""

from __future__ import annotations

import pytest
from support.network import free_address
from support.place import (
    Place,
    assert_books_balance,
    checkpoints,
    eventually,
    metrics,
    summary,
    trained_steps,
)


@pytest.mark.slow
def test_the_same_command_begins_a_run_goes_on_with_it_and_finds_it_ended(place: Place) -> None:
    directory = place.path / "run"
    token = place.write("token", "a secret\n")
    secret = ["--token-file", token]
    start = ["driver", "cartpole", "--run-dir", "run", "--go-on", *secret]
    address = free_address()
    seldom = ["--checkpoint-seconds", 600]
    first = place.start(*start, "--bind", address, "--stop-return", 501, *seldom)
    first.wait_for(f"waiting for workers at {address}")
    workers = [place.start(role, "--driver", address, *secret) for role in ("learner", "envrunner")]
    eventually(lambda: trained_steps(directory) > 0, 60, lambda: first.output)
    assert not checkpoints(directory)
    first.process.kill()

    second = place.start(*start, "--bind", address, "--checkpoint-seconds", 1, "--stop-return", 501)
    eventually(lambda: checkpoints(directory), 90, lambda: second.output)
    assert "going on" not in second.output, "there was nothing to go on from"
    second.process.kill()

    reached = [
        *start,
        "--bind",
        address,
        "--stop-steps",
        max(1, metrics(directory)[-1]["env_steps_trained"]),
    ]
    third = place.start(*reached)
    third.wait_for("going on from update ")
    assert third.wait(110) == 0, third.output
    for each in workers:
        assert each.wait(30) == 0, each.output
    assert summary(directory)["reason_for_stop"] == "stop_steps"
    assert_books_balance(directory)

    fourth = place.run(*reached)
    assert fourth.status == 0
    assert "has ended (stop_steps): nothing to go on with. To" in fourth.output
