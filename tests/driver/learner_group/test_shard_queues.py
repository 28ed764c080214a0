"""The queue of one shard, without a process."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import any_pb2

from juggler.driver.learner_group.results import LearnerGroupError, ShardLost
from juggler.driver.learner_group.shard import Job, Shard
from juggler.runtime.actors.hub_events import Left, Worker
from juggler.runtime.actors.requests import Completed
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


class Pool:
    """Takes commands, and answers none."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def submit(self, worker: Worker, request: Any) -> int:
        self.sent.append(request)
        return len(self.sent)


class Sender:
    """Takes nothing anywhere."""

    def close(self) -> None:
        pass


class World:
    def __init__(self) -> None:
        self.pool = Pool()
        self.ended: dict[str, Any] = {}
        pool: Any = self.pool
        self.link = Shard(
            0, "fake:0", pool, lambda job, outcome: self.ended.update({job.what: outcome})
        )
        self.worker = Worker("learner-0", "1", "learner", 0, "here", 7, (), (), True)

    def put(self, name: str, *batch_ids: int) -> None:
        request = training_pb2.Update(module_id=name, batch_ids=batch_ids)
        self.link.put(Job(name, name, [request], unsettled=set(batch_ids)))

    def joined(self, *jobs: Job) -> None:
        sender: Any = Sender()
        self.link.joined(self.worker, sender, jobs)

    def answer(self, command_id: int, failure: str = "") -> None:
        said = attach_pb2.Failure(message=failure) if failure else None
        body = None if failure else any_pb2.Any()
        request = self.pool.sent[command_id - 1]
        self.link.hear(Completed(self.worker, command_id, request, body, said, True))

    def sent(self) -> list[str]:
        return [each.module_id for each in self.pool.sent]


@pytest.fixture(name="world")
def _world() -> World:
    return World()


def test_what_is_asked_for_goes_in_order_and_not_before_its_batches(world: World) -> None:
    world.put("a")
    assert world.sent() == []  # nobody is there
    world.joined()
    world.put("b", 1, 2)
    world.put("c", 3)
    world.put("d")
    assert world.sent() == ["a"]
    world.link.settled(3, "", "")
    world.link.settled(1, "", "")
    assert world.sent() == ["a"]
    world.link.settled(2, "", "")
    assert world.sent() == ["a", "b", "c", "d"]
    world.answer(2)
    assert world.ended.keys() == {"b"}
    world.answer(1, failure="no")
    assert "a: no" in str(world.ended["a"])
    assert not world.link.idle


def test_of_an_update_with_a_refused_batch_the_others_are_let_go(world: World) -> None:
    world.joined()
    world.put("a", 1, 2, 3)
    world.put("b")
    world.link.settled(1, "", "")
    world.link.settled(2, "refused", "too long")
    world.link.settled(3, "", "")
    discard, update = world.pool.sent
    assert discard == training_pb2.Discard(module_id="a", batch_ids=[1, 3])
    assert update.module_id == "b"
    world.answer(1)
    assert type(world.ended["a"]) is LearnerGroupError
    assert str(world.ended["a"]) == "a: too long"


def test_a_process_that_is_gone_takes_what_it_was_asked_for_with_it(world: World) -> None:
    world.joined()
    world.put("a")
    assert not world.link.left(Left(world.worker, "the connection broke"))
    assert not world.link.set_up
    world.put("b")
    assert world.link.exited(Exited("learner-0", 7, "killed by SIGKILL", 0.25))
    world.link.end("So be it.")
    for name in "ab":
        assert isinstance(world.ended[name], ShardLost)
        text = f"{name}: learner-0 on fake:0 was lost: killed by SIGKILL. So be it."
        assert str(world.ended[name]) == text
    assert world.sent() == ["a"]


def test_its_own_last_words_go_before_how_it_ended(world: World) -> None:
    world.joined()
    world.put("a")
    assert not world.link.exited(Exited("learner-0", 7, "exit code 1", 0.25))
    failure = attach_pb2.Failure(message="KeyError: 'x'", traceback="where it was")
    assert world.link.left(Left(world.worker, "left", failure, farewell=True))
    world.link.end("")
    assert "lost: KeyError: 'x'.\nwhere it was" in str(world.ended["a"])
    assert world.ended["a"].traceback == "where it was"


def test_a_new_process_is_made_what_the_old_one_was_before_anything_else(world: World) -> None:
    world.put("asked meanwhile")
    setting_up = [
        Job(name, name, [training_pb2.AddModule(module_id=name)]) for name in ("first", "second")
    ]
    world.joined(*setting_up)
    assert world.sent() == ["first", "second", "asked meanwhile"]
    world.answer(1)
    assert not world.link.set_up
    world.answer(2)
    assert world.link.set_up


def test_a_process_that_cannot_become_what_the_old_one_was_is_broken(world: World) -> None:
    world.joined(Job("a", "module 'a'", [training_pb2.AddModule(module_id="a")]))
    world.answer(1, failure="out of memory")
    assert world.link.broken == "module 'a': out of memory"


def test_one_that_stays_down_says_so_to_everybody(world: World) -> None:
    assert world.link.exited(Exited("learner-0", 7, "exit code 1", None))
    world.link.end("")
    world.put("a")
    assert isinstance(world.ended["a"], ShardLost)
    assert "exit code 1. It has died too often, and stays down" in str(world.ended["a"])
