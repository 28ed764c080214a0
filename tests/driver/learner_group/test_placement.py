"""Which module is trained where, and the jobs of a shard."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from juggler.driver import learner_group
from juggler.driver.config import ConfigError
from juggler.driver.learner_group import (
    LearnerGroup,
    LearnerGroupError,
    Module,
    Shard,
    ShardLost,
    ShardPlacement,
    choose_shard,
    places,
)
from juggler.runtime.actors.hub import (
    HubEvent,
    Worker,
    WorkerJoined,
    WorkerLeft,
    WorkerReplied,
)
from juggler.runtime.actors.requests import Completed
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


class Placement:
    """Modules that come and go, placed as a group places them."""

    def __init__(self, gpus: int, modules: int) -> None:
        self.gpus = [f"fake:{n}" for n in range(gpus)]
        self.count = 0
        self.shards: dict[str, int] = {}
        for n in range(modules):
            self.add(f"module {n}")

    def loads(self) -> list[int]:
        found = Counter(self.shards.values())
        return [found[shard] for shard in range(self.count)]

    def add(self, module_id: str) -> int:
        shard = self.shards[module_id] = choose_shard(self.loads(), len(self.gpus) or None)
        self.count = max(self.count, shard + 1)
        return shard

    def places(self) -> dict[str, ShardPlacement]:
        return places(self.shards, self.gpus, self.count)

    def check(self) -> None:
        by_shard = {place.shard: place.devices for place in self.places().values()}
        assert all(by_shard.values())
        if self.gpus:
            taken = Counter(device for devices in by_shard.values() for device in devices)
            assert max(taken.values(), default=1) == 1
            for shard, devices in by_shard.items():
                assert devices[0] == self.gpus[shard], "it computes on the same as before"


@pytest.mark.parametrize(
    ("gpus", "modules", "shards", "gpus_per_shard", "modules_per_shard", "share"),
    [
        (4, 10, 4, 1, 3, 0.4),
        (8, 3, 3, 3, 1, 8 / 3),
        (8, 2, 2, 4, 1, 4.0),
        (2, 5, 2, 1, 3, 0.4),
        (1, 1, 1, 1, 1, 1.0),
        (4, 4, 4, 1, 1, 1.0),
        (0, 3, 3, 1, 1, 0.0),
    ],
)
def test_modules_are_spread_over_gpus_as_the_table_says(
    gpus: int, modules: int, shards: int, gpus_per_shard: int, modules_per_shard: int, share: float
) -> None:
    placement = Placement(gpus, modules)
    assert placement.count == shards
    assert max(placement.loads()) == modules_per_shard
    found = placement.places().values()
    assert max(len(place.devices) for place in found) == gpus_per_shard
    assert {place.share for place in found} == {share}


@given(
    gpus=st.integers(0, 9),
    modules=st.integers(1, 12),
    moves=st.lists(st.integers(0, 30), max_size=40),
)
def test_modules_come_and_go_and_each_goes_where_there_is_most_room(
    gpus: int, modules: int, moves: list[int]
) -> None:
    placement = Placement(gpus, modules)
    there = list(placement.shards)
    for number, move in enumerate(moves):
        if move % 2 and there:
            del placement.shards[there.pop(move % len(there))]
            continue
        there.append(f"later {number}")
        before, loads = placement.count, placement.loads()
        shard = placement.add(there[-1])
        if shard < before:
            assert loads[shard] == min(loads)
        else:
            assert shard == before
            assert min(loads) > 0
        assert placement.count <= (gpus or placement.count)
    assert sorted(placement.places()) == sorted(there)
    placement.check()


def test_a_shard_that_is_down_gets_no_more_modules() -> None:
    assert choose_shard([None, 1], 2) == 1
    assert choose_shard([None, 1], 3) == 2
    assert choose_shard([None, 1], None) == 2
    with pytest.raises(ConfigError, match="no shard is left"):
        choose_shard([None, None], 2)


# The jobs of a shard, without a process.


class Outside:
    """What a group of shards talks to: keeps commands and dismissals."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.dismissed: list[str] = []
        self.answer: Completed | None = None
        self.supervisor = self

    def submit(self, worker: Worker, command: Message) -> int:
        self.sent.append(command)
        return len(self.sent)

    def complete(self, event: HubEvent) -> list[Completed]:
        return [self.answer] if isinstance(event, WorkerReplied) and self.answer else []

    def dismiss(self, worker: Worker, why: str) -> None:
        self.dismissed.append(why)

    def kill(self, *of_process: Any, abort: bool) -> None:
        pass

    def close(self) -> None:
        pass


