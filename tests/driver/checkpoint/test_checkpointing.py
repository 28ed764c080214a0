"""Checkpoints between rounds of a synchronous run, and messages after one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.workers_world import (
    ROWS,
    SHAPE,
    STEPS,
    WorkersWorld,
    answer_the_snapshot,
    play_a_round,
    ready_message,
    requests,
    synchronous,
)

from juggler.driver.checkpoint.snapshots import connectors_of
from juggler.driver.config import RunConfig
from juggler.driver.workers.worker_registry import WorkerRegistry
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.connectors.mergeable_state import Moments, from_bytes, to_bytes
from juggler.runtime.wire.v1 import training_pb2


def checkpoint_is_on_the_disk(world: WorkersWorld) -> None:
    (written,) = world.written.gather(timeout=30)
    assert written.problem == ""
    world.snapshots.done(written)
    world.turn()


def test_behind_a_checkpoint_all_begin_anew_as_those_of_a_resumed_run_begin(tmp_path: Path) -> None:
    world = synchronous(tmp_path, seed=5)
    play_a_round(world)
    play_a_round(world)
    answer_the_snapshot(world)
    checkpoint_is_on_the_disk(world)
    told = [request.seed if request.HasField("seed") else None for _, request in requests(world)]
    _, snapshot = world.asked(world.learner, training_pb2.Snapshot)[-1]

    resumed = WorkerRegistry(RunConfig.from_flat({"seed": 5, **SHAPE}), first_update=2)
    ((_, runner),) = resumed.joined(world.runner)
    ready = ready_message(rows=ROWS, steps=STEPS)
    resumed.runner_ready(world.runner, ready)
    ((_, learner),) = resumed.joined(world.learner)
    assert told == [None] * 4 + [runner.seed, None]
    assert snapshot.seed == learner.seed


def test_behind_a_checkpoint_all_are_told_what_connectors_had_learned_there(tmp_path: Path) -> None:
    world = synchronous(tmp_path)
    much, little = (
        to_bytes({"filter": Moments.of(np.zeros((count, 1))).to_tree()}) for count in (1000, 1)
    )
    play_a_round(world, connector_delta=much)
    play_a_round(world, connector_delta=little)
    answer_the_snapshot(world)
    checkpoint_is_on_the_disk(world)
    told = [request.connector_state for _, request in requests(world)]
    assert [bool(state) for state in told] == [False, False, True, False, True, False]
    saved = connectors_of(read(tmp_path / "000000002"))
    np.testing.assert_equal(from_bytes(told[4]), saved.merged)
    assert Moments.from_tree(from_bytes(told[4])["filter"]).count == 2002


def test_a_checkpoint_that_fails_holds_up_nobody_for_longer(tmp_path: Path) -> None:
    world = synchronous(tmp_path)
    play_a_round(world)
    play_a_round(world)
    world.fail(world.learner, world.asked(world.learner, training_pb2.Snapshot)[-1][0])
    assert len(requests(world)) == 6
    assert requests(world)[-2][1].HasField("seed"), "whether or not the disk is full"


def test_a_run_that_is_to_stop_begins_neither_round_nor_checkpoint(tmp_path: Path) -> None:
    world = synchronous(tmp_path, stop_steps=80)
    play_a_round(world)
    play_a_round(world)
    assert world.parts.end.reason == "stop_steps"
    assert len(requests(world)) == 4
    assert not world.snapshots.under_way
    counters = world.core.ledger.counters()
    assert (counters.sampled, counters.trained, counters.in_flight) == (80, 80, 0)
