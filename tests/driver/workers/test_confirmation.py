"""A run is solved when its kept weights play well enough."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.workers_world import (
    ROWS,
    STEPS,
    WorkersWorld,
    answer_the_snapshot,
    begin_an_evaluation,
    play_a_round,
    requests,
    synchronous,
)

from juggler.driver.checkpoint.snapshots import SnapshotWritten, metrics_of
from juggler.driver.reporting.episode_returns import ReturnGoals
from juggler.runtime.actors.hub import Worker
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.wire.v1 import training_pb2

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
    world.parts.confirmation.written(written)
    world.turn()
    return written


def asked(world: WorkersWorld, player: Worker) -> list[tuple[int, training_pb2.Evaluate]]:
    return world.asked(player, training_pb2.Evaluate)


def play(world: WorkersWorld, player: Worker, returns: list[float], why_fewer: str = "") -> None:
    command_id, _ = asked(world, player)[-1]
    lengths = [10] * len(returns)
    done = training_pb2.Evaluation(
        episode_returns=returns, episode_lengths=lengths, why_fewer=why_fewer
    )
    world.reply(player, command_id, done)


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
    outcome = world.parts.confirmation.outcome
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
    assert world.parts.confirmation.kept == written.path


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
    assert world.snapshots.newest is None
    assert not (tmp_path / "checkpoints").exists()
    world.ask_for_a_snapshot()
    newest = cut(world).path
    assert world.snapshots.newest == newest
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
    confirmation = world.parts.confirmation
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
    assert not world.parts.confirmation.under_way
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
    assert not world.parts.confirmation.under_way
    assert world.parts.metrics.candidates.refused == 0
    (tmp_path / "candidate").unlink()
    train(world)
    assert cut(world).problem == ""


def test_a_candidate_that_was_given_up_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    world = asynchronous(tmp_path)
    train(world)
    world.parts.confirmation.give_up()
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
    assert not world.parts.confirmation.wants_evaluator
    train(world)
    assert world.parts.end.reason == "solved"
    outcome = world.parts.confirmation.outcome
    assert outcome is not None
    assert outcome["confirmed"] is False
    assert why in outcome["why_not"]
    assert world.snapshots_asked() == 0


def test_an_evaluator_that_dials_in_confirms_as_long_as_it_is_here(tmp_path: Path) -> None:
    world = WorkersWorld(tmp_path / "checkpoints", stop_return=GOAL, batch_size=1000)
    confirmation = world.parts.confirmation
    assert not confirmation.wants_evaluator, "the driver starts none"
    player = world.joined()
    train(world)
    assert world.parts.end.reason == ""
    cut(world)
    (_, command) = asked(world, player)[-1]
    assert (command.episodes, command.HasField("version")) == (100, True)
    world.leave(player)
    assert confirmation.overdue() == ""
    assert "no `juggler evaluator` is attached" in confirmation.overdue()
    assert not confirmation.under_way
    train(world)
    assert world.parts.end.reason == "solved"
    assert confirmation.outcome == {
        "confirmed": False,
        "why_not": "no `juggler evaluator` is attached",
    }


def test_a_gateway_confirms_while_it_has_simulators(tmp_path: Path) -> None:
    world = asynchronous(tmp_path, gateway="127.0.0.1:0", evaluation_seconds=1000.0)
    confirmation = world.parts.confirmation
    train(world)
    cut(world)
    assert asked(world, world.runner)
    world.leave(world.runner)
    assert confirmation.overdue() == ""
    assert "waits for a gateway with simulators" in confirmation.overdue()
    world.runner = world.joined("envrunner")
    play(world, world.runner, [], "all left")
    assert not confirmation.under_way
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
    world.parts.confirmation.give_up()
    told = [command for _, command in asked(world, player)]
    assert [(each.checkpoint, each.episodes) for each in told[1:]] == [(place, 0)] * simulators


def test_a_candidate_whose_simulators_leave_is_put_off_and_not_refused(tmp_path: Path) -> None:
    world = asynchronous(tmp_path, gateway="127.0.0.1:0", evaluation_seconds=1000.0)
    train(world)
    cut(world)
    play(world, world.runner, [500.0] * 3, "all left")
    assert world.parts.end.reason == ""
    assert not world.parts.confirmation.under_way
    assert world.parts.metrics.candidates.refused == 0
    assert any("played 3 of 100 episodes: all left" in text for text in world.told.messages)


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
    outcome = world.parts.confirmation.outcome
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
    kept = world.parts.confirmation.kept
    assert kept is not None
    later = tmp_path / "checkpoints" / "000000007"
    shutil.copytree(kept, later)
    _rename(later, 7)
    assert world.snapshots.keep(kept) == ""
    assert world.snapshots.newest == tmp_path / "checkpoints" / "000000000"
    assert [path.name for path in tmp_path.rglob("0*")] == ["000000000"]
    assert read(tmp_path).path == world.snapshots.newest
    assert not (tmp_path / "candidate").exists()


def _rename(path: Path, update: int) -> None:
    """Have a checkpoint be of another update."""
    from juggler.runtime.checkpoints.checkpoint import METADATA_FILE, digest

    record = json.loads((path / METADATA_FILE).read_text())
    del record["sha256"]
    record["version"][1] = update
    (path / METADATA_FILE).write_text(json.dumps({**record, "sha256": digest(record)}))
