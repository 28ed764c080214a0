"""Checkpoints that are due while a module has no learner, who alone has its state."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.worker_events_world import ROWS, STEPS, WorkersWorld

from juggler.driver.upkeep import Upkeep
from juggler.runtime.wire.v1 import training_pb2


class World(WorkersWorld):
    """A run of two modules with a learner each. Checkpoints are due when a test says so."""

    def __init__(self, directory: Path) -> None:
        agents = {"left": "blue", "right": "red"}
        super().__init__(directory, agents=agents, num_learners=2, devices="cpu")
        nothing = cast(Any, None)  # is written
        self.upkeep = Upkeep(self.parts, nothing, [], lambda: None)

    def train(self) -> None:
        """The module "blue" has had an update."""
        requests = self.asked(self.runner, training_pb2.SampleRequest)
        command_id, request = next(each for each in requests if each[1].module_id == "blue")
        books = {"batch_id": request.batch_id, "live_steps": ROWS * STEPS}
        receipt = training_pb2.Receipt(module_id="blue", learner=request.learner, **books)
        self.reply(self.runner, command_id, receipt)
        ((command_id, update),) = self.asked(self.learner, training_pb2.Update)
        version = {"generation": update.generation, "update": 1}
        done = training_pb2.UpdateDone(
            module_id="blue", update_id=update.update_id, version=version, batches=[books]
        )
        self.reply(self.learner, command_id, done)
        assert self.parts.core.updates == 1

    def a_checkpoint_is_due(self) -> None:
        self.turns(due=["checkpoint"])

    def turns(self, due: list[str]) -> None:
        self.upkeep._intervals = cast(Any, SimpleNamespace(due=lambda: due))
        self.upkeep.on_intervals()

    def warnings(self) -> list[str]:
        return [text for text in self.told.messages if "no checkpoints" in text]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def asked_for_states(world: World) -> list[int]:
    return [len(world.asked(each, training_pb2.Snapshot)) for each in world.learners]


def test_people_are_told_once_that_checkpoints_wait_for_a_learner(world: World) -> None:
    world.train()
    world.leave(world.learners[1])
    world.a_checkpoint_is_due()
    assert world.warnings() == [], "it may be back in a moment"
    for _ in range(3):
        world.a_checkpoint_is_due()
    told = "there are no checkpoints while these modules have no learner: 'red'"
    assert world.warnings() == [told]
    assert world.told.levels[world.told.messages.index(told)] == "warning"
    assert asked_for_states(world) == [0, 0]


def test_the_one_that_waited_begins_with_the_learner_and_people_are_told_anew_of_the_next(
    world: World,
) -> None:
    world.train()
    world.leave(world.learners[1])
    for _ in range(2):
        world.a_checkpoint_is_due()
    world.learners[1] = world.join("learner", 1)
    world.get_ready(world.learners[1])
    world.turns(due=[])
    assert asked_for_states(world) == [1, 1], "at once"
    world.leave(world.learners[1])
    for _ in range(2):
        world.a_checkpoint_is_due()
    assert len(world.warnings()) == 2


def test_a_checkpoint_that_waits_for_another_one_is_no_news(world: World) -> None:
    for _ in range(3):
        world.a_checkpoint_is_due()
    assert asked_for_states(world) == [1, 1]
    assert world.warnings() == []


def test_a_run_that_waits_for_its_first_learners_is_not_told_of_checkpoints(world: World) -> None:
    world.leave(world.learners[1])
    for _ in range(3):
        world.a_checkpoint_is_due()
    assert world.warnings() == [], "there is nothing to keep"
