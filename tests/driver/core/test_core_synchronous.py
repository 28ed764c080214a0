"""The driver core in synchronous mode: sample, wait for all, update, wait."""

from __future__ import annotations

import random

from support.core_world import OneModule, joined, one_module, only, receipt, step

from juggler.driver.core.events import (
    Command,
    IssueUpdate,
    LearnerJoined,
    LearnerLeft,
    Proceed,
    Request,
    RunnerLeft,
    Share,
    UpdateFinished,
    UsedBatch,
)
from juggler.driver.core.state import ModuleSettings
from juggler.runtime.episodes.version import Version


def start(
    runners: int, steps: int, batch_size: int = 100, learners: int = 1, cap: int = 4
) -> tuple[OneModule, list[Request]]:
    """A core and its first round."""
    core = one_module(
        ModuleSettings(
            batch_size=batch_size,
            max_open_updates=1,
            requests_per_runner=cap,
            num_learners=learners,
            synchronous=True,
        )
    )
    for index in range(runners):
        step(core, joined(index, steps))
    commands: list[Command] = []
    for index in range(learners):
        commands += step(core, LearnerJoined(f"learner-{index}", "L"))
    return core, only(Request, commands)


def deliver(core: OneModule, requests: list[Request], steps: int) -> list[Command]:
    return [command for r in requests for command in step(core, receipt(r, steps))]


def finish(core: OneModule, update: IssueUpdate, number: int) -> list[Command]:
    commands: list[Command] = []
    for learner, batch_ids in update.shares:
        used = tuple(
            UsedBatch(batch_id, core.ledger.updating[batch_id].steps, 0) for batch_id in batch_ids
        )
        version = Version(update.generation, number)
        commands += step(core, UpdateFinished(update.update_id, learner, "L", version, used))
    return commands


def test_a_round_asks_every_runner_in_turn_until_the_batch_is_full() -> None:
    _, requests = start(runners=3, steps=30, batch_size=100)
    assert [r.runner for r in requests] == [f"envrunner-{i}" for i in (0, 1, 2, 0)]


def test_runners_are_in_order_of_their_number() -> None:
    _, requests = start(runners=11, steps=10, batch_size=100)
    assert [r.runner for r in requests] == [f"envrunner-{i}" for i in range(11)]


def test_a_runner_gets_the_rest_of_its_round_when_it_has_room() -> None:
    core, requests = start(runners=1, steps=30, batch_size=100, cap=2)
    assert len(requests) == 2
    (third,) = step(core, receipt(requests[0], 30))
    (fourth,) = step(core, receipt(requests[1], 30))
    assert isinstance(third, Request)
    assert isinstance(fourth, Request)
    assert step(core, receipt(third, 30)) == []
    (update,) = step(core, receipt(fourth, 30))
    assert isinstance(update, IssueUpdate)
    assert update.shares == (Share("learner-0", (1, 2, 3, 4)),)


def test_the_order_of_arrival_does_not_matter() -> None:
    updates = []
    for seed in range(10):
        core, requests = start(runners=3, steps=20, batch_size=200, learners=2)
        random.Random(seed).shuffle(requests)
        updates.append(deliver(core, requests, 20))
    assert all(len(commands) == 1 for commands in updates)
    assert all(commands == updates[0] for commands in updates)


def test_the_batches_of_an_update_are_in_order_of_runner_and_then_of_request() -> None:
    core, requests = start(runners=2, steps=25, batch_size=100)
    assert [r.runner[-1] for r in requests] == ["0", "1", "0", "1"]
    (update,) = deliver(core, requests[::-1], 25)
    assert isinstance(update, IssueUpdate)
    assert update.shares == (Share("learner-0", (1, 3, 2, 4)),)


def test_the_next_round_waits_for_the_update_and_asks_for_its_weights() -> None:
    core, requests = start(runners=2, steps=50)
    (update,) = deliver(core, requests, 50)
    assert isinstance(update, IssueUpdate)
    assert step(core, joined(2, 50)) == []
    finish(core, update, number=1)
    following = only(Request, step(core, Proceed()))
    assert [r.runner for r in following] == [f"envrunner-{i}" for i in range(3)]
    assert {r.at_least for r in following} == {Version(1, 1)}


def test_nothing_is_asked_for_between_two_turns() -> None:
    core, requests = start(runners=2, steps=50)
    assert not core.between_turns
    (update,) = deliver(core, requests, 50)
    assert isinstance(update, IssueUpdate)
    assert not core.between_turns
    assert finish(core, update, number=1) == []
    assert core.between_turns
    assert step(core, RunnerLeft("envrunner-1", "R", "killed")) == []
    assert step(core, joined(1, 50, "R2")) == []
    assert [type(command) for command in step(core, Proceed())] == [Request, Request]
    assert not core.between_turns


def test_the_round_goes_on_without_what_a_dead_runner_owes() -> None:
    core, requests = start(runners=2, steps=50)
    assert deliver(core, requests[:1], 50) == []
    (update,) = step(core, RunnerLeft("envrunner-1", "R", "killed"))
    assert isinstance(update, IssueUpdate)
    assert update.shares == (Share("learner-0", (1,)),)


def test_a_round_that_yields_nothing_is_followed_by_a_new_one() -> None:
    core, requests = start(runners=2, steps=50)
    assert step(core, receipt(requests[0], 50, dropped="nonfinite")) == []
    again = step(core, receipt(requests[1], 50, dropped="nonfinite"))
    assert [type(command) for command in again] == [Request, Request]


def test_a_learner_that_got_nothing_has_its_share_asked_for_anew() -> None:
    core, requests = start(runners=2, steps=50, learners=2)
    assert [r.learner for r in requests] == ["learner-0", "learner-1"]
    step(core, receipt(requests[0], 50))
    again = only(Request, step(core, receipt(requests[1], 50, dropped="refused")))
    assert {r.learner for r in again} == {"learner-1"}
    (update,) = deliver(core, again, 50)
    assert isinstance(update, IssueUpdate)
    assert [share.learner for share in update.shares] == ["learner-0", "learner-1"]


def test_what_was_planned_for_a_lost_learner_goes_to_the_others() -> None:
    core, requests = start(runners=1, steps=25, learners=2, cap=1)
    assert [r.learner for r in requests] == ["learner-0"]
    step(core, LearnerLeft("learner-1", "L", "killed"))
    learners = []
    while requests:
        learners += [r.learner for r in requests]
        commands = deliver(core, requests, 25)
        requests = only(Request, commands)
    assert learners == ["learner-0"] * 4
    assert [type(command) for command in commands] == [IssueUpdate]


def test_what_was_planned_for_the_earlier_process_of_a_learner_is_not_lost_with_it() -> None:
    core, requests = start(runners=1, steps=25, learners=2, cap=1)
    step(core, LearnerJoined("learner-1", "M"))
    while requests:
        requests = only(Request, deliver(core, requests, 25))
    assert core.ledger.sampled == 100
    assert sum(core.ledger.dropped.values()) == 0
