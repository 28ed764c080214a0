"""What workers say, and what becomes of them when it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import any_pb2
from support.workers_world import ROWS, STEPS, WorkersWorld, begin_an_evaluation

from juggler.runtime.actors.requests import RequestPool
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


@pytest.fixture
def world(tmp_path: Path) -> WorkersWorld:
    return WorkersWorld(tmp_path)


def _garbage(kind: str) -> any_pb2.Any:
    return any_pb2.Any(type_url=f"type.googleapis.com/juggler.v1.{kind}", value=b"\xff" * 20)


def _update(world: WorkersWorld) -> tuple[int, training_pb2.Update]:
    world.sample()
    (update,) = world.asked(world.learner, training_pb2.Update)
    return update


def test_a_learner_that_takes_no_batch_of_an_envrunner_ends_the_run_with_the_reason(
    world: WorkersWorld,
) -> None:
    refused = {"dropped": "refused", "explanation": "observations hold a number outside"}
    for number in range(9):
        world.sample(number, **refused)
    world.sample(9)  # one that is taken
    for number in range(10, 19):
        world.sample(number, **refused)
    assert not world.parts.end.reached
    world.sample(19, **refused)
    assert "learner-0 has refused 10 batches of envrunner-0 in a row" in world.parts.end.failure
    assert "observations hold a number outside" in world.parts.end.failure


def test_bytes_that_are_no_message_are_blamed_on_who_sent_them(world: WorkersWorld) -> None:
    command_id, _ = world.asked(world.runner, training_pb2.SampleRequest)[0]
    world.reply(world.runner, command_id, _garbage("Receipt"))
    assert "not a juggler.v1.Receipt" in world.why_dismissed(world.runner)


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_receipt_that_cannot_be_is_blamed_on_its_runner(
    tmp_path: Path, synchronous: bool
) -> None:
    world = WorkersWorld(tmp_path, synchronous=synchronous)
    world.sample(dropped="boredom")
    assert "'boredom'" in world.why_dismissed(world.runner)
    assert world.core.ledger.sampled == 0


def test_who_answers_no_command_is_let_go_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(hub: Any, cap: int, **others: Any) -> RequestPool:
        return RequestPool(hub, cap=10, **others)

    monkeypatch.setattr("juggler.driver.workers.command_sender.RequestPool", short)
    world = WorkersWorld(tmp_path)
    for batch_id in range(1000, 1020):  # each makes a Discard, which is never answered
        arrival = training_pb2.Arrival(batch_id=batch_id)
        world.report(world.learner, training_pb2.Arrivals(arrivals=[arrival]))
    assert "10 commands in flight" in world.why_dismissed(world.learner)


def test_a_runner_that_fails_and_stays_is_let_go_when_it_fails_again(world: WorkersWorld) -> None:
    for _ in range(2):
        command_id, _ = world.asked(world.runner, training_pb2.SampleRequest)[-1]
        assert world.why_dismissed(world.runner) == ""
        world.fail(world.runner, command_id)
    assert "failed again: cannot" in world.why_dismissed(world.runner)
    world.leave(world.runner)
    world.core.ledger.check()


def test_an_update_that_failed_is_not_waited_for(world: WorkersWorld) -> None:
    command_id, _ = _update(world)
    world.fail(world.learner, command_id)
    assert world.core.idle
    assert world.core.ledger.dropped["learner_lost"] == 20


def test_envrunners_know_how_many_steps_the_run_has_trained_on(world: WorkersWorld) -> None:
    command_id, update = _update(world)
    done = training_pb2.UpdateDone(
        update_id=update.update_id, version={"generation": update.generation, "update": 1}
    )
    for batch_id in update.batch_ids:
        done.batches.add(batch_id=batch_id, live_steps=ROWS * STEPS)
    world.reply(world.learner, command_id, done)
    world.sample(1)
    requests = world.asked(world.runner, training_pb2.SampleRequest)
    trained = [request.steps_trained for _, request in requests]
    assert (trained[0], trained[-1]) == (0, ROWS * STEPS)
    world.leave(world.runner)
    ((_, setup),) = world.asked(world.join("envrunner"), training_pb2.Setup)
    assert setup.steps_trained == ROWS * STEPS


def test_an_evaluation_that_failed_is_not_waited_for(world: WorkersWorld) -> None:
    evaluator = world.joined("evaluator")
    begin_an_evaluation(world)
    assert world.parts.evaluations.under_way
    world.fail(evaluator, world.asked(evaluator, training_pb2.Evaluate)[0][0])
    assert not world.parts.evaluations.under_way


def test_only_what_a_runner_had_begun_is_lost_with_it_when_it_says_so(world: WorkersWorld) -> None:
    (begun, _), *rest = world.asked(world.runner, training_pb2.SampleRequest)
    assert rest
    world.leave(world.runner, farewell=True, unanswered=frozenset({begun}))
    assert world.core.ledger.lost_unreported == ROWS * STEPS


def test_a_request_does_not_go_to_a_successor_that_is_not_set_up(world: WorkersWorld) -> None:
    successor = world.join("envrunner")  # before its predecessor is known to be gone
    world.sample()
    assert world.asked(successor, training_pb2.SampleRequest) == []
    world.leave(world.runner)
    world.get_ready(successor)
    assert len(world.asked(successor, training_pb2.SampleRequest)) == 2


def test_what_is_no_state_is_blamed_on_the_learner(world: WorkersWorld, tmp_path: Path) -> None:
    world.reply(world.learner, world.ask_for_a_snapshot(), any_pb2.Any(value=b"\xff"))
    assert world.why_dismissed(world.learner)
    world.leave(world.learner)
    assert not world.snapshots.under_way
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_that_failed_is_not_waited_for(world: WorkersWorld) -> None:
    world.fail(world.learner, world.ask_for_a_snapshot())
    assert not world.snapshots.under_way


# -- EnvRunners -----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["runner", "learner"])
def test_a_note_is_one_line(world: WorkersWorld, role: str) -> None:
    worker = getattr(world, role)
    world.report(worker, training_pb2.Note(text="takes\nsimulators"))
    assert world.told.messages == [f"{worker.worker_id} takes simulators"]
    assert world.told.levels == ["info"]
    world.report(worker, training_pb2.Note(text="x", warning=True))
    assert world.told.levels == ["info", "warning"]
    assert world.why_dismissed(worker) == ""


# -- learners -------------------------------------------------------------------------------------


def test_metrics_of_modules_that_are_no_more_do_not_pile_up(world: WorkersWorld) -> None:
    metrics = world.parts.metrics
    for number in range(3):
        metrics.updated("learner-0", "default", {f"module-{number}": {"loss": 1.0}})
        metrics.updated("learner-0", "default", {})
    assert list(metrics.modules["learner-0", "default"]) == ["module-2"]


# -- any worker ----------------------------------------------------------------------------------


def test_the_same_failure_of_another_environment_is_not_printed_whole_again(
    world: WorkersWorld,
) -> None:
    for number in range(3):
        message = f"environment {number} (Robot) failed in step: RuntimeError: no contact"
        failure = attach_pb2.Failure(message=message, traceback="Traceback\nRuntimeError")
        world.leave(world.join("envrunner", 1), failure=failure)
    first, *others = world.told.messages
    assert first.startswith("envrunner-1 left: gone\n  Traceback")
    assert others == ["envrunner-1 left for the same reason as before"] * 2


def test_numbers_that_are_not_finite_are_told_once_and_not_by_each_worker(
    world: WorkersWorld,
) -> None:
    said = "rewards of environment 0 at step 7 of a fragment are nan: the environment must give"
    world.sample(dropped="nonfinite", explanation=said)
    assert world.told.messages == [], "the EnvRunner leaves, and says it then"
    for index in (0, 1, 2):
        worker = world.runner if index == 0 else world.join("envrunner", index)
        failure = attach_pb2.Failure(message=said.replace("step 7", f"step {index}"))
        world.leave(worker, failure=failure)
    first, *others = world.told.messages
    assert first == "envrunner-0 left: gone"
    assert others == [
        "envrunner-1 left for the same reason as envrunner-0",
        "envrunner-2 left for the same reason as envrunner-1",
    ]


def test_what_failures_are_remembered_by_is_bounded(world: WorkersWorld) -> None:
    for number in range(300):
        worker = world.join("envrunner", 1)
        failure = attach_pb2.Failure(message=f"failure {number}", traceback="x" * 1000)
        world.leave(worker, failure=failure)
    assert len(world.parts.departures._shown) <= 100
    assert world.parts.departures.failures == {}