class World(LearnerGroup):
    def __init__(self) -> None:
        self.outside: Any = Outside()
        self._pool = self._hub = self._local = self.outside
        self._shards = [Shard(0, "fake:0")]
        self._token, self._run_id = "token", "run"
        self._updates_in_flight = 2
        self.shard = self._shards[0]
        self.worker = Worker("learner-0", "1", "learner", 0, "here", 7, (), ("unix:/x",), True)
        self._modules = {}

    def put(self, name: str, *batch_ids: int) -> Future[Any]:
        update = training_pb2.Update(module_id=name, batch_ids=batch_ids)
        return self._put(0, name, [update], len, batch_ids)

    def hear(self, event: Any) -> None:
        self._on(event)

    def join(self) -> None:
        self.hear(WorkerJoined(self.worker))

    def answer(self, name: str, failure: str = "") -> None:
        """Answer the command about this module."""
        sent = self.outside.sent
        number = next(n for n, each in enumerate(sent, 1) if getattr(each, "module_id", "") == name)
        said = attach_pb2.Failure(message=failure) if failure else None
        body = None if failure else any_pb2.Any()
        request = sent[number - 1]
        self.outside.answer = Completed(self.worker, number, request, body, said, True)
        self.hear(WorkerReplied(self.worker, attach_pb2.Reply()))

    def sent(self) -> list[str]:
        return [getattr(each, "module_id", "setup") for each in self.outside.sent]


@pytest.fixture(name="world")
def _world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(learner_group, "EpisodeSender", lambda *_: Outside())
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


def test_an_update_with_a_refused_batch_is_sent_and_fails(world: World) -> None:
    world.join()
    update = world.put("a", 1, 2, 3)
    world.put("b")
    for batch_id, why in ((1, ""), (2, "too long"), (3, "")):
        world.hear((0, batch_id, why))
    assert world.sent() == ["setup", "a", "b"]
    world.answer("a", failure="batches [2] are not here")
    assert type(update.exception(0)) is LearnerGroupError
    assert str(update.exception(0)) == "a: too long"


def test_a_lost_process_takes_its_jobs_with_it(world: World) -> None:
    world.join()
    jobs = {"a": world.put("a")}
    world.hear(WorkerLeft(world.worker, "the connection broke"))
    assert not world.shard.set_up
    jobs["b"] = world.put("b")
    assert not jobs["a"].done(), "before it is known how it ended"
    world.hear(Exited("learner-0", 7, "killed by SIGKILL", 0.25))
    for name, job in jobs.items():
        assert isinstance(job.exception(0), ShardLost)
        text = f"{name}: learner-0 on fake:0 was lost: killed by SIGKILL."
        assert str(job.exception(0)) == text
    assert world.sent() == ["setup", "a"]
    later = world.put("c")
    world.join()
    assert world.sent() == ["setup", "a", "setup", "c"]
    world.answer("c")
    assert later.result(0) == 1


def test_a_new_process_gets_its_modules_first_and_has_room_once_it_has_them(world: World) -> None:
    world.put("meanwhile")
    for name in ("first", "second"):
        world._modules[name] = Module(0, training_pb2.AddModule(module_id=name), is_built=True)
    world._modules["elsewhere"] = Module(1, training_pb2.AddModule(), is_built=True)
    world.join()
    assert world.sent() == ["setup", "first", "second", "meanwhile"]
    world.answer("first")
    assert not world._has_room(0)
    world.answer("second", failure="out of memory")
    world.answer("")
    assert world.outside.dismissed == ["out of memory"]


def test_a_shard_that_stays_down_says_so(world: World) -> None:
    world.hear(Exited("learner-0", 7, "exit code 1", None))
    error = world.put("a").exception(0)
    assert isinstance(error, ShardLost)
    assert "exit code 1. It has died too often, and stays down" in str(error)
    assert world._has_room(0), "so that an update fails at once"


def test_futures_cannot_be_cancelled_and_replies_that_cannot_be_read_fail_their_job(
    world: World,
) -> None:
    def cannot(bodies: Any) -> None:
        raise ValueError("a digest differs")

    world.join()
    first = world._put(0, "state of 'a'", [training_pb2.Snapshot(module_id="a")], cannot)
    assert not first.cancel(), "else its reply would end the thread of the group"
    world.answer("a")
    assert str(first.exception(0)) == "state of 'a': a digest differs"
    assert [job.what for job in world.shard.jobs] == ["setup"]
