"""Modules over shards of devices: placement, requests, faults."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import psutil
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from support.batches import MakeBatch
from support.learner_groups import LEARNERS, MODEL, PATIENCE, SPACES, Gate, alone, same, spec
from support.processes import eventually

import juggler
from juggler.driver import learner_group
from juggler.driver.config import ConfigError
from juggler.driver.learner_group import (
    LearnerGroup,
    LearnerGroupError,
    Module,
    ModuleState,
    ShardLost,
)
from juggler.learner.data.collate import collate
from juggler.runtime.actors.hub import Worker, WorkerJoined, WorkerLeft, WorkerReplied
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.wire.trees import flatten
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


@pytest.mark.slow
def test_each_learns_what_it_would_learn_alone(
    group: juggler.LearnerGroup, make_batch: MakeBatch
) -> None:
    batches = {
        name: [[make_batch(seed=10 * n + update)] for update in range(3)]
        for n, name in enumerate(LEARNERS)
    }
    handles = [
        group.update_from_episodes(
            {name: own[update] for name, own in batches.items()}, async_update=True
        )
        for update in range(3)
    ]
    results = [handle.result(PATIENCE) for handle in handles]
    weights = group.get_weights()
    assert set(weights) == set(LEARNERS)
    for name, own in batches.items():
        learner = alone(name)
        for update, episodes in enumerate(own):
            learner.update_from_episodes(episodes)
            done = results[update][name]
            assert done.live_steps == episodes[0].live_steps
            assert done.updates == update + 1
        same(weights[name], learner.get_weights())
        assert done.metrics["lr"] == pytest.approx(LEARNERS[name].get("lr", 3e-4))


def test_episodes_may_change_as_soon_as_their_update_was_asked_for(
    group: juggler.LearnerGroup, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    send = EpisodeSender.send

    def kept(self: EpisodeSender, header: Any, tree: Any) -> None:
        sent.append(tree["main"])
        send(self, header, tree)

    monkeypatch.setattr(EpisodeSender, "send", kept)
    batch = make_batch()
    group.update_from_episodes({"main": [batch]})
    (tree,) = sent
    for (_, mine), (_, other) in zip(flatten(batch.to_tree()), flatten(tree), strict=True):
        assert np.array_equal(mine, other)
        assert not np.shares_memory(mine, other)


def test_a_slow_shard_holds_up_its_own_modules_alone(
    group: juggler.LearnerGroup, make_batch: MakeBatch, gate: Gate
) -> None:
    slow = group.update_from_episodes({"gated": [make_batch()]}, async_update=True)
    behind = group.update_from_episodes({"target": [make_batch()]}, async_update=True)
    gate.wait_for_one()
    for _ in range(3):
        group.update_from_episodes({"main": [make_batch()], "short": [make_batch()]})
    assert not slow.done()
    assert not behind.done()
    gate.open()
    assert behind.result(PATIENCE)["target"].updates
    assert slow.done()


def test_one_update_too_many_waits_and_the_other_modules_are_asked_meanwhile(
    group: juggler.LearnerGroup, make_batch: MakeBatch, gate: Gate
) -> None:
    in_flight = [
        group.update_from_episodes({"gated": [make_batch()]}, async_update=True) for _ in range(2)
    ]
    before = group.save(["main"])["main"].extra["updates"]
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(
            group.update_from_episodes,
            {"gated": [make_batch()], "main": [make_batch()]},
            async_update=True,
        )
        while group.save(["main"])["main"].extra["updates"] == before:
            pass
        assert not asking.done()
        gate.open()
        assert asking.result(PATIENCE).result(PATIENCE).keys() == {"gated", "main"}
    assert all(handle.done() for handle in in_flight)


def test_a_module_begins_with_the_weights_or_goes_on_from_the_state_of_another(
    group: juggler.LearnerGroup, make_batch: MakeBatch
) -> None:
    group.update_from_episodes({"main": [make_batch()]})
    state, weights = group.save(["main"])["main"], group.get_weights(["main"])["main"]
    group.add_module("main_1", spec(seed=1, **LEARNERS["main"]), state=state)
    group.add_module("other", spec(seed=1, algorithm="appo"), weights=weights)
    found = group.get_weights(["main_1", "other"])
    same(found["main_1"], weights)
    same(found["other"], weights)
    tree: Any = group.save(["other"])["other"].tree["default"]
    for name, array in tree["parameters"].items():
        assert np.array_equal(tree["extra"]["target"][name], array)
    done = group.update_from_episodes({"main_1": [make_batch()], "other": [make_batch()]})
    assert done["main_1"].updates == state.extra["updates"] + 1
    assert done["other"].updates == 1
    group.restore({"main_1": state})
    same(group.get_weights(["main_1"])["main_1"], weights)
    for name in ("main_1", "other"):
        group.remove_module(name)


def test_columns_are_learned_from_as_the_episodes_are_that_they_were_collated_from(
    group: juggler.LearnerGroup, make_batch: MakeBatch
) -> None:
    for name in ("one", "other"):
        group.add_module(name, spec(algorithm="ppo"))
    batches = [make_batch(seed=1), make_batch(seed=2)]
    passes = {"minibatch_size": 10, "num_epochs": 2}
    one = group.update_from_episodes({"one": batches}, **passes)["one"]  # type: ignore[call-overload]
    handle = group.update_from_batch({"other": collate(batches)}, async_update=True, **passes)
    assert handle.result(PATIENCE)["other"] == one
    found = group.get_weights(["one", "other"])
    same(found["other"], found["one"])
    in_parts = group.update_from_batch({"other": collate(batches)}, num_epochs=1)["other"]
    assert group.update_from_episodes({"one": batches})["one"].metrics != in_parts.metrics
    columns = make_batch().to_tree()
    for wrong, words in (
        ({"other": {**columns, "reward": columns["rewards"]}}, "'reward': did you mean 'rewards'"),
        ({"other": {"rewards": columns["rewards"]}}, r"no column 'observations': \[N, T"),
        ({"othr": columns}, "no module 'othr': did you mean 'other'"),
        ({}, "no batch: give columns"),
    ):
        with pytest.raises(ValueError, match=words):
            group.update_from_batch(wrong)
    with pytest.raises(ValueError, match="num_epochs = 0: must be"):
        group.update_from_batch({"other": columns}, num_epochs=0)
    for name in ("one", "other"):
        group.remove_module(name)


def test_weights_from_elsewhere_are_taken_over_behind_the_updates_asked_for_before(
    group: juggler.LearnerGroup, make_batch: MakeBatch
) -> None:
    weights = group.get_weights(["target"])["target"]
    handle = group.update_from_episodes({"main": [make_batch()]}, async_update=True)
    group.set_weights({"main": weights})
    assert handle.done()
    same(group.get_weights(["main"])["main"], weights)
    updates = handle.result(PATIENCE)["main"].updates
    assert group.save(["main"])["main"].extra["updates"] == updates, "they are counted on"
    assert group.update_from_episodes({"main": [make_batch()]})["main"].updates == updates + 1
    before = group.get_weights(["main"])["main"]
    with pytest.raises(juggler.LearnerGroupError, match="no weights 'nothing'"):
        group.set_weights({"main": {"nothing": np.zeros(1, np.float32)}})
    same(group.get_weights(["main"])["main"], before)
    with pytest.raises(ValueError, match="no module 'mian': did you mean 'main'"):
        group.set_weights({"mian": weights})


# Learner groups with faults, and with impossible requests.


@pytest.mark.slow
def test_what_a_module_cannot_begin_with_is_said_and_it_is_not_there(
    group: juggler.LearnerGroup,
) -> None:
    state = group.save(["main"])["main"]
    with pytest.raises(juggler.LearnerGroupError, match=r"module 'x': .* algorithm 'impala'"):
        group.add_module("x", spec(algorithm="ppo"), state=state)
    with pytest.raises(juggler.LearnerGroupError, match=r"no weights 'polcy_head\.weight': did"):
        group.add_module("x", spec(), weights={"polcy_head.weight": np.zeros(1, np.float32)})
    with pytest.raises(juggler.LearnerGroupError, match="cannot be imported: there is no Python"):
        group.add_module("x", {**spec(), "module": "nowhere_at_all:Module"})
    with pytest.raises(juggler.LearnerGroupError, match="restore of 'target'"):
        group.restore({"target": state})
    assert set(group.placement) == set(LEARNERS)


def test_a_module_that_cannot_update_tells_its_handle_alone(
    group: juggler.LearnerGroup, make_batch: MakeBatch
) -> None:
    before = group.get_weights()
    other_shape = make_batch(observation_size=5)
    largest = np.finfo(np.float32).max
    overflows = make_batch(rewards=np.full((3, 6), largest), ends=0.0)
    not_finite = make_batch(rewards=np.full((3, 6), np.nan, np.float32))
    handles = [
        group.update_from_episodes({"main": [make_batch(), other_shape]}, async_update=True),
        group.update_from_episodes(
            {"short": [overflows], "epochs": [make_batch()]}, async_update=True
        ),
        group.update_from_episodes({"short": [not_finite]}, async_update=True),
    ]
    with pytest.raises(juggler.UpdateFailed, match=r"'main': .*do not fit the space"):
        handles[0].result(PATIENCE)
    with pytest.raises(juggler.UpdateFailed, match=r"'short': .*gradients were not fin") as failed:
        handles[1].result(PATIENCE)
    with pytest.raises(juggler.UpdateFailed, match=r"'short': .*rewards in row 0 at"):
        handles[2].result(PATIENCE)
    assert set(failed.value.failures) == {"short"}
    assert failed.value.results["epochs"].live_steps == make_batch().live_steps
    after = group.get_weights()
    for name in ("main", "short"):
        same(after[name], before[name])
    assert group.update_from_episodes({"main": [make_batch()], "short": [make_batch()]})


@pytest.mark.slow
def test_a_killed_shard_comes_back_with_what_is_known_of_its_modules(
    group: juggler.LearnerGroup, make_batch: MakeBatch, gate: Gate
) -> None:
    learner = alone("target", seed=3)
    group.remove_module("target")
    group.add_module("target", spec(seed=3, **LEARNERS["target"]))
    for update in range(3):  # a snapshot is taken of the second
        group.update_from_episodes({"target": [make_batch(seed=update)]})
        if update < 2:
            learner.update_from_episodes([make_batch(seed=update)])
    victim = group._shards[2].worker
    others = [group._shards[shard].worker for shard in (0, 1)]
    assert victim is not None
    handle = group.update_from_episodes(
        {"gated": [make_batch()], "target": [make_batch()], "main": [make_batch()]},
        async_update=True,
    )
    gate.wait_for_one()
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(juggler.UpdateFailed, match=r"by SIGKILL\. .*update 2 of 3") as failed:
        handle.result(PATIENCE)
    assert set(failed.value.failures) == {"gated", "target"}
    assert isinstance(failed.value.failures["target"], juggler.ShardLost)
    assert set(failed.value.results) == {"main"}
    assert [group._shards[shard].worker for shard in (0, 1)] == others

    gate.open()
    learner.update_from_episodes([make_batch(seed=9)])
    done = group.update_from_episodes({"target": [make_batch(seed=9)], "gated": [make_batch()]})
    assert (done["target"].updates, done["gated"].updates) == (3, 1)
    same(group.get_weights(["target"])["target"], learner.get_weights())


@pytest.mark.slow
def test_a_restored_state_is_kept_for_the_next_process_though_another_module_fails(
    group: juggler.LearnerGroup, make_batch: MakeBatch
) -> None:
    state, weights = group.save(["target"])["target"], group.get_weights(["target"])["target"]
    group.update_from_episodes({"target": [make_batch()]})
    group.save(["target"])
    with pytest.raises(juggler.LearnerGroupError, match="restore of 'main'"):
        group.restore({"target": state, "main": state})
    shard = group._shards[group.placement["target"].shard]
    victim = shard.worker
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    eventually(lambda: shard.worker not in (victim, None), "the next process")
    same(group.get_weights(["target"])["target"], weights)


@pytest.mark.slow
def test_a_group_that_cannot_start_leaves_no_process_and_another_one_alone(
    group: juggler.LearnerGroup,
) -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    with pytest.raises(juggler.LearnerGroupError, match=r"'bad': .* no 'Gatd': did you mean"):
        juggler.LearnerGroup(
            {"bad": {**spec(), "module": "support.learner_groups:Gatd"}}, devices="fake:1"
        )
    with pytest.raises(juggler.ShardLost, match=r"cuda:99 was lost(.|\n)*this host has"):
        juggler.LearnerGroup({"main": spec()}, devices="cuda:99")
    assert {each.pid for each in psutil.Process().children(recursive=True)} == before
    assert all(shard.worker for shard in group._shards)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learner": {"algorithm": "impla"}}, "'new': learner: algorithm ="),
        ({"learner": {"lr": "fast"}}, "'new': learner: lr: "),
        ({"learner": {"env": "CartPole-v1"}}, "'new': learner has no key 'env': known are"),
        ({"lerner": {}}, "'new': .* unexpected keyword"),
        ({"model": {"hidden_sizes": 8}}, "'new': model.hidden_sizes: expected a list"),
        ({"observation_space": None}, "'new': there is no encoding for"),
        ({"connectors": {"lerner": []}}, "connectors has no key 'lerner'"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_before_anything_begins(
    group: juggler.LearnerGroup, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(juggler.ConfigError, match=message):
        group.add_module("new", {**spec(), **given})
    with pytest.raises(juggler.ConfigError, match=message):
        juggler.LearnerGroup({"new": {**spec(), **given}})


def test_what_makes_no_sense_is_refused(group: juggler.LearnerGroup, make_batch: MakeBatch) -> None:
    with pytest.raises(ValueError, match="no module 'mian': did you mean 'main'"):
        group.update_from_episodes({"mian": [make_batch()]})
    with pytest.raises(ValueError, match="no module 'mian'"):
        group.get_weights(["mian"])
    with pytest.raises(ValueError, match="no module 'mian'"):
        group.remove_module("mian")
    with pytest.raises(juggler.ConfigError, match="'main' is there already"):
        group.add_module("main", spec())
    with pytest.raises(juggler.ConfigError, match="weights or state, not both"):
        group.add_module("x", spec(), weights={}, state=group.save(["main"])["main"])
    with pytest.raises(juggler.ConfigError, match=r"missing .* 'action_space'"):
        group.add_module("x", {"observation_space": SPACES["observation_space"]})
    for episodes, message in [
        ({}, "no episodes: give"),
        ([make_batch()], "no episodes: give"),
        ({"main": []}, "'main' needs a list of EpisodeBatch"),
        ({"main": [{}]}, "'main' needs a list of EpisodeBatch"),
        ({"main": make_batch()}, "'main' needs a list of EpisodeBatch"),
    ]:
        with pytest.raises(ValueError, match=message):
            group.update_from_episodes(episodes)  # type: ignore[arg-type]


# Learner groups of which each test makes its own.


@pytest.mark.slow
@pytest.mark.usefixtures("one_forkserver")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"devices": "auto,cpu"}, "auto stands alone"),
        ({"updates_in_flight": 0}, "updates_in_flight = 0"),
        ({"snapshot_updates": 0}, "snapshot_updates = 0"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_a_group_that_cannot_be_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(juggler.ConfigError, match=message):
        juggler.LearnerGroup({"main": spec()}, **keys)
    with pytest.raises(juggler.ConfigError, match="at least one module"):
        juggler.LearnerGroup({})


@pytest.mark.usefixtures("one_forkserver")
@pytest.mark.slow
def test_a_shard_that_hangs_is_killed_and_another_one_is_started_for_another_module(
    make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = partial(learner_group.HubSettings, hang_seconds=4)
    monkeypatch.setattr(learner_group, "HubSettings", quick)
    gate = Gate(tmp_path / "gate")
    gated = {
        **spec(),
        "model": {**MODEL, "gate": str(gate.path)},
        "module": "support.learner_groups:Gated",
    }
    with juggler.LearnerGroup({"gated": gated}, devices="cpu") as group:
        with pytest.raises(
            juggler.UpdateFailed, match=r"was lost: killed by SIGKILL\.\nhung.*: no progress for"
        ):
            group.update_from_episodes({"gated": [make_batch()]})
        gate.open()
        group.add_module("second", spec())
        assert [place.shard for place in group.placement.values()] == [0, 1]
        done = group.update_from_episodes({"gated": [make_batch()], "second": [make_batch()]})
        assert (done["gated"].updates, done["second"].updates) == (1, 1)
    for call in (group.get_weights, lambda: group.add_module("third", spec())):
        with pytest.raises(RuntimeError, match="the learner group is closed"):
            call()
    gate.close()


_SCRIPT = """
import sys
import juggler
from gymnasium import spaces

