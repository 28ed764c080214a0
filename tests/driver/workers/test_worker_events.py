"""Workers that lie, mumble or repeat themselves: they are let go, and the run does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import any_pb2
from support.ready import ready_message
from support.synchronous_rounds import begin_an_evaluation
from support.worker_events_world import ROWS, SPACE, STEPS, WorkersWorld

from juggler.runtime.actors.requests import RequestPool
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import training_pb2


@pytest.fixture
def world(tmp_path: Path) -> WorkersWorld:
    return WorkersWorld(tmp_path)


def _garbage(kind: str) -> any_pb2.Any:
    return any_pb2.Any(type_url=f"type.googleapis.com/juggler.v1.{kind}", value=b"\xff" * 20)


def _chunks(tree: Any, extra: str = "{}") -> list[any_pb2.Any]:
    header = training_pb2.StateHeader(module_id="default", extra=extra)
    chunks = encode_frame(header, tree, digest=True, chunk_bytes=1000)
    return [any_pb2.Any(value=chunk) for chunk in chunks]


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
    assert "no juggler.v1.Receipt" in world.why_dismissed(world.runner)


def test_a_report_that_is_no_message_is_blamed_on_the_learner(world: WorkersWorld) -> None:
    world.report(world.learner, _garbage("Arrivals"))
    assert "no juggler.v1.Arrivals" in world.why_dismissed(world.learner)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"batch_id": 1000}, "a receipt for batch 1000, not 1"),
        ({"live_steps": 2**63}, "9223372036854775808 steps in one batch"),
        ({"live_steps": ROWS * STEPS + 1}, "21 steps in one batch: at most 20"),
        ({"stale_steps": 2**63}, "9223372036854775808 steps too old for a batch"),
        ({"episode_returns": [1.0, 2.0]}, "another number of returns than of lengths"),
        ({"dropped": "boredom"}, "'boredom'"),
    ],
)
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_receipt_that_cannot_be_is_blamed_on_its_runner(
    tmp_path: Path, said: dict[str, Any], words: str, synchronous: bool
) -> None:
    world = WorkersWorld(tmp_path, synchronous=synchronous)
    world.sample(**said)
    assert words in world.why_dismissed(world.runner)
    assert world.core.ledger.sampled == 0


@pytest.mark.parametrize("role", ["envrunner", "evaluator"])
@pytest.mark.parametrize(
    ("rows", "steps"), [(2**32 - 1, 2**32 - 1), (65535, 65535), (0, 0), (1, STEPS), (STEPS, ROWS)]
)
def test_whose_batches_are_not_as_it_was_told_is_not_taken(
    world: WorkersWorld, role: str, rows: int, steps: int
) -> None:
    worker = world.join(role, 1)
    command_id, _ = world.asked(worker, training_pb2.Setup)[0]
    ready = ready_message(observation_space=SPACE, action_space=SPACE, rows=rows, steps=steps)
    world.reply(worker, command_id, ready)
    assert world.why_dismissed(worker) == (
        f"sent what cannot be understood: batches of {rows} rows of {steps} steps: it was told to "
        f"make them of {ROWS} rows (envs_per_runner) of {STEPS} steps (fragment_steps)"
    )
    told = "It sent what cannot be understood: batches of"
    assert world.parts.departures.last_failure.startswith(told), "for who reads how a run ended"
    assert world.parts.core.num_runners == 1
    world.leave(worker)
    assert world.core.ledger.lost_unreported == 0, "nothing was ever asked of it"


def test_a_learner_that_got_more_than_a_batch_holds_is_let_go(world: WorkersWorld) -> None:
    _, request = world.asked(world.runner, training_pb2.SampleRequest)[0]
    arrival = training_pb2.Arrival(batch_id=request.batch_id, live_steps=ROWS * STEPS + 1)
    world.report(world.learner, training_pb2.Arrivals(arrivals=[arrival]))
    assert "21 steps in one batch: at most 20" in world.why_dismissed(world.learner)
    assert world.core.ledger.sampled == 0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"update_id": 1000}, "an answer to update 1000"),
        ({"version": {"generation": 1, "update": 2}}, "weights of Version(generation=1, update=2)"),
        ({"version": {"generation": 2**64 - 1}}, "generation=18446744073709551615"),
    ],
)
def test_an_update_that_cannot_be_is_blamed_on_the_learner(
    world: WorkersWorld, said: dict[str, Any], words: str
) -> None:
    command_id, update = _update(world)
    done = training_pb2.UpdateDone(**{"update_id": update.update_id, **said})
    world.reply(world.learner, command_id, done)
    assert words in world.why_dismissed(world.learner)
    assert world.core.weights_version.update == 0


def test_a_reply_that_more_should_follow_does_not_pile_up(world: WorkersWorld) -> None:
    command_id, request = world.asked(world.runner, training_pb2.SampleRequest)[0]
    receipt = training_pb2.Receipt(batch_id=request.batch_id, learner="learner-0")
    world.reply(world.runner, command_id, receipt, last=False)
    assert "before the last" in world.why_dismissed(world.runner)


def test_who_answers_no_command_is_let_go_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(hub: Any, cap: int, **others: Any) -> RequestPool:
        return RequestPool(hub, cap=10, **others)

    monkeypatch.setattr("juggler.driver.workers.command_sender.RequestPool", short)
    world = WorkersWorld(tmp_path)
    for batch_id in range(1000, 1020):  # each makes a Discard, which nobody answers
        arrival = training_pb2.Arrival(batch_id=batch_id)
        world.report(world.learner, training_pb2.Arrivals(arrivals=[arrival]))
    assert "10 commands in flight" in world.why_dismissed(world.learner)


def test_a_runner_that_fails_and_stays_is_let_go_when_it_fails_again(
    world: WorkersWorld,
) -> None:
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


def test_an_evaluation_that_failed_is_not_waited_for(world: WorkersWorld) -> None:
    evaluator = world.join("evaluator")
    world.get_ready(evaluator)
    begin_an_evaluation(world)
    assert world.parts.evaluations.under_way
    world.fail(evaluator, world.asked(evaluator, training_pb2.Evaluate)[0][0])
    assert not world.parts.evaluations.under_way


def test_only_what_a_runner_had_begun_is_lost_with_it_when_it_says_so(
    world: WorkersWorld,
) -> None:
    (begun, _), *rest = world.asked(world.runner, training_pb2.SampleRequest)
    assert rest
    world.leave(world.runner, farewell=True, unanswered=frozenset({begun}))
    assert world.core.ledger.lost_unreported == ROWS * STEPS


def test_all_is_lost_with_a_runner_that_says_nothing(world: WorkersWorld) -> None:
    requests = world.asked(world.runner, training_pb2.SampleRequest)
    world.leave(world.runner)
    assert world.core.ledger.lost_unreported == len(requests) * ROWS * STEPS


def test_a_request_does_not_go_to_a_successor_that_is_not_set_up(world: WorkersWorld) -> None:
    successor = world.join("envrunner")  # before anybody heard that its predecessor is gone
    world.sample()
    assert world.asked(successor, training_pb2.SampleRequest) == []
    world.leave(world.runner)
    world.get_ready(successor)
    assert len(world.asked(successor, training_pb2.SampleRequest)) == 2


def test_what_is_no_state_is_blamed_on_the_learner(tmp_path: Path) -> None:
    for chunk, words in (
        (_chunks(np.zeros(3))[0], "a branch of modules"),
        (_chunks({"a": np.zeros(3)}, extra="[" * 100_000)[0], "too deep"),
        (_chunks({"a": np.zeros(3)}, extra="[]")[0], "no object"),
        (_chunks({"a": np.zeros(3000)})[0], "ended in the middle"),
    ):
        world = WorkersWorld(tmp_path)
        world.reply(world.learner, world.ask_for_a_snapshot(), chunk)
        assert words in world.why_dismissed(world.learner)
        world.leave(world.learner)
        assert not world.snapshots.under_way
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_is_given_up_when_its_learner_dies_half_way(world: WorkersWorld) -> None:
    first, *_ = _chunks({"a": np.zeros(3000)})
    world.reply(world.learner, world.ask_for_a_snapshot(), first, last=False)
    assert world.snapshots.under_way
    world.leave(world.learner)
    assert not world.snapshots.under_way


def test_a_snapshot_that_failed_is_not_waited_for(world: WorkersWorld) -> None:
    world.fail(world.learner, world.ask_for_a_snapshot())
    assert not world.snapshots.under_way


def test_a_snapshot_that_is_whole_is_written_although_its_learner_dies(
    world: WorkersWorld,
) -> None:
    command_id = world.ask_for_a_snapshot()
    *_, last = chunks = _chunks({"a": np.zeros(3000)})
    for chunk in chunks:
        world.reply(world.learner, command_id, chunk, last=chunk is last)
    world.leave(world.learner)
    assert world.snapshots.under_way
    (written,) = world.written.gather(timeout=30)
    world.snapshots.done(written)
    assert written.path.is_dir()
    assert not world.snapshots.under_way
