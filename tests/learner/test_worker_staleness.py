"""A LearnerWorker's books: what it trains on, what it drops and why, and what it counts."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from gymnasium import spaces

from juggler.learner import worker
from juggler.learner.config import ImpalaConfig
from juggler.learner.worker import LearnerWorker
from juggler.runtime.actors.attachment import Command, Detached
from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.endpoints import bind, make_server
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.worker import Contact
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.stream import EpisodeSender
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.modules.weights import WeightsSubscription
from juggler.runtime.wire.frames import Limits
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import attach_pb2, episodes_pb2, training_pb2

M = TypeVar("M", bound=Message)
MakeBatch = Callable[..., EpisodeBatch]
PATIENCE = 30.0  # seconds until a test fails; nothing takes as long
BEGIN = Version(4, 10)  # of the learner's first weights
GENERATION = 5  # of the group that it joins
MAX_STALENESS = 2


class Driver:
    """The driver's place on the attach stream: gives commands, and hears what the worker says."""

    run_id = "run"

    def __init__(self) -> None:
        self.inbox: Mailbox[Command | Detached] = Mailbox()
        self.arrived: dict[int, int] = {}  # batch id -> live steps
        self._answers: SimpleQueue[Message | BaseException] = SimpleQueue()

    def ask(self, command: Message, answer: M) -> M:
        body = any_pb2.Any()
        body.Pack(command)
        self.inbox.put(Command(1, body))
        said = self._answers.get(timeout=PATIENCE)
        assert isinstance(said, type(answer)), said
        return said

    # What the worker calls.

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reply(self, command_id: int, body: Message, *, last: bool = True) -> None:
        self._answers.put(body)

    def fail(self, command_id: int, error: BaseException) -> None:
        self._answers.put(error)

    def report(self, arrivals: training_pb2.Arrivals) -> None:
        for arrival in arrivals.arrivals:
            assert arrival.batch_id not in self.arrived
            self.arrived[arrival.batch_id] = arrival.live_steps


class World:
    """A worker with real streams and a small module, and an envrunner's ends of the streams."""

    def __init__(self, directory: Path, make_batch: MakeBatch) -> None:
        address = f"unix:{directory / 'l'}"
        self.driver = Driver()
        self._make_batch = make_batch
        server = make_server(max_streams=4)
        bind(server, address)
        attachment: Any = self.driver
        self._worker = LearnerWorker(attachment, self.driver.inbox, Contact(address), server)
        self._thread = threading.Thread(target=self._worker.run, daemon=True)
        self._thread.start()
        self.driver.ask(_setup(), training_pb2.Ready())
        metadata = call_metadata("", "run", "incarnation")
        self._settled: SimpleQueue[tuple[int, str, str]] = SimpleQueue()
        self._sender = EpisodeSender(address, metadata, lambda *settled: self._settled.put(settled))
        self._weights = WeightsSubscription(address, metadata, "envrunner-0", Limits())
        self.join(GENERATION)

    def join(self, generation: int) -> None:
        group = training_pb2.Group(generation=generation, members=["learner-0"])
        self.driver.ask(group, attach_pb2.Done())

    def send(self, batch_id: int, update: int, generation: int = GENERATION) -> tuple[str, str]:
        """A batch for a generation, sampled with the weights of an update. What became of it."""
        batch = self._make_batch(4, 8, seed=batch_id)
        header = episodes_pb2.BatchHeader(
            batch_id=batch_id,
            envrunner="envrunner-0",
            generation=generation,
            live_steps=batch.live_steps,
            version=Version(generation, update).message(),
        )
        self._sender.send(header, {"default": batch.to_tree()})
        settled, reason, explanation = self._settled.get(timeout=PATIENCE)
        assert settled == batch_id
        return reason, explanation

    def update(self, *batch_ids: int) -> training_pb2.UpdateDone:
        command = training_pb2.Update(update_id=77, generation=GENERATION, batch_ids=batch_ids)
        done = self.driver.ask(command, training_pb2.UpdateDone())
        assert done.update_id == 77
        assert sorted(used.batch_id for used in done.batches) == sorted(batch_ids)
        for used in done.batches:
            was_here = used.dropped != "restart"
            assert used.live_steps == (self.steps(used.batch_id) if was_here else 0)
        return done

    def steps(self, *batch_ids: int) -> int:
        return sum(self.driver.arrived[batch_id] for batch_id in batch_ids)

    def weights_of(self, version: Version) -> np.ndarray:
        """The newest weights, which are to be of this version, in one row."""
        weights = self._weights.wait_for(version, PATIENCE)
        assert weights.version == version
        assert isinstance(weights.tree, dict)
        return np.concatenate([w.ravel() for w in weights.tree["default"].values()])

    def close(self) -> None:
        self._sender.close()
        self._weights.close()
        self.driver.inbox.put(Detached("over"))
        self._thread.join(PATIENCE)
        self._worker.close()


