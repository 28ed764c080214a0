"""Placement of modules, and requests to a shard, without processes."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from support.learner_groups import PATIENCE

from juggler.driver import learner_group
from juggler.driver.config import ConfigError
from juggler.driver.learner_group import (
    LearnerGroup,
    LearnerGroupError,
    Module,
    ModuleState,
    ShardLost,
)
from juggler.runtime.actors.hub import Worker, WorkerJoined, WorkerLeft, WorkerReplied
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


class Outside:
    """All that a group talks to: commands are kept, and killed workers."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.killed: list[int] = []
        self.supervisor = self

    def start_learner(self, index: int) -> None:
        pass

    def send(self, worker: Worker, number: int, command: Message) -> None:
        self.sent.append((number, command))

    def kill(self, worker_id: str, pid: int, after: float) -> None:
        self.killed.append(pid)

    def close(self) -> None:
        pass


class World(LearnerGroup):
    """A group whose processes are only said to be there."""

    def __init__(self, gpus: int = 1, modules: int = 0) -> None:
        self.outside: Any = Outside()
        self._hub = self._local = self.outside
        self._devices = [f"fake:{n}" for n in range(gpus)]
        self._token, self._run_id, self._over = "token", "run", ""
        self._updates_in_flight, self._ids = 2, itertools.count(1)
        self._changed = threading.Condition()
        self._modules, self._shards = {}, []
        self.worker = Worker("learner-0", "1", "learner", 0, "here", 7, (), ("unix:/x",), True)
        for n in range(modules):
            self.add(f"module {n}")

    def add(self, module_id: str) -> Module:
        return self._place(training_pb2.AddModule(module_id=module_id))

    def loads(self) -> list[int]:
        found = Counter(place.shard for place in self.placement.values())
        return [found[shard.index] for shard in self._shards]

    def ask(self, module: Module, *commands: Message) -> Future[Any]:
        update = training_pb2.Update(module_id=module.module_id)
        return self._request(module, "update", commands or [update], bool)

    def join(self) -> None:
        self._handle(WorkerJoined(self.worker))

    def exit(self, how: str = "killed by SIGKILL", restart_in: float | None = 0.25) -> None:
        self._handle(Exited("learner-0", 7, how, restart_in))

    def answer(self, command: type[Message], failure: str = "", last: bool = True) -> None:
        """Answer the newest command of this kind."""
        number = next(n for n, each in reversed(self.outside.sent) if type(each) is command)
        reply = attach_pb2.Reply(id=number, last=last, body=any_pb2.Any())
        if failure:
            reply = attach_pb2.Reply(
                id=number, last=True, failure=attach_pb2.Failure(message=failure)
            )
        self._handle(WorkerReplied(self.worker, reply))

    def sent(self) -> list[str]:
        return [type(each).__name__ for _, each in self.outside.sent]


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
    world = World(gpus, modules)
    assert len(world._shards) == shards
    assert max(world.loads()) == modules_per_shard
    found = world.placement.values()
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
    world = World(gpus, modules)
    there = list(world.placement)
    for number, move in enumerate(moves):
        if move % 2 and there:
            world.remove_module(there.pop(move % len(there)))
            continue
        there.append(f"later {number}")
        before, loads = len(world._shards), world.loads()
        shard = world.add(there[-1]).shard.index
        if shard < before:
            assert loads[shard] == min(loads)
        else:
            assert shard == before
            assert min(loads) > 0
        assert len(world._shards) <= (gpus or len(world._shards))
    assert sorted(world.placement) == sorted(there)
    by_shard = {place.shard: place.devices for place in world.placement.values()}
    assert all(by_shard.values())
    if gpus:
        taken = Counter(device for devices in by_shard.values() for device in devices)
        assert max(taken.values(), default=1) == 1
        for index, devices in by_shard.items():
            assert devices[0] == f"fake:{index}", "it computes on the same as before"


def test_a_shard_that_is_down_gets_no_more_modules() -> None:
    world = World(2, 2)
    world._shards[0].down = True
    assert world.add("third").shard.index == 1
    world._shards[1].down = True
    with pytest.raises(ConfigError, match="no shard is left"):
        world.add("fourth")
    world._devices = []
    assert world.add("fourth").shard.index == 2


# The requests to a shard.


@pytest.fixture(name="world")
def _world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(learner_group, "EpisodeSender", lambda *_: Outside())
    return World()


def built(world: World, module_id: str) -> Module:
    module = world.add(module_id)
    done = world._build(module)
    world.answer(training_pb2.AddModule)
    assert done.result(0) is None
    return module


