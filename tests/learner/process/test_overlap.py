"""Samples that are made and copied alongside updates, and their use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import MakeBatch
from support.fake_streams import PATIENCE, FakeDevice
from support.worker_world import GENERATION, MAX_STALENESS, World, overlap_on_cpu

from juggler.learner.algorithms.appo import AppoConfig
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.config import LearnerConfig
from juggler.learner.group.peers import PeerLost
from juggler.learner.learner import Learner
from juggler.learner.process.overlap import (
    InTurn,
    Overlapped,
    Publish,
    UpdateBatches,
    is_asynchronous,
)
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.weights_stream import WeightsPublisher
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CONFIGS = {
    "impala": ImpalaConfig(),
    "appo": AppoConfig(buffer_batches=2, batch_uses=2),
    "ppo": PpoConfig(epochs=2, minibatches=2, target_kl=None),
}


def make_learner(config: LearnerConfig | None = None, device: str = "cpu") -> Learner:
    space = spaces.Box(-10, 10, (4,), np.float32)
    model = {"hidden_sizes": [8]}
    return build_learner(
        config or ImpalaConfig(), None, space, spaces.Discrete(2), model, device=device
    )


def share(make_batch: MakeBatch, *batch_ids: int) -> UpdateBatches:
    batches = [make_batch(4, 8, seed=batch_id) for batch_id in batch_ids]
    return UpdateBatches(list(batch_ids), batches)


def publisher() -> Publish:
    return WeightsPublisher(lambda metadata: None).publish


def update(learner: Learner, updating: InTurn, share: UpdateBatches) -> None:
    """As a module of a learner process makes it."""
    learner.step(updating.sample(share))
    updating.made()


class Bench:
    """Updates with overlap, the next of which a test announces.

    Attributes:
        coming: the next update.
        collated: names of the threads that have collated a sample, one for each.
    """

    def __init__(self, learner: Learner, device: FakeDevice | None = None) -> None:
        self.coming: UpdateBatches | None = None
        self.collated: list[str] = []
        self._collate = learner.collated
        learner.collated = self._noted  # type: ignore[method-assign]
        self.learner = learner
        self.overlapped = Overlapped(learner, publisher(), lambda: self.coming, device)

    def _noted(self, episodes: Any) -> Any:
        self.collated.append(threading.current_thread().name.partition("_")[0])
        return self._collate(episodes)

    def update(self, share: UpdateBatches, coming: UpdateBatches | None = None) -> None:
        self.coming = coming
        update(self.learner, self.overlapped, share)
        if self.overlapped._prepared is not None:  # it is noted before anything else is
            wait([self.overlapped._prepared[1]], PATIENCE)


@pytest.fixture
def learner() -> Learner:
    return make_learner()


@pytest.fixture
def bench(learner: Learner) -> Iterator[Bench]:
    made = Bench(learner)
    yield made
    made.overlapped.close()


def equal(one: Learner, other: Learner) -> bool:
    pairs = zip(one.get_weights().values(), other.get_weights().values(), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_only_a_device_of_its_own_works_by_itself() -> None:
    assert not is_asynchronous(torch.device("cpu"))
    assert is_asynchronous(torch.device("cuda:1"))


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_overlapped_updates_are_those_that_are_made_in_turn(
    make_batch: MakeBatch, algorithm: str
) -> None:
    learners = [make_learner(CONFIGS[algorithm]) for _ in range(2)]
    in_turn, bench = InTurn(learners[0], publisher()), Bench(learners[1])
    shares = [share(make_batch, 3 * n, 3 * n + 1) for n in range(4)]
    for this, after in zip(shares, [*shares[1:], None], strict=True):
        update(learners[0], in_turn, this)
        bench.update(this, after)
        assert equal(*learners)
    assert bench.collated == ["MainThread", "staging", "staging", "staging"]
    assert learners[1].collate_seconds > 0
    bench.overlapped.close()


def test_a_sample_is_used_only_for_the_batches_that_it_was_made_of(
    make_batch: MakeBatch, learner: Learner, bench: Bench
) -> None:
    other = make_learner()
    first, expected = share(make_batch, 1), share(make_batch, 2, 3)
    fewer = UpdateBatches([3], expected.episodes[1:])
    bench.update(first, expected)
    bench.update(fewer)
    bench.update(expected)
    assert bench.collated == ["MainThread", "staging", "MainThread", "MainThread"]
    for each in (first, fewer, expected):
        other.update_from_episodes(each.episodes)
    assert equal(learner, other)


def test_what_is_forgotten_is_made_again(make_batch: MakeBatch, bench: Bench) -> None:
    first, second = share(make_batch, 1), share(make_batch, 2)
    bench.update(first, second)
    bench.overlapped.forget()
    bench.update(second)
    assert bench.collated == ["MainThread", "staging", "MainThread"]


def test_what_fails_beside_an_update_is_raised_by_the_one_that_it_was_for(
    make_batch: MakeBatch, learner: Learner, bench: Bench
) -> None:
    bad = UpdateBatches([2, 3], [make_batch(4, 8), make_batch(4, 8, observation_size=5)])
    bench.update(share(make_batch, 1), bad)
    assert learner.updates == 1
    with pytest.raises(ValueError, match="batches differ in their 'observations'"):
        bench.update(bad)
    assert learner.updates == 1


def test_the_next_sample_is_made_while_an_update_runs(
    make_batch: MakeBatch, learner: Learner, bench: Bench
) -> None:
    collated = threading.Event()

    def collate(episodes: Any) -> Any:
        made = bench._noted(episodes)
        if bench.collated[-1] == "staging":
            collated.set()
        return made

    def waits(sample: Any) -> Any:
        assert collated.wait(PATIENCE), "only after this one, or never"
        return sample

    learner.collated = collate  # type: ignore[method-assign]
    learner.before_gradients = waits  # type: ignore[method-assign]
    bench.update(share(make_batch, 1), share(make_batch, 2))


def test_updates_wait_for_their_samples_copies_and_not_the_other_way_round(
    make_batch: MakeBatch,
) -> None:
    device = FakeDevice()
    bench = Bench(make_learner(), device)
    shares = [share(make_batch, n) for n in range(3)]
    for this, after in zip(shares, [*shares[1:], None], strict=True):
        bench.update(this, after)
    bench.overlapped.close()
    on_side = [event for event in device.events if event.stream.name == "side 1"]
    on_main = [event for event in device.events if event.stream is device.main]
    assert len(on_side) == len(on_main) == 3, "a copy and an update each"
    assert device.main.waited_for == on_side
    assert all(event.stream.waited_for == [] for event in on_side)
    assert {"MainThread", "publishing"} < set(device.threads), "pinned memory is this device's"
    assert any(name.startswith("staging") for name in device.threads)


def test_the_host_gets_two_updates_ahead_of_the_device_and_no_further(
    make_batch: MakeBatch,
) -> None:
    device = FakeDevice()
    learner = make_learner()
    bench = Bench(learner, device)
    device.slow = True
    for batch_id in (1, 2):
        bench.update(share(make_batch, batch_id))
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(bench.update, share(make_batch, 3))
        while not device.awaited:
            assert not third.done()
        assert learner.updates == 2
        first = next(event for event in device.events if event.stream is device.main)
        assert device.awaited == [first]
        first.finish()
        third.result(PATIENCE)
    assert learner.updates == 3
    bench.overlapped.close()


def test_commands_that_came_while_the_host_waited_are_seen(make_batch: MakeBatch) -> None:
    device = FakeDevice()
    bench = Bench(make_learner(), device)
    device.slow = True
    for batch_id in (1, 2):
        bench.update(share(make_batch, batch_id))
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(bench.update, share(make_batch, 3))
        while not device.awaited:
            assert not third.done()
        bench.coming = share(make_batch, 4)
        device.awaited[0].finish()
        third.result(PATIENCE)
    bench.overlapped.close()
    assert bench.collated[-1] == "staging"


@ON_GPU
@pytest.mark.parametrize("algorithm", CONFIGS)
def test_on_a_gpu_overlapped_updates_are_those_that_are_made_in_turn(
    make_batch: MakeBatch, algorithm: str
) -> None:
    learners = [make_learner(CONFIGS[algorithm], device="cuda:0") for _ in range(2)]
    in_turn, bench = InTurn(learners[0], publisher()), Bench(learners[1])
    shares = [share(make_batch, *range(8 * n, 8 * n + 8)) for n in range(20)]
    for this, after in zip(shares, [*shares[1:], None], strict=True):
        update(learners[0], in_turn, this)
        bench.update(this, after)
        bench.overlapped.publish(Version(1, learners[1].updates))
    for one, other in zip(*(x.get_params().values() for x in learners), strict=True):
        torch.testing.assert_close(one, other)
    bench.overlapped.close()


@ON_GPU
@pytest.mark.parametrize("algorithm", CONFIGS)
def test_on_a_gpu_no_update_waits_for_the_device(make_batch: MakeBatch, algorithm: str) -> None:
    bench = Bench(make_learner(CONFIGS[algorithm], device="cuda:0"))
    shares = [share(make_batch, n) for n in range(4)]
    bench.update(shares[0], shares[1])  # what is done once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        bench.update(shares[1], shares[2])
        bench.overlapped.publish(Version(1, 2))
        bench.update(shares[2], shares[3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bench.overlapped.close()


@ON_GPU
def test_on_a_gpu_samples_come_through_page_locked_memory(make_batch: MakeBatch) -> None:
    on_host = make_learner(device="cuda:0").collated([make_batch(4, 8)])
    assert on_host["observations"].is_pinned()


# A LearnerWorker that prepares the next update: its books stay exact.


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
