"""An EnvRunner that cannot reach a learner which is here is told of, with the reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.worker_events_world import WorkersWorld

from juggler.driver.workers import unreached_learners

WHY = "connection refused"


class World(WorkersWorld):
    """With a clock that the test winds on."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(unreached_learners, "time", clock)
        super().__init__(directory)
        self.answered = 0

    def answers(self, after: float, dropped: str = "") -> list[str]:
        """What people are told when a request is answered so much later."""
        before = len(self.told.messages)
        self.now += after
        self.sample(self.answered, dropped=dropped, explanation=WHY if dropped else "")
        self.answered += 1
        return self.told.messages[before:]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_batches_that_keep_missing_a_learner_are_told_with_the_reason(world: World) -> None:
    assert world.answers(0.0, "learner_lost") == [], "it may just have ended"
    assert world.answers(4.9, "learner_lost") == []
    (text,) = world.answers(0.2, "learner_lost")
    assert (
        "envrunner-0 on host do not reach learner-0 on host at : connection refused. They" in text
    )
    assert world.told.levels[-1] == "warning"


def test_they_are_told_of_once_a_minute(world: World) -> None:
    world.answers(0.0, "learner_lost")
    assert len(world.answers(5.0, "learner_lost")) == 1
    assert world.answers(59.0, "learner_lost") == []
    assert len(world.answers(1.0, "learner_lost")) == 1


def test_a_batch_that_gets_there_ends_it(world: World) -> None:
    world.answers(0.0, "learner_lost")
    world.answers(4.0)
    assert world.answers(2.0, "learner_lost") == []
    assert len(world.answers(5.0, "learner_lost")) == 1


def test_a_learner_that_is_gone_is_not_told_of_twice(world: World) -> None:
    world.join("learner", 1)
    world.leave(world.learner)
    before = len(world.told.messages)
    world.answers(0.0, "learner_lost")
    world.answers(60.0, "learner_lost")
    assert not [text for text in world.told.messages[before:] if "do not reach" in text]
