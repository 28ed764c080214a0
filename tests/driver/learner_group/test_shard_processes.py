"""The jobs of a shard, without a process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message

from juggler.driver.learner_group import shards
from juggler.driver.learner_group.shards import LearnerGroupError, Shard, ShardLost, Shards
from juggler.runtime.actors.hub_events import HubEvent, Joined, Left, Replied, Worker
from juggler.runtime.actors.requests import Completed
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.streams.permits import Permits
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


class Outside:
    """All that a group of shards talks to: commands are kept, and dismissed workers."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.dismissed: list[str] = []
        self.answer: Completed | None = None

    def submit(self, worker: Worker, command: Message) -> int:
        self.sent.append(command)
        return len(self.sent)

    def complete(self, event: HubEvent) -> list[Completed]:
        return [self.answer] if isinstance(event, Replied) and self.answer else []

    def dismiss(self, worker: Worker, why: str) -> None:
        self.dismissed.append(why)

    def kill(self, *of_process: Any, abort: bool) -> None:
        pass

    def close(self) -> None:
        pass


class World(Shards):
    def __init__(self) -> None:
        self.outside: Any = Outside()
        self._pool = self._hub = self._local = self.outside
        self._shards = [Shard(0, "fake:0")]
        self._permits, self._token, self._run_id = Permits.new(), "token", "run"
        self._updates_in_flight = 2
        self.shard = self._shards[0]
        self.worker = Worker("learner-0", "1", "learner", 0, "here", 7, (), ("unix:/x",), True)
        self.again: list[Message] = []

    def _set_up_again(self, shard: int) -> list[Message]:
        return self.again

    def _consequences(self, shard: int) -> list[str]:
        return ["So be it."]

    def put(self, name: str, *batch_ids: int) -> Future[Any]:
        update = training_pb2.Update(module_id=name, batch_ids=batch_ids)
        return self._put(0, name, [update], len, batch_ids)

    def hear(self, event: Any) -> None:
        self._on(event)

    def join(self) -> None:
        self.hear(Joined(self.worker))

    def answer(self, name: str, failure: str = "") -> None:
        """Answer the command about this module."""
        sent = self.outside.sent
        number = next(n for n, each in enumerate(sent, 1) if getattr(each, "module_id", "") == name)
        said = attach_pb2.Failure(message=failure) if failure else None
        body = None if failure else any_pb2.Any()
        request = sent[number - 1]
        self.outside.answer = Completed(self.worker, number, request, body, said, True)
        self.hear(Replied(self.worker, attach_pb2.Reply()))

    def sent(self) -> list[str]:
        return [getattr(each, "module_id", "setup") for each in self.outside.sent]


@pytest.fixture(name="world")
def _world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(shards, "EpisodeSender", lambda *_: Outside())
    return World()


def test_jobs_go_in_order_and_none_before_its_batches(world: World) -> None:
    first = world.put("a")
    assert world.sent() == []  # there is no process
    world.join()
    second, third = world.put("b", 1, 2), world.put("c", 3)
    world.put("d")
    assert world.sent() == ["setup", "a"]
    world.hear((0, 3, ""))
    world.hear((0, 1, ""))
    assert world.sent() == ["setup", "a"]
    world.hear((0, 2, ""))
    assert world.sent() == ["setup", "a", "b", "c", "d"]
    world.answer("b")
    assert second.result(0) == 1
    assert not third.done()
    world.answer("a", failure="no")
    assert str(first.exception(0)) == "a: no"


def test_of_an_update_with_a_refused_batch_the_others_are_discarded(world: World) -> None:
    world.join()
    update = world.put("a", 1, 2, 3)
    world.put("b")
    for batch_id, why in ((1, ""), (2, "too long"), (3, "")):
        world.hear((0, batch_id, why))
    _, discard, following = world.outside.sent
    assert discard == training_pb2.Discard(module_id="a", batch_ids=[1, 2, 3])
    assert following.module_id == "b"
    world.answer("a")
    assert type(update.exception(0)) is LearnerGroupError
    assert str(update.exception(0)) == "a: too long"


def test_a_lost_process_takes_its_jobs_with_it(world: World) -> None:
    world.join()
    jobs = {"a": world.put("a")}
    world.hear(Left(world.worker, "the connection broke"))
    assert not world.shard.set_up
    jobs["b"] = world.put("b")
    assert not jobs["a"].done(), "before it is known how it ended"
    world.hear(Exited("learner-0", 7, "killed by SIGKILL", 0.25))
    for name, job in jobs.items():
        assert isinstance(job.exception(0), ShardLost)
        text = f"{name}: learner-0 on fake:0 was lost: killed by SIGKILL. So be it."
        assert str(job.exception(0)) == text
    assert world.sent() == ["setup", "a"]
    later = world.put("c")
    world.join()
    assert world.sent() == ["setup", "a", "setup", "c"]
    world.answer("c")
    assert later.result(0) == 1


def test_its_own_last_words_go_before_how_it_ended(world: World) -> None:
    world.join()
    job = world.put("a")
    world.hear(Exited("learner-0", 7, "exit code 1", 0.25))
    assert not job.done()
    failure = attach_pb2.Failure(message="KeyError: 'x'", traceback="where it was")
    world.hear(Left(world.worker, "left", failure, farewell=True))
    error: Any = job.exception(0)
    assert "lost: KeyError: 'x'. So be it.\nwhere it was" in str(error)
    assert error.traceback == "where it was"


def test_a_new_process_gets_its_modules_first_and_has_room_once_it_has_them(world: World) -> None:
    world.put("meanwhile")
    world.again = [training_pb2.AddModule(module_id=name) for name in ("first", "second")]
    world.join()
    assert world.sent() == ["setup", "first", "second", "meanwhile"]
    world.answer("first")
    assert not world._has_room(0)
    world.answer("second", failure="out of memory")
    assert world.outside.dismissed == ["out of memory"]


def test_a_shard_that_stays_down_says_so(world: World) -> None:
    world.hear(Exited("learner-0", 7, "exit code 1", None))
    error = world.put("a").exception(0)
    assert isinstance(error, ShardLost)
    assert "exit code 1. So be it. It has died too often, and stays down" in str(error)
    assert world._has_room(0), "so that an update fails at once"