spec = juggler.LearnerSpec(
    observation_space=spaces.Box(-1, 1, (2,)), action_space=spaces.Discrete(2)
)
group = juggler.LearnerGroup({"main": spec})
print(*group.get_weights()["main"])
assert "torch" not in sys.modules
print(group._shards[0].worker.pid)
"""


@pytest.mark.usefixtures("one_forkserver")
@pytest.mark.slow
def test_a_script_needs_no_torch_and_leaves_no_process_though_it_closes_nothing(
    run_python: Callable[..., str],
) -> None:
    *names, pid = run_python("-c", _SCRIPT).split()
    assert "policy_head.weight" in names
    assert not psutil.pid_exists(int(pid))


# Placement of modules, and requests to a shard, without processes.


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


def test_a_module_state_is_shown_by_its_size() -> None:
    state = ModuleState({"default": {"w": np.zeros((3, 2), np.float32)}}, {"updates": 7})
    assert repr(state) == "ModuleState(1 arrays, 24 bytes, extra={'updates': 7})"


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


def test_callbacks_are_called_in_order_and_one_that_fails_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = [learner_group.Request("an update", bool) for _ in range(20)]
    called = SimpleQueue[Any]()
    requests[0].add_done_callback(lambda done: 1 / 0)
    for request in requests:
        request.add_done_callback(called.put)
    for request in requests:
        request.set_result(True)
    assert [called.get(timeout=PATIENCE) for _ in requests] == requests
    assert "a callback of a learner group failed" in caplog.text


def test_a_callback_is_called_while_the_program_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    monkeypatch.setattr(learner_group, "_CALLBACKS", ended)
    request, called = learner_group.Request("an update", bool), SimpleQueue[Any]()
    request.add_done_callback(called.put)
    request.set_result(True)
    assert called.get_nowait() is request


def test_a_second_interrupt_of_close_ends_the_processes_and_nothing_is_left(
    local_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = juggler.LearnerGroup({"main": spec()}, devices="cpu")
    local = group._local
    (slot,) = local.supervisor._slots.values()
    process: Any = slot.process
    interrupts: list[Any] = []

    def interrupt(own: Any, name: str) -> None:
        """Ctrl-C, the next time this is called."""
        method = getattr(own, name)

        def interrupted(*_: object, **__: object) -> None:
            interrupts.append(own)
            monkeypatch.setattr(own, name, method)
            raise KeyboardInterrupt

        monkeypatch.setattr(own, name, interrupted)

    interrupt(group._changed, "wait_for")  # for requests
    interrupt(process, "join")
    with pytest.raises(KeyboardInterrupt):
        group.close()
    assert interrupts == [group._changed, process]
    assert not process.is_alive()
    assert not local._shares, "the forkserver is released"
    assert local.directory_is_gone()
