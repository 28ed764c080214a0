"""What a learner says of its replay in each answer to an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from support.worker_world import BEGIN, World

from juggler.learner.algorithms.dqn.config import DqnConfig
from juggler.runtime.episodes.batch import EpisodeBatch


def test_every_answer_says_what_became_of_all_steps_that_are_trained(
    tmp_path: Path, make_batch: Callable[..., EpisodeBatch]
) -> None:
    config = DqnConfig(
        algorithm="dqn",
        replay_begin=60,
        replay_capacity=100,
        replay_batch_size=8,
        replay_ratio=1.0,
        max_staleness=100,
    )
    world = World(tmp_path, make_batch, **asdict(config))
    try:
        for batch_id in range(1, 9):
            world.send(batch_id, update=BEGIN.update)
            done = world.update(batch_id)
            told = done.replay
            rows = [told[f"replay_rows_{what}"] for what in ("drawn", "waiting", "unused")]
            assert sum(rows) == done.steps_trained == world.steps(*range(1, batch_id + 1))
            assert told["replay_rows"] == min(100, done.steps_trained)
            missing = max(0, 60 - done.steps_trained)
            assert told["replay_steps_missing"] == missing
            assert done.seconds["waiting"] > 0
            if missing:
                assert not done.metrics, "there is nothing to learn from"
                assert rows == [0, done.steps_trained, 0]
        assert rows[0] > 0
        assert rows[2] > 0
    finally:
        world.close()


def test_a_learner_without_a_replay_has_nothing_to_say_of_one(
    tmp_path: Path, make_batch: Callable[..., EpisodeBatch]
) -> None:
    world = World(tmp_path, make_batch)
    try:
        world.send(1, update=BEGIN.update)
        assert not world.update(1).replay
    finally:
        world.close()
