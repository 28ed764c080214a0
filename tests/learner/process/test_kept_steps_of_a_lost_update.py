"""The books of a learner with a replay, when another one of its group is killed in an update."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from support import dying_learner
from support.worker_world import World

from juggler.learner.algorithms.dqn.config import DqnConfig
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.v1 import training_pb2

MakeBatch = Callable[..., EpisodeBatch]


@pytest.mark.usefixtures("local_workers")
@pytest.mark.parametrize(
    ("dies_at", "saved", "dropped", "kept"),
    [
        ("step", True, "", [1, 2, 3]),
        ("arrival", True, "learner_lost", [1, 3]),
        ("step", False, "learner_lost", [3]),
    ],
)
def test_a_step_is_trained_if_it_is_kept_and_else_lost(
    tmp_path: Path, make_batch: MakeBatch, dies_at: str, saved: bool, dropped: str, kept: list[int]
) -> None:
    config = asdict(
        DqnConfig(
            algorithm="dqn",
            replay_begin=1,
            replay_batch_size=8,
            replay_ratio=2.0,
            save_replay=saved,
            max_staleness=2,
        )
    )
    world = World(tmp_path, make_batch, **config)
    point = world.module.membership.meeting_address()
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    process = context.Process(target=dying_learner.main, args=(point, config, dies_at, ready))
    process.start()
    try:
        assert ready.wait(60)
        group = training_pb2.Group(
            module_id="default",
            generation=dying_learner.GENERATION,
            members=["learner-0", "learner-1"],
            meeting_points=[point, ""],
        )
        formed = world.driver.ask(group, training_pb2.GroupFormed())
        assert not formed.peer_lost
        for batch_id, update in ((1, 10), (2, 11)):
            world.send(batch_id, update=update, generation=dying_learner.GENERATION)
        assert not world.update(1).peer_lost
        done = world.update(2)
        assert done.peer_lost
        process.join(30)
        assert process.exitcode == -9
        assert [used.dropped for used in done.batches] == [dropped]
        world.join(dying_learner.GENERATION + 1)
        world.send(3, update=11, generation=dying_learner.GENERATION + 1)
        done = world.update(3)
        trained = [1, 2, 3] if not dropped else [1, 3]
        assert done.steps_trained == world.steps(*trained)
        assert done.steps_dropped == world.steps(1, 2, 3) - done.steps_trained
        told = world.module.learner._data.metrics()
        assert told["replay_rows"] == world.steps(*kept)
    finally:
        process.kill()
        process.join()
        world.close()
