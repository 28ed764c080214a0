"""StaleRunners: who is named because what it samples comes too late, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.worker_events_world import ROWS, STEPS, WorkersWorld

from juggler.driver.core.events import UsedBatch, WorkerKey
from juggler.driver.core.ledger import Batch
from juggler.driver.workers.stale_runners import StaleRunners
from juggler.runtime.wire.v1 import training_pb2

LEARNER = WorkerKey("learner-0", "a")


class World:
    def __init__(self) -> None:
        self.runners = StaleRunners(max_staleness=6)
        self._next_id = 0

    def sampled(self, worker_id: str, batches: int, every: int = 0) -> None:
        """So many batches, every n-th of which was stale; 0: none."""
        for number in range(1, batches + 1):
            self._next_id += 1
            batch = Batch(self._next_id, WorkerKey(worker_id, "a"), LEARNER, 512)
            dropped = "stale" if every and number % every == 0 else ""
            used = UsedBatch(self._next_id, 512, 9, dropped)
            self.runners.answered([used], {self._next_id: batch})


@pytest.fixture
def world() -> World:
    return World()


def test_an_envrunner_whose_batches_are_all_stale_is_named_once(world: World) -> None:
    for _ in range(4):
        world.sampled("envrunner-0", 50)
        world.sampled("envrunner-1", 1, every=1)
        assert world.runners.look() == [], "that may be chance"
    world.sampled("envrunner-1", 1, every=1)
    (text,) = world.runners.look()
    assert text.startswith(
        "100% of what envrunner-1 sampled lately was dropped as stale: more than max_staleness = 6 "
    )
    for _ in range(200):
        world.sampled("envrunner-0", 50)
        world.sampled("envrunner-1", 1, every=1)
        assert world.runners.look() == []


def test_it_is_named_again_when_its_share_has_changed_much(world: World) -> None:
    world.sampled("envrunner-1", 20, every=4)
    (text,) = world.runners.look()
    assert text.startswith("25% of what envrunner-1")
    world.sampled("envrunner-1", 400, every=3)
    assert world.runners.look() == [], "33 % is hardly more"
    world.sampled("envrunner-1", 400, every=1)
    (text,) = world.runners.look()
    assert text.startswith("99% of") or text.startswith("100% of"), text
    world.sampled("envrunner-1", 800)
    (text,) = world.runners.look()
    assert text.endswith(
        " of what envrunner-1 sampled lately was dropped as stale: it is fast enough again"
    )
    assert world.runners.look() == []


def test_a_few_stale_batches_of_a_healthy_run_are_not_announced(world: World) -> None:
    for _ in range(20):
        world.sampled("envrunner-0", 100, every=20)
        assert world.runners.look() == []


def test_one_that_left_is_forgotten(world: World) -> None:
    world.sampled("envrunner-1", 20, every=1)
    assert len(world.runners.look()) == 1
    world.runners.left("envrunner-1")
    assert world.runners.look() == []
    world.sampled("envrunner-1", 20, every=1)
    assert len(world.runners.look()) == 1, "this is another process"


def test_steps_that_came_too_old_to_a_gateway_count_too(world: World) -> None:
    for _ in range(20):
        world.sampled("envrunner-0", 1)
        world.runners.brought("envrunner-0", 512)
    (text,) = world.runners.look()
    assert text.startswith("50% of what envrunner-0")


def test_what_a_learner_answers_is_booked_for_who_sampled_it(tmp_path: Path) -> None:
    world = WorkersWorld(tmp_path)
    for number in range(10):
        world.sample(number)
        command_id, update = world.asked(world.learner, training_pb2.Update)[-1]
        done = training_pb2.UpdateDone(update_id=update.update_id)
        for batch_id in update.batch_ids:
            done.batches.add(
                batch_id=batch_id, live_steps=ROWS * STEPS, staleness=9, dropped="stale"
            )
        world.reply(world.learner, command_id, done)
    (text,) = world.parts.stale_runners["default"].look()
    assert text.startswith("100% of what envrunner-0")
    assert world.core.ledger.dropped["stale"] == 10 * ROWS * STEPS
