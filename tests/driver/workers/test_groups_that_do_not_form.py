"""Learners that are all here and cannot update together: people are told why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.worker_events_world import WorkersWorld

from juggler.driver.workers import learners
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.wire.v1 import training_pb2

WHY = "cannot reach the learner at gpu2:5006"


class World(WorkersWorld):
    """With two learners, and a clock that the test winds on."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(learners, "time", SimpleNamespace(monotonic=lambda: self.now))
        super().__init__(directory, num_learners=2)

    def get_ready(self, worker: Worker, *module_ids: str) -> None:
        if worker.role != "learner":
            return super().get_ready(worker, *module_ids)
        for number, module in self.asked(worker, training_pb2.AddModule):
            where = {"module_id": module.module_id, "meeting_point": "tls:gpu1:5006"}
            self.reply(worker, number, training_pb2.ModuleReady(**where))

    def fail_to_meet(self, why_first: str = WHY) -> list[str]:
        """What people are told a moment after members of the newest group have lost each other."""
        before = len(self.told.messages)
        for learner in self.learners:
            number, group = self.asked(learner, training_pb2.Group)[-1]
            why = why_first if learner is self.learner else "the learner before this one has left"
            formed = training_pb2.GroupFormed(generation=group.generation, peer_lost=why)
            self.reply(learner, number, formed)
        self.now += 1.5
        met = self.parts.learners["default"].to_meet_again()
        assert met is not None
        self.parts.happened(met)
        return [text for text in self.told.messages[before:] if "cannot update together" in text]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_each_learner_s_reason_is_told_once_a_minute(world: World) -> None:
    (text,) = world.fail_to_meet()
    assert f"learner-0: {WHY}; learner-1: the learner before this one has left. It is" in text
    assert world.fail_to_meet() == []
    world.now += 60.0
    assert len(world.fail_to_meet()) == 1


def test_a_reason_is_one_line_and_not_long(world: World) -> None:
    (text,) = world.fail_to_meet("no\nerror: forged" + "x" * 9000)
    assert "learner-0: no error: forgedxxx" in text
    assert len(text) < 1000


def test_nothing_is_told_where_one_of_them_is_gone(world: World) -> None:
    number, group = world.asked(world.learner, training_pb2.Group)[-1]
    formed = training_pb2.GroupFormed(generation=group.generation, peer_lost=WHY)
    world.reply(world.learner, number, formed)
    world.leave(world.learners[1])
    world.now += 1.5
    world.parts.learners["default"].to_meet_again()
    assert not [text for text in world.told.messages if "cannot update together" in text]