def test_the_answer_to_the_last_command_ends_a_request(world: World) -> None:
    module = world.add("a")
    world.join()
    first = world.ask(module, training_pb2.Restore(), training_pb2.Update())
    second = world.ask(module, training_pb2.Snapshot())
    assert world.sent() == ["Setup", "Restore", "Update", "Snapshot"]
    world.answer(training_pb2.Restore)
    world.answer(training_pb2.Snapshot, last=False)
    assert not first.done()
    assert not second.done()
    world.answer(training_pb2.Snapshot)
    assert second.result(0) is True
    world.answer(training_pb2.Update, failure="no")
    assert type(first.exception(0)) is LearnerGroupError
    assert str(first.exception(0)) == "update of 'a': no"
    assert not world._shards[0].requests


def test_a_lost_process_fails_its_requests_once_it_is_known_how_it_ended(world: World) -> None:
    world.add("a")
    world.join()
    module = built(world, "b")
    request = world.ask(module)
    world._handle(WorkerLeft(world.worker, "hung"))
    assert not module.settled()
    assert world.outside.killed == [7]
    assert not request.done()
    world.exit()
    assert isinstance(request.exception(0), ShardLost)
    words = "learner-0 on fake:0 was lost: killed by SIGKILL."
    assert str(request.exception(0)) == f"update of 'b': {words}\nhung"
    world.answer(training_pb2.Update)  # a reply that was under way
    assert isinstance(world.ask(module).exception(0), ShardLost)


def test_a_new_process_builds_the_modules_of_its_predecessor_from_their_states(
    world: World,
) -> None:
    module = world.add("a")
    world.join()
    built(world, "b").updates = 3
    kept = built(world, "c")
    kept.updates, kept.kept = 8, ModuleState({}, {"updates": 5})
    world.exit()
    assert "'b' goes back to update 0 of 3. Module 'c' goes back to update 5 of 8." in (
        world._shards[0].lost
    )
    world.outside.sent.clear()
    world.worker = Worker("learner-0", "2", "learner", 0, "here", 9, (), ("unix:/x",), True)
    world.join()
    ids = [getattr(each, "module_id", "") for _, each in world.outside.sent]
    assert world.sent() == ["Setup", "AddModule", "AddModule", "Restore"]
    assert ids == ["", "b", "c", "c"], "'a' was never there"
    assert not kept.settled()
    world.answer(training_pb2.AddModule)
    assert kept.settled()
    assert not module.settled()
    world.answer(training_pb2.Restore, failure="out of memory")
    assert world.outside.killed == [9]
    assert not kept.settled()


def test_a_module_has_room_until_as_many_updates_as_allowed_are_unfinished(world: World) -> None:
    world.add("a")
    world.join()
    module = built(world, "b")
    for _ in range(3):
        assert module.has_room()
        module.in_flight.append(world.ask(module))
        world.answer(training_pb2.Update)
    for _ in range(2):
        assert module.has_room()
        module.in_flight.append(world.ask(module))
    assert not module.has_room()
    world.exit()
    assert not module.has_room()
    module.removed = True
    assert module.has_room(), "so that its update fails at once"
    assert str(world.ask(module).exception(0)) == "update of 'b': it was removed"


def test_a_shard_that_stays_down_says_so(world: World) -> None:
    module = world.add("a")
    world.exit("exit code 1", None)
    error = world.ask(module).exception(0)
    assert isinstance(error, ShardLost)
    assert "exit code 1. It has died too often, and stays down" in str(error)
    assert module.has_room(), "so that an update fails at once"
    world.join()  # it attached just before its end
    for done in (world.ask(module), world._build(module)):
        assert isinstance(done.exception(0), ShardLost)


def test_a_callback_may_call_the_group_and_wait_for_the_reply(world: World) -> None:
    module = world.add("a")
    world.join()
    first, asked, results = world.ask(module), threading.Event(), SimpleQueue[bool]()

    def ask_again(_: Future[Any]) -> None:
        second = world.ask(module)
        asked.set()
        results.put(second.result(PATIENCE))

    first.add_done_callback(ask_again)
    world.answer(training_pb2.Update)  # in the thread that answers the second one, too
    assert asked.wait(PATIENCE)
    world.answer(training_pb2.Update)
    assert results.get(timeout=PATIENCE) is True


def test_futures_cannot_be_cancelled_and_replies_that_cannot_be_read_fail_their_request(
    world: World,
) -> None:
    def cannot(body: Any) -> None:
        raise ValueError("a digest differs")

    module = world.add("a")
    world.join()
    request = world._request(module, "state", [training_pb2.Snapshot()], cannot)
    assert not request.cancel(), "else its reply would break the group"
    world.answer(training_pb2.Snapshot)
    assert str(request.exception(0)) == "state of 'a': a digest differs"
    assert not world._shards[0].requests
