"""Evaluations play checkpoints, and the best of these is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.workers_world import (
    WorkersWorld,
    answer_the_snapshot,
    begin_an_evaluation,
    play_a_round,
)
from support.workers_world import synchronous as synchronous_world

import juggler
from juggler.driver.checkpoint.snapshots import SnapshotWritten
from juggler.driver.workers.evaluations import BestCheckpoint
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.runtime.actors.hub import Worker
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


class Heard(juggler.Callback):
    def __init__(self) -> None:
        self.evaluations: list[juggler.Evaluation] = []

    def on_evaluation(self, run: juggler.Run, evaluation: juggler.Evaluation) -> None:
        self.evaluations.append(evaluation)


@pytest.fixture
def world(tmp_path: Path) -> WorkersWorld:
    return WorkersWorld(tmp_path / "run", only_local=True, evaluation_seconds=1000.0)


def asked(world: WorkersWorld, player: Worker) -> list[tuple[int, training_pb2.Evaluate]]:
    return world.asked(player, training_pb2.Evaluate)


def evaluate(world: WorkersWorld, player: Worker, *returns: float) -> SnapshotWritten:
    written = begin_an_evaluation(world)
    command_id, _ = asked(world, player)[-1]
    done = training_pb2.Evaluation(episode_returns=returns, episode_lengths=[7] * len(returns))
    world.reply(player, command_id, done)
    return written


def test_the_best_checkpoint_is_kept_and_a_worse_one_is_not(tmp_path: Path) -> None:
    keys = {"evaluation_seconds": 1000.0, "only_local": True}
    world, heard = synchronous_world(tmp_path / "run", **keys), Heard()
    world.parts.callbacks.callbacks = [heard]
    player, best = world.joined(), world.parts.evaluations.best
    evaluate(world, player, 1.0, 3.0)
    assert best.summary is not None
    assert best.summary["update"] == 0
    play_a_round(world)
    evaluate(world, player, 5.0, 6.0)
    kept = tmp_path / "run/best/000000001"
    expected = {
        "return_mean": 5.5,
        "return_deviation": 0.5,
        "episodes": 2,
        "update": 1,
        "env_steps_trained": 40,
    }
    assert best.summary == {"checkpoint": str(kept), **expected}
    assert json.loads((kept / "evaluation.json").read_text()) == expected
    assert read(kept.parent).version == (1, 1)
    assert [path.name for path in kept.parent.iterdir()] == [kept.name], "the other one is gone"
    play_a_round(world)
    answer_the_snapshot(world)  # the checkpoint that was due
    (due,) = world.written.gather(timeout=30)
    world.snapshots.done(due)
    evaluate(world, player, 5.5)
    assert best.summary["update"] == 1, "it is not better"
    assert not (tmp_path / "evaluated").exists()
    world.parts.callbacks.deliver()
    assert [(each.mean, each.is_best, each.update) for each in heard.evaluations] == [
        (2.0, True, 0),
        (5.5, True, 1),
        (5.5, False, 2),
    ]
    assert BestCheckpoint(tmp_path / "run").summary == best.summary, "a resumed run knows it"


def test_an_evaluation_waits_for_a_learner(world: WorkersWorld) -> None:
    player = world.joined()
    evaluations = world.parts.evaluations
    world.leave(world.learner)
    for _ in range(4):
        evaluations.want()
        evaluations.begin()
    assert world.snapshots_asked() == 0
    world.learner = world.joined("learner")
    evaluations.begin()
    evaluate(world, player, 1.0)
    assert evaluations.best.summary is not None, "the one that waited"


def two_evaluators(tmp_path: Path, heard: Heard, **keys: Any) -> tuple[WorkersWorld, list[Worker]]:
    keys = {"evaluation_seconds": 1000.0, "evaluation_episodes": 5, "num_evaluators": 2, **keys}
    world = WorkersWorld(tmp_path / "run", only_local=True, **keys)
    world.parts.callbacks.callbacks = (heard,)
    players = [world.join("evaluator", index) for index in range(2)]
    for player in players:
        world.get_ready(player)
    return world, players


def answer(world: WorkersWorld, player: Worker, *returns: float) -> None:
    command_id, _ = asked(world, player)[-1]
    done = training_pb2.Evaluation(episode_returns=returns, episode_lengths=[7] * len(returns))
    world.reply(player, command_id, done)


def test_several_evaluators_share_the_episodes_of_an_evaluation(tmp_path: Path) -> None:
    heard = Heard()
    world, players = two_evaluators(tmp_path, heard)
    begin_an_evaluation(world)
    commands = [asked(world, player)[-1][1] for player in players]
    assert [command.episodes for command in commands] == [3, 2]
    assert commands[0].seed != commands[1].seed
    answer(world, players[1], 4.0, 5.0)
    world.parts.callbacks.deliver()
    assert heard.evaluations == [], "the other one still plays"
    answer(world, players[0], 1.0, 2.0, 3.0)
    world.parts.callbacks.deliver()
    (evaluation,) = heard.evaluations
    assert evaluation.returns == [4.0, 5.0, 1.0, 2.0, 3.0]
    assert evaluation.interval is not None
    low, high = evaluation.interval
    assert low < evaluation.mean == 3.0 < high
    assert world.parts.metrics.evaluation_return == 3.0
    assert not world.parts.evaluations.under_way


def test_a_video_is_asked_of_the_first_evaluator_every_so_many_evaluations(tmp_path: Path) -> None:
    world, players = two_evaluators(tmp_path, Heard(), evaluation_video=2)
    for _ in range(3):
        begin_an_evaluation(world)
        answer(world, players[0], 1.0, 2.0, 3.0)
        answer(world, players[1], 4.0, 5.0)
    videos = [command.video for _, command in asked(world, players[0])]
    assert [Path(video).parent for video in videos if video] == [tmp_path / "videos"] * 2
    assert videos[1] == ""
    assert not any(command.video for _, command in asked(world, players[1]))


def test_evaluators_that_dial_in_are_sent_the_checkpoint_and_the_best_is_kept(
    tmp_path: Path,
) -> None:
    heard = Heard()
    world = WorkersWorld(tmp_path / "run", evaluation_seconds=1000.0)
    world.parts.callbacks.callbacks = (heard,)
    evaluations = world.parts.evaluations
    for _ in range(2):
        evaluations.want()
        evaluations.begin()
    told = [each for each in world.told.messages if "evaluator` is attached: start one" in each]
    assert len(told) == 1
    player = world.joined()
    state = {"default": {"parameters": {"w": np.arange(3.0)}, "buffers": {}}, "optimizer": {}}
    written = begin_an_evaluation(world, state=state)
    assert written.path is not None
    assert asked(world, player) == [], "what it plays with comes first"
    parts = FrozenWeights()
    for command_id, part in world.asked(player, training_pb2.Restore):
        parts.add(part)
        world.reply(player, command_id, attach_pb2.Done())
    trees: Any = parts.pop_checkpoint()
    assert list(trees) == ["default"]
    assert list(trees["default"]["weights"]["w"]) == [0.0, 1.0, 2.0]
    ((_, command),) = asked(world, player)
    assert (command.version.generation, command.version.update) == (1, 0)
    answer(world, player, 1.0)
    world.parts.callbacks.deliver()
    (evaluation,) = heard.evaluations
    assert (evaluation.returns, evaluation.is_best) == ([1.0], True)
    assert world.parts.evaluations.best.summary is not None
    assert not written.path.parent.exists()


def test_a_state_that_the_disk_refuses_is_not_tried_again_at_once(world: WorkersWorld) -> None:
    world.joined()
    world.parts.evaluations.want()
    world.parts.evaluations.begin()
    answer_the_snapshot(world)
    world.written.gather(timeout=30)
    refused = SnapshotWritten(None, "no space", "evaluated")
    world.snapshots.done(refused)
    world.parts.evaluations.written(refused)
    world.parts.evaluations.begin()
    assert world.snapshots_asked() == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"return_mean": "x"}'])
def test_a_best_checkpoint_that_nobody_knows_of_how_it_played_is_none(
    tmp_path: Path, content: bytes
) -> None:
    place = tmp_path / "best/000000001"
    place.mkdir(parents=True)
    (place / "evaluation.json").write_bytes(content)
    assert BestCheckpoint(tmp_path).summary is None


def test_a_result_tells_the_best_checkpoint() -> None:
    best: dict[str, Any] = {
        "checkpoint": "runs/one/best/000000007",
        "return_mean": 480.25,
        "return_deviation": 3.0,
        "episodes": 10,
    }
    summary = {"solved": False, "wall_time": 1.0, "best": best}
    result = juggler.Result(summary, Path("runs/one"), None)
    assert result.best == Path("runs/one/best/000000007")
    shown = "best       runs/one/best/000000007, with 480.2 ± 3 in 10 episodes"
    assert str(result).splitlines()[-1] == shown


@pytest.fixture
def of_simulators(tmp_path: Path) -> WorkersWorld:
    keys = {"evaluation_seconds": 1000.0, "gateway": "127.0.0.1:0"}
    return WorkersWorld(tmp_path / "run", only_local=True, **keys)


def test_an_evaluation_ends_with_its_gateway_or_without_simulators(
    of_simulators: WorkersWorld,
) -> None:
    for _ in range(2):
        evaluate(of_simulators, of_simulators.runner)
        assert not of_simulators.parts.evaluations.under_way
    told = [text for text in of_simulators.told.messages if "has played no episode" in text]
    assert len(told) == 1
    begin_an_evaluation(of_simulators)
    assert of_simulators.parts.evaluations.under_way
    of_simulators.leave(of_simulators.runner)
    assert not of_simulators.parts.evaluations.under_way
