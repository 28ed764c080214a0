"""Evaluations play checkpoints, and candidates are confirmed by them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.made_files import checkpoint
from support.workers_world import (
    ROWS,
    STEPS,
    WorkersWorld,
    World,
    answer_the_snapshot,
    begin_an_evaluation,
    play_a_round,
    requests,
    synchronous,
)

import juggler
from juggler.driver.checkpoint.snapshots import SnapshotWritten, metrics_of
from juggler.driver.reporting.episode_returns import ReturnGoals
from juggler.driver.workers.evaluations import BestCheckpoint
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.runtime.actors.hub import Worker
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.checkpoints.checkpoint import read, write
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


def play(
    world: WorkersWorld, player: Worker, returns: Sequence[float], why_fewer: str = ""
) -> None:
    """The newest evaluation is answered."""
    command_id, _ = asked(world, player)[-1]
    lengths = [7] * len(returns)
    done = training_pb2.Evaluation(
        episode_returns=returns, episode_lengths=lengths, why_fewer=why_fewer
    )
    world.reply(player, command_id, done)


def evaluate(world: WorkersWorld, player: Worker, *returns: float) -> SnapshotWritten:
    written = begin_an_evaluation(world)
    play(world, player, returns)
    return written


def test_the_best_checkpoint_is_kept_and_a_worse_one_is_not(tmp_path: Path) -> None:
    keys = {"evaluation_seconds": 1000.0, "only_local": True}
    world, heard = synchronous(tmp_path / "run", **keys), Heard()
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
    world.parts.checkpoints.done(due)
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


def test_several_evaluators_share_the_episodes_of_an_evaluation(tmp_path: Path) -> None:
    heard = Heard()
    world, players = two_evaluators(tmp_path, heard)
    begin_an_evaluation(world)
    commands = [asked(world, player)[-1][1] for player in players]
    assert [command.episodes for command in commands] == [3, 2]
    assert commands[0].seed != commands[1].seed
    play(world, players[1], [4.0, 5.0])
    world.parts.callbacks.deliver()
    assert heard.evaluations == [], "the other one still plays"
    play(world, players[0], [1.0, 2.0, 3.0])
    world.parts.callbacks.deliver()
    (evaluation,) = heard.evaluations
    assert evaluation.returns == [4.0, 5.0, 1.0, 2.0, 3.0]
    assert evaluation.interval is not None
    low, high = evaluation.interval
    assert low < evaluation.mean == 3.0 < high
    assert world.parts.metrics.evaluation_return == 3.0
    assert not world.parts.evaluations.evaluating


def test_a_video_is_asked_of_the_first_evaluator_every_so_many_evaluations(tmp_path: Path) -> None:
    world, players = two_evaluators(tmp_path, Heard(), evaluation_video=2)
    for _ in range(3):
        begin_an_evaluation(world)
        play(world, players[0], [1.0, 2.0, 3.0])
        play(world, players[1], [4.0, 5.0])
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
    play(world, player, [1.0])
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
    world.parts.checkpoints.done(refused)
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


@pytest.fixture
def of_simulators(tmp_path: Path) -> WorkersWorld:
    keys = {"evaluation_seconds": 1000.0, "gateway": "127.0.0.1:0"}
    return WorkersWorld(tmp_path / "run", only_local=True, **keys)


def test_an_evaluation_ends_with_its_gateway_or_without_simulators(
    of_simulators: WorkersWorld,
) -> None:
    for _ in range(2):
        evaluate(of_simulators, of_simulators.runner)
        assert not of_simulators.parts.evaluations.evaluating
    told = [text for text in of_simulators.told.messages if "has played no episode" in text]
    assert len(told) == 1
    begin_an_evaluation(of_simulators)
    assert of_simulators.parts.evaluations.evaluating
    of_simulators.leave(of_simulators.runner)
    assert not of_simulators.parts.evaluations.evaluating


# A run is solved when its kept weights play well enough.


GOAL = 475.0
LUCKY = [480.0] * 100


def asynchronous(directory: Path, **keys: Any) -> WorkersWorld:
    return WorkersWorld(
        directory / "checkpoints", only_local=True, stop_return=GOAL, batch_size=1000, **keys
    )


def train(world: WorkersWorld, returns: list[float] = LUCKY) -> None:
    """The newest request is answered, and episodes have ended."""
    command_id, request = requests(world)[-1]
    receipt = training_pb2.Receipt(
        batch_id=request.batch_id,
        learner="learner-0",
        live_steps=ROWS * STEPS,
        episode_returns=returns,
        episode_lengths=[10] * len(returns),
    )
    world.reply(world.runner, command_id, receipt)


def cut(world: WorkersWorld) -> SnapshotWritten:
    """The learner sends its state, which gets on the disk."""
    answer_the_snapshot(world)
    written = world.on_disk()
    world.parts.evaluations.written(written)
    world.turn()
    return written


def test_weights_that_play_as_well_as_was_asked_end_the_run_and_are_kept(tmp_path: Path) -> None:
    world = asynchronous(tmp_path)
    player = world.joined()
    train(world)
    assert world.parts.end.reason == "", "a window may be lucky"
    written = cut(world)
    assert written.path is not None
    (_, command) = asked(world, player)[-1]
    assert (command.checkpoint, command.episodes) == (str(written.path), 100)
    assert (command.goal.mean, command.goal.best, command.most_steps) == (GOAL, 480.0, 10_000)
    train(world, [100.0] * 50)  # training continues, even if it fails
    play(world, player, [500.0, 460.0] * 50)
    assert world.parts.end.reason == "solved"
    outcome = world.parts.evaluations.outcome
    assert outcome == {
        "confirmed": True,
        "return_mean": 480.0,
        "return_deviation": 20.0,
        "episodes": 100,
        "training_return_mean": 480.0,
        "env_steps_trained": 0,
        "update": 0,
        "candidates_refused": 0,
    }
    assert world.parts.evaluations.kept == written.path


def test_weights_that_play_worse_are_refused_and_training_goes_on(tmp_path: Path) -> None:
    world = asynchronous(tmp_path)
    player = world.joined()
    train(world)
    written = cut(world)
    play(world, player, [422.0] * 40)
    assert world.parts.end.reason == ""
    assert world.told.messages[-1] == (
        "not confirmed: update 0 has a return of 422.0 ± 0 in the first 40 episodes, "
        "instead of 475.0 in 100; training continues"
    )
    assert written.path is not None
    assert not written.path.parent.exists(), "nothing of it is left"
    train(world, [480.0] * 99)
    assert world.snapshots_asked() == 1, "what proposes the next one is new"
    train(world, [480.0])
    assert world.snapshots_asked() == 2
    cut(world)
    assert asked(world, player)[-1][1].episodes == 200, "to be lucky again is harder"
    play(world, player, [480.0] * 200)
    assert world.parts.end.reason == "solved"


def test_a_candidate_is_no_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    world = asynchronous(tmp_path, keep_checkpoints=1)
    world.joined()
    train(world)
    candidate = cut(world).path
    assert candidate is not None
    assert world.parts.checkpoints.newest is None
    assert not (tmp_path / "checkpoints").exists()
    world.ask_for_a_snapshot()
    newest = cut(world).path
    assert world.parts.checkpoints.newest == newest
    assert read(candidate).version == (1, 0), "checkpoints that come meanwhile leave it alone"


def test_another_evaluation_that_was_under_way_says_nothing_of_the_candidate(
    tmp_path: Path,
) -> None:
    world = asynchronous(tmp_path, evaluation_seconds=1.0, evaluation_episodes=100)
    player = world.joined()
    begin_an_evaluation(world)
    train(world)
    cut(world)
    (first, _), (second, _) = asked(world, player)
    done = training_pb2.Evaluation(episode_returns=[500.0] * 100, episode_lengths=[10] * 100)
    world.reply(player, first, done)
    assert world.parts.end.reason == ""
    assert world.parts.metrics.evaluation_return == 500.0
    world.reply(player, second, done)
    assert world.parts.end.reason == "solved"


def test_whoever_takes_the_place_of_an_evaluator_plays_the_candidate(tmp_path: Path) -> None:
    world = asynchronous(tmp_path)
    train(world)
    written = cut(world)  # before there is one at all
    for _ in range(2):
        player = world.joined()
        (_, command) = asked(world, player)[-1]
        assert command.checkpoint == str(written.path)
        world.leave(player)
    player = world.joined()
    play(world, player, [500.0] * 100)
    assert world.parts.end.reason == "solved"


def test_people_hear_of_a_candidate_that_waits_for_an_evaluator_in_vain(tmp_path: Path) -> None:
    world = asynchronous(tmp_path)
    confirmation = world.parts.evaluations
    assert confirmation.overdue() == ""
    train(world)
    cut(world)
    assert confirmation.overdue() == "", "it has not waited for long"
    assert "waits for evaluator-0" in confirmation.overdue()
    world.joined()
    assert confirmation.overdue() == ""


def test_a_candidate_whose_learner_goes_is_given_up_and_another_one_comes(tmp_path: Path) -> None:
    world = asynchronous(tmp_path)
    player = world.joined()
    train(world)
    world.leave(world.learner)
    assert not world.parts.evaluations.confirming
    world.learner = world.joined("learner")
    train(world)
    cut(world)
    play(world, player, [500.0] * 100)
    assert world.parts.end.reason == "solved"


def test_a_candidate_that_the_disk_refuses_is_given_up(tmp_path: Path) -> None:
    world = asynchronous(tmp_path)
    (tmp_path / "candidate").write_text("a file instead of the directory")
    train(world)
    assert "cannot be written" in cut(world).problem
    assert not world.parts.evaluations.confirming
    assert world.parts.metrics.candidates.refused == 0
    (tmp_path / "candidate").unlink()
    train(world)
    assert cut(world).problem == ""


def test_a_candidate_that_was_given_up_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    world = asynchronous(tmp_path)
    train(world)
    world.parts.evaluations.give_up_candidate()
    cut(world)
    assert not (tmp_path / "candidate").exists()


def test_the_next_candidate_after_a_resume_is_due_when_it_would_have_been(tmp_path: Path) -> None:
    world = asynchronous(tmp_path)
    player = world.joined()
    train(world)
    cut(world)
    play(world, player, [400.0] * 100)
    world.ask_for_a_snapshot()
    path = cut(world).path
    assert path is not None
    resumed = metrics_of(read(path))
    assert resumed.candidates == world.parts.metrics.candidates
    assert not ReturnGoals(GOAL).proposed(resumed)


@pytest.mark.parametrize(
    ("keys", "only_local", "why"),
    [
        ({"confirm": False}, True, "confirm = false"),
        ({"gateway": "127.0.0.1:0"}, True, "episodes of its simulators"),
        ({"env": "dm_env_rpc://localhost:1"}, True, "its own simulators"),
        ({}, False, "no `juggler evaluator` is attached"),
    ],
)
def test_where_nobody_can_confirm_it_the_run_is_solved_and_says_why_not(
    tmp_path: Path, keys: dict[str, Any], only_local: bool, why: str
) -> None:
    world = WorkersWorld(tmp_path, only_local=only_local, stop_return=GOAL, batch_size=1000, **keys)
    assert not world.parts.evaluations.wants_evaluators
    train(world)
    assert world.parts.end.reason == "solved"
    outcome = world.parts.evaluations.outcome
    assert outcome is not None
    assert not outcome["confirmed"]
    assert why in outcome["why_not"]
    assert world.snapshots_asked() == 0


def test_an_evaluator_that_dials_in_confirms_as_long_as_it_is_here(tmp_path: Path) -> None:
    world = WorkersWorld(tmp_path / "checkpoints", stop_return=GOAL, batch_size=1000)
    confirmation = world.parts.evaluations
    assert not confirmation.wants_evaluators, "the driver starts none"
    player = world.joined()
    train(world)
    assert world.parts.end.reason == ""
    cut(world)
    (_, command) = asked(world, player)[-1]
    assert (command.episodes, command.HasField("version")) == (100, True)
    world.leave(player)
    assert confirmation.overdue() == ""
    assert "no `juggler evaluator` is attached" in confirmation.overdue()
    assert not confirmation.confirming
    train(world)
    assert world.parts.end.reason == "solved"
    assert confirmation.outcome == {
        "confirmed": False,
        "why_not": "no `juggler evaluator` is attached",
    }


def test_a_gateway_confirms_while_it_has_simulators(tmp_path: Path) -> None:
    world = asynchronous(tmp_path, gateway="127.0.0.1:0", evaluation_seconds=1000.0)
    confirmation = world.parts.evaluations
    train(world)
    cut(world)
    assert asked(world, world.runner)
    world.leave(world.runner)
    assert confirmation.overdue() == ""
    assert "waits for a gateway with simulators" in confirmation.overdue()
    world.runner = world.joined("envrunner")
    play(world, world.runner, [], "all left")
    assert not confirmation.confirming
    train(world)
    assert world.parts.end.reason == "solved"
    assert confirmation.outcome == {"confirmed": False, "why_not": "all left"}


@pytest.mark.parametrize("simulators", [True, False])
def test_a_gateway_is_told_of_a_candidate_that_is_given_up(
    tmp_path: Path, simulators: bool
) -> None:
    keys = {"gateway": "127.0.0.1:0", "evaluation_seconds": 1000.0} if simulators else {}
    world = asynchronous(tmp_path, **keys)
    player = world.runner if simulators else world.joined()
    train(world)
    place = str(cut(world).path)
    world.parts.evaluations.give_up_candidate()
    told = [command for _, command in asked(world, player)]
    assert [(each.checkpoint, each.episodes) for each in told[1:]] == [(place, 0)] * simulators


def test_a_candidate_whose_simulators_leave_is_put_off_and_not_refused(tmp_path: Path) -> None:
    world = asynchronous(tmp_path, gateway="127.0.0.1:0", evaluation_seconds=1000.0)
    train(world)
    cut(world)
    play(world, world.runner, [500.0] * 3, "all left")
    assert world.parts.end.reason == ""
    assert not world.parts.evaluations.confirming
    assert world.parts.metrics.candidates.refused == 0
    assert any("played 3 of 100 episodes: all left" in text for text in world.told.messages)


def train_a_league(world: World, returns: list[float] = LUCKY) -> None:
    """As `train`, of all agents of a league."""
    command_id, request = requests(world)[-1]
    receipt = training_pb2.Receipt(
        module_id="main-0",
        batch_id=request.batch_id,
        learner="learner-0",
        live_steps=ROWS * STEPS,
        env_returns=returns,
        env_lengths=[10] * len(returns),
    )
    world.reply(world.runner, command_id, receipt)


def test_candidates_come_again_when_the_first_player_of_a_league_has_left(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"only_local": True, "stop_return": GOAL, "batch_size": 1000}
    world = World(tmp_path / "checkpoints", **keys)
    player = world.joined()
    train_a_league(world)
    answer_the_snapshot(world, "main-0")
    world.parts.evaluations.written(world.on_disk())
    play(world, player, [], "the league's first player has no learner")
    assert not world.parts.evaluations.confirming
    assert "played 0 of 100 episodes: the league's first player" in world.told.messages[-1]
    assert world.parts.end.reason == ""
    train_a_league(world)
    answer_the_snapshot(world, "main-0")
    world.parts.evaluations.written(world.on_disk())
    play(world, player, [500.0] * 100)
    assert world.parts.end.reason == "solved"
    outcome = world.parts.evaluations.outcome
    assert outcome is not None
    assert outcome["confirmed"]


def test_a_league_keeps_no_best_checkpoint(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"only_local": True, "stop_return": GOAL, "batch_size": 1000}
    world = World(tmp_path / "checkpoints", **keys)
    world.joined()
    train_a_league(world)
    answer_the_snapshot(world, "main-0")
    evaluations, written = world.parts.evaluations, world.on_disk()
    trained = {"update": 1, "env_steps_trained": 1}
    assert not evaluations._keep_if_best(written.path, [1.0], trained)
    assert evaluations.best.summary is None


def test_a_candidate_is_played_again_after_an_evaluation_that_failed(tmp_path: Path) -> None:
    world = asynchronous(tmp_path)
    player = world.joined()
    train(world)
    cut(world)
    world.fail(player, asked(world, player)[-1][0])
    play(world, player, [500.0] * 100)
    assert world.parts.end.reason == "solved"


@pytest.mark.parametrize("how", [asynchronous, synchronous])
def test_an_evaluator_that_stays_down_leaves_what_training_says(tmp_path: Path, how: Any) -> None:
    keys = {} if how is asynchronous else {"stop_return": GOAL, "only_local": True}
    world = how(tmp_path, **keys)
    if how is asynchronous:
        train(world)
    else:
        play_a_round(world, episode_returns=LUCKY, episode_lengths=[10] * 100)
    cut(world)
    player = world.joined()
    world.leave(player)
    world.end_process(Exited("evaluator-0", 1, "exit status 1", None))
    if how is asynchronous:
        train(world)
    assert world.parts.end.reason == "solved"
    outcome = world.parts.evaluations.outcome
    assert outcome == {"confirmed": False, "why_not": "evaluator-0 keeps ending"}


def test_a_synchronous_run_begins_no_round_before_the_verdict(tmp_path: Path) -> None:
    world = synchronous(tmp_path / "checkpoints", only_local=True, stop_return=GOAL)
    player = world.joined()
    play_a_round(world, episode_returns=LUCKY, episode_lengths=[10] * 100)
    before = len(requests(world))
    cut(world)
    assert asked(world, player)
    assert len(requests(world)) == before
    play(world, player, [400.0] * 100)
    assert len(requests(world)) == before + 2
    _, snapshot = world.asked(world.learner, training_pb2.Snapshot)[-1]
    assert not snapshot.HasField("seed"), "no learner is reset"
    assert not any(request.HasField("seed") for _, request in requests(world))
    play_a_round(world)
    cut(world)  # the checkpoint of the second update
    play_a_round(world, episode_returns=LUCKY, episode_lengths=[10] * 100)
    cut(world)
    before = len(requests(world))
    play(world, player, [500.0] * 200)
    assert world.parts.end.reason == "solved"
    assert len(requests(world)) == before


def test_what_is_kept_is_the_newest_checkpoint_of_the_run(tmp_path: Path) -> None:
    world = asynchronous(tmp_path)
    player = world.joined()
    train(world)
    cut(world)
    play(world, player, [500.0] * 100)
    kept = world.parts.evaluations.kept
    assert kept is not None
    write(tmp_path / "checkpoints", checkpoint(7))
    assert world.parts.checkpoints.keep(kept) == ""
    assert world.parts.checkpoints.newest == tmp_path / "checkpoints" / "000000000"
    assert [path.name for path in tmp_path.rglob("0*")] == ["000000000"]
    assert read(tmp_path).path == world.parts.checkpoints.newest
    assert not (tmp_path / "candidate").exists()