def _setup() -> training_pb2.Setup:
    config = {
        "learner": asdict(ImpalaConfig(max_staleness=MAX_STALENESS)),
        "module": asdict(ModuleConfig(model={"hidden_sizes": [8]})),
        "connectors": {},
        "device": "cpu",
    }
    return training_pb2.Setup(
        config=json.dumps(config),
        observation_space=space_to_message(spaces.Box(-10, 10, (4,), np.float32)),
        action_space=space_to_message(spaces.Discrete(2)),
        version=BEGIN.message(),
    )


@pytest.fixture
def world(tmp_path: Path, make_batch: MakeBatch) -> Iterator[World]:
    made = World(tmp_path, make_batch)
    yield made
    made.close()


def _version(done: training_pb2.UpdateDone) -> Version:
    return Version.of(done.version)


def _staleness(done: training_pb2.UpdateDone) -> dict[int, tuple[int, str]]:
    """By batch id: updates, and why it was dropped."""
    return {used.batch_id: (used.staleness, used.dropped) for used in done.batches}


def test_the_first_weights_are_those_of_the_setup_under_the_groups_generation(world: World) -> None:
    world.weights_of(Version(GENERATION, BEGIN.update))


def test_an_update_trains_on_its_batches_and_publishes_the_next_version(world: World) -> None:
    before = world.weights_of(Version(GENERATION, 10))
    for batch_id in (1, 2):
        assert world.send(batch_id, update=10) == ("", "")
    done = world.update(2, 1)
    assert _staleness(done) == {1: (0, ""), 2: (0, "")}
    assert (done.steps_trained, done.steps_dropped) == (world.steps(1, 2), 0)
    assert _version(done) == (GENERATION, 11)
    assert (world.weights_of(Version(GENERATION, 11)) != before).any()


def test_a_batch_of_older_weights_than_allowed_is_dropped_and_counted(world: World) -> None:
    for batch_id, update in ((1, 10), (2, 10 - MAX_STALENESS), (3, 9 - MAX_STALENESS), (4, 0)):
        world.send(batch_id, update)
    done = world.update(1, 2, 3, 4)
    assert _staleness(done) == {1: (0, ""), 2: (2, ""), 3: (3, "stale"), 4: (10, "stale")}
    assert done.steps_trained == world.steps(1, 2)
    assert done.steps_dropped == world.steps(3, 4)


def test_staleness_is_measured_when_a_batch_is_used(world: World) -> None:
    world.send(1, update=10)
    for batch_id in (2, 3, 4):
        world.send(batch_id, update=10)
        assert _staleness(world.update(batch_id))[batch_id][1] == ""
    assert _staleness(world.update(1)) == {1: (3, "stale")}


