"""The driver core in synchronous mode: sample, wait for all, update, wait."""

from __future__ import annotations

import random

from support.core_world import OneModule, joined, one_module, only, receipt, step

from juggler.driver.core.core_state import ModuleSettings
from juggler.driver.core.events import (
    Command,
    IssueUpdate,
    LearnerJoined,
    Request,
    RunnerLeft,
    StartNextTurn,
    UpdateFinished,
    UpdateShare,
    UsedBatch,
)
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
    assert update.shares == (UpdateShare("learner-0", (1, 2, 3, 4)),)


def test_the_order_of_arrival_does_not_matter() -> None:
    updates = []
    for seed in range(10):
        core, requests = start(runners=3, steps=20, batch_size=200, learners=2)
        random.Random(seed).shuffle(requests)
        updates.append(deliver(core, requests, 20))
    assert all(len(commands) == 1 for commands in updates)
    assert all(commands == updates[0] for commands in updates)


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
    assert [type(command) for command in step(core, StartNextTurn())] == [Request, Request]
    assert not core.between_turns
