"""A LearnerWorker's books: what it trains on, what it drops and why, and what it counts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.worker_world import BEGIN, GENERATION, MAX_STALENESS, World, overlap_on_cpu

from juggler.learner.process import overlap
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

MakeBatch = Callable[..., EpisodeBatch]


@pytest.fixture(params=["in turn", "overlapped"])
def world(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    if request.param == "overlapped":
        overlap_on_cpu(monkeypatch)
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
    world.driver.ask(training_pb2.Discard(module_id="default", batch_ids=[1, 9]), attach_pb2.Done())
    done = world.update(1, 2)
    assert _staleness(done) == {1: (0, "restart"), 2: (0, "")}
    assert (done.steps_trained, done.steps_dropped) == (world.steps(2), world.steps(1))


def test_every_step_that_arrived_is_trained_dropped_or_still_here(world: World) -> None:
    for batch_id in range(1, 13):
        world.send(batch_id, update=10 if batch_id % 3 else 5)
    for first in (1, 4, 7):
        done = world.update(first, first + 1, first + 2)
    world.driver.ask(training_pb2.Discard(module_id="default", batch_ids=[10]), attach_pb2.Done())
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


def test_gradients_that_stay_not_finite_are_told_with_the_module_and_the_update(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = iter([math.nan, 1.0, *[math.inf] * 5])
    learner = world.module.learner
    monkeypatch.setattr(
        learner,
        "after_gradients",
        lambda grads, aux: (grads * next(factors), aux),
    )
    monkeypatch.setattr(overlap, "_METRICS_SECONDS", 0.0)
    for update in range(6):
        world.send(update, update=10 + update)
        before = learner.state["parameters"].clone()
        done = world.update(update)
        skipped = update != 1
        assert done.metrics["default"].values["skipped"] == skipped
        assert _version(done).update == 11 + update
        assert (learner.state["parameters"] == before).all() == skipped
        assert done.hopeless == ""
    world.send(6, update=16)
    said = world.update(6).hopeless
    assert re.search(r"module 'default': .* 5 updates in a row.* update 17", said)