def test_without_a_fresh_batch_there_is_no_update(world: World) -> None:
    before = world.weights_of(Version(GENERATION, 10))
    world.send(1, update=7)
    done = world.update(1)
    assert _version(done) == (GENERATION, 10)
    assert (done.steps_trained, done.steps_dropped) == (0, world.steps(1))
    np.testing.assert_array_equal(world.weights_of(Version(GENERATION, 10)), before)


def test_a_batch_of_newer_weights_than_the_learners_is_fresh(world: World) -> None:
    world.send(1, update=12)
    assert _staleness(world.update(1)) == {1: (0, "")}


def test_a_batch_that_is_not_here_went_with_a_predecessor(world: World) -> None:
    world.send(2, update=10)
    done = world.update(1, 2, 3)
    assert _staleness(done) == {1: (0, "restart"), 2: (0, ""), 3: (0, "restart")}
    assert (done.steps_trained, done.steps_dropped) == (world.steps(2), 0)
    done = world.update(2)
    assert _staleness(done) == {2: (0, "restart")}, "it was trained on already"
    assert _version(done) == (GENERATION, 11)


def test_discarded_batches_are_counted_and_gone(world: World) -> None:
    for batch_id in (1, 2):
        world.send(batch_id, update=10)
    world.driver.ask(training_pb2.Discard(batch_ids=[1, 9]), attach_pb2.Done())
    done = world.update(1, 2)
    assert _staleness(done) == {1: (0, "restart"), 2: (0, "")}
    assert (done.steps_trained, done.steps_dropped) == (world.steps(2), world.steps(1))


def test_every_step_that_arrived_is_trained_dropped_or_still_here(world: World) -> None:
    for batch_id in range(1, 13):
        world.send(batch_id, update=10 if batch_id % 3 else 5)
    for first in (1, 4, 7):
        done = world.update(first, first + 1, first + 2)
    world.driver.ask(training_pb2.Discard(batch_ids=[10]), attach_pb2.Done())
    done = world.update(99)
    assert done.steps_trained + done.steps_dropped == world.steps(*range(1, 11))
    assert done.steps_trained == world.steps(1, 2, 4, 5, 7, 8)


def test_a_higher_generation_has_the_same_weights_and_goes_on_counting(world: World) -> None:
    before = world.weights_of(Version(GENERATION, 10))
    world.join(GENERATION + 1)
    np.testing.assert_array_equal(world.weights_of(Version(GENERATION + 1, 10)), before)
    assert world.send(1, update=10) == ("", ""), "it was on its way"
    done = world.update(1)
    assert _staleness(done) == {1: (0, "")}
    assert _version(done) == (GENERATION + 1, 11)


def test_a_batch_for_a_predecessor_is_refused_and_not_counted(world: World) -> None:
    reason, explanation = world.send(1, update=10, generation=GENERATION - 1)
    assert reason == "refused"
    assert f"before {GENERATION}" in explanation
    assert world.driver.arrived == {}
    done = world.update(1)
    assert (done.steps_trained, done.steps_dropped) == (0, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # that is it
def test_gradients_that_stay_not_finite_end_the_worker_with_the_module_and_the_update(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = iter([math.nan, 1.0, *[math.inf] * 5])
    learner = world._worker._learner
    monkeypatch.setattr(
        learner,
        "after_gradients",
        lambda grads, aux: ({key: x * next(factors) for key, x in grads.items()}, aux),
    )
    monkeypatch.setattr(worker, "_METRICS_SECONDS", 0.0)
    for update in range(6):
        world.send(update, update=10 + update)
        before = learner.state["default"]["parameters"]
        done = world.update(update)
        skipped = update != 1
        assert done.metrics["default"].values["skipped"] == skipped
        assert _version(done).update == 11 + update
        assert (learner.state["default"]["parameters"] == before).all() == skipped
    world.send(6, update=16)
    with pytest.raises(
        AssertionError, match=r"module 'default': .* 5 updates in a row.* update 17"
    ):
        world.update(6)
