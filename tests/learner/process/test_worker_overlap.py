"""A LearnerWorker that prepares the next update: its books stay exact."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import MakeBatch
from support.worker_world import GENERATION, MAX_STALENESS, PATIENCE, World, overlap_on_cpu

from juggler.learner.group.peers import PeerLost
from juggler.learner.process.overlap import Overlapped
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


class Gate:
    """Blocks updates until it is opened, and records collations."""

    def __init__(self, world: World) -> None:
        learner = world.module.learner
        self._open, self.reached = threading.Event(), threading.Event()
        self.collated: list[str] = []
        self._collate = learner.collated
        self.lose = False
        learner.after_gradients = self._hold  # type: ignore[method-assign]
        learner.collated = self._note  # type: ignore[method-assign]

    def open(self) -> None:
        self._open.set()

    def _hold(self, grads: Any, aux: Any) -> Any:
        self.reached.set()
        assert self._open.wait(PATIENCE)
        if self.lose:
            raise PeerLost("connection closed")
        return grads, aux

    def _note(self, episodes: Any) -> Any:
        self.collated.append(threading.current_thread().name.partition("_")[0])
        return self._collate(episodes)


@pytest.fixture
def world(
    tmp_path: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    overlap_on_cpu(monkeypatch)
    made = World(tmp_path, make_batch)
    yield made
    made.close()


def overlapped(world: World) -> Overlapped:
    found = world.module.updating
    assert isinstance(found, Overlapped)
    return found


def held_up(world: World, *updates: tuple[int, ...]) -> Gate:
    """Request updates of these batches, the first of which is blocked."""
    gate = Gate(world)
    world.ask_for_update(*updates[0])
    assert gate.reached.wait(PATIENCE)
    for update in updates[1:]:
        world.ask_for_update(*update)
    return gate


def test_a_batch_gets_too_old_while_its_update_waits(world: World) -> None:
    oldest = 12 - MAX_STALENESS - 1  # too old for the third update, and not for the second
    world.send(1, update=10)
    world.send(2, update=10)
    world.send(3, update=12)
    world.send(4, update=oldest)
    gate = held_up(world, (1,), (2,), (3, 4))
    gate.open()
    for ids in ((1,), (2,)):
        world.updated(*ids)
    done = world.updated(3, 4)
    assert {used.batch_id: used.dropped for used in done.batches} == {3: "", 4: "stale"}
    assert done.steps_trained == world.steps(1, 2, 3)
    assert done.steps_dropped == world.steps(4)
    assert gate.collated[-1] == "staging", "it was known that it would be too old"


def test_a_batch_that_comes_after_its_update_was_prepared_is_learned_from(world: World) -> None:
    for batch_id in (1, 2, 3):
        world.send(batch_id, update=10)
    gate = held_up(world, (1,), (2,), (3, 4))
    learner = world.module.learner
    prepared, came = threading.Event(), threading.Event()
    note = learner.collated

    def collated(episodes: Any) -> Any:
        made = note(episodes)
        prepared.set()
        return made

    def waits(sample: Any) -> Any:
        assert came.wait(PATIENCE)
        return sample

    learner.collated = collated  # type: ignore[method-assign]
    learner.before_gradients = waits  # type: ignore[method-assign]
    gate.open()
    world.updated(1)
    assert prepared.wait(PATIENCE)
    while overlapped(world)._prepared is None:
        pass
    world.send(4, update=10)
    came.set()
    world.updated(2)
    done = world.updated(3, 4)
    assert {used.batch_id: used.dropped for used in done.batches} == {3: "", 4: ""}
    assert done.steps_trained == world.steps(1, 2, 3, 4)
    assert gate.collated[-1] != "staging", "what was prepared lacked a batch"


def test_what_was_prepared_when_a_peer_was_lost_is_dropped_and_counted(world: World) -> None:
    for batch_id in (1, 2, 3, 4):
        world.send(batch_id, update=10)
    before = world.module.learner.state["parameters"].clone()
    gate = held_up(world, (1,), (2,), (3,))
    gate.lose = True
    gate.open()
    for batch_id in (1, 2, 3):
        done = world.updated(batch_id)
        assert done.peer_lost == "connection closed"
        assert [used.dropped for used in done.batches] == ["learner_lost"]
    assert done.steps_trained == 0
    assert done.steps_dropped == world.steps(1, 2, 3)
    assert torch.equal(world.module.learner.state["parameters"], before)
    gate.lose = False
    world.join(GENERATION + 1)
    assert overlapped(world)._prepared is None
    done = world.update(4)
    assert Version.of(done.version) == (GENERATION + 1, 11)
    assert done.steps_trained == world.steps(4)


def test_commands_between_two_updates_keep_the_second_from_being_prepared(world: World) -> None:
    for batch_id in (1, 2, 3):
        world.send(batch_id, update=10)
    gate = held_up(world, (1,))
    world.driver.tell(training_pb2.Discard(module_id="default", batch_ids=[3]))
    world.ask_for_update(2, 3)
    gate.open()
    world.updated(1)
    world.driver.hear(attach_pb2.Done())
    done = world.driver.hear(training_pb2.UpdateDone())
    assert {used.batch_id: used.dropped for used in done.batches} == {2: "", 3: "restart"}
    assert "staging" not in gate.collated
