"""What a league that goes on from a checkpoint makes of what was under way there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.league_run_world import Asked, Changing, resumed

from juggler.driver.checkpoint.frozen_modules import kept_modules
from juggler.driver.core.events import BeginWithFewer
from juggler.driver.league.events import AddPlayer, FreezePlayer, ResetPlayer
from juggler.driver.league_players import copies_of
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.wire.v1 import training_pb2


class _SecondIsLate(Changing):
    """The group forms without the second learner, which is not ready yet."""

    def get_ready(self, worker: Worker, *module_ids: str) -> None:
        if worker.role != "learner":
            super().get_ready(worker, *module_ids)
        elif worker.index == 0:
            ((command_id, _),) = self.asked(worker, training_pb2.AddModule)
            ready = training_pb2.ModuleReady(module_id="main-0", meeting_point="host:1")
            self.reply(worker, command_id, ready)
            self.parts.happened(BeginWithFewer("main-0"))
            self.turn()


@pytest.fixture
def world(tmp_path: Path) -> Changing:
    Asked.wanted.clear()
    return Changing(tmp_path)


def test_a_copy_that_not_every_envrunner_had_at_the_checkpoint_plays_when_the_run_goes_on(
    world: Changing, tmp_path: Path
) -> None:
    world.want(FreezePlayer("main-0"))
    world.send_weights(world.copies_asked_for()[-1])
    assert not world.plays("main-0-v0"), "it is on its way to the EnvRunner"
    saved = world.checkpoint()

    lost: list[str] = []
    frozen = kept_modules(tmp_path, copies_of(saved.counters), lost.append)
    again = resumed(tmp_path / "again", saved, frozen=frozen)
    assert not lost
    assert again.plays("main-0-v0")


def test_a_reset_that_came_between_the_cuts_of_a_checkpoint_is_repeated_when_the_run_goes_on(
    world: Changing, tmp_path: Path
) -> None:
    saved = world.checkpoint(lambda: world.want(ResetPlayer("main-0")))
    ((_, reset),) = world.asked(world.learner, training_pb2.Reset)
    assert saved.counters["league"]["players"][0]["life"] == 1
    assert saved.version_of("main-0")[0] < world.core.generation, "its weights are of before"

    again = resumed(tmp_path / "again", saved)
    assert again.told_in_order(again.learner) == ["Restore", "Reset", "Group"]
    ((_, repeated),) = again.asked(again.learner, training_pb2.Reset)
    assert repeated == reset, "it begins anew with the same weights"
    assert again.plays("main-0")
    assert not any("are lost" in text for text in again.told.messages)

    later = resumed(tmp_path / "later", again.checkpoint())
    assert later.told_in_order(later.learner) == ["Restore", "Group"], "it is of the new life"


def test_a_reset_of_a_player_whose_state_was_cut_before_that_of_another_is_repeated(
    world: Changing, tmp_path: Path
) -> None:
    world.want(AddPlayer("hunter", "main_exploiter"))
    world.has_been_added("hunter")
    world.league.trained("hunter", 1)
    saved = world.checkpoint(lambda: world.want(ResetPlayer("hunter")))
    again = resumed(tmp_path / "again", saved)
    assert again.told_to(again.learner, training_pb2.Reset) == ["hunter"]
    assert not again.plays("hunter"), "EnvRunners could have its old weights"
    again.meet("hunter")
    assert again.plays("hunter")


def test_a_learner_that_gets_ready_behind_the_first_one_repeats_the_reset_too(
    world: Changing, tmp_path: Path
) -> None:
    saved = world.checkpoint(lambda: world.want(ResetPlayer("main-0")))
    again = resumed(tmp_path / "again", saved, kind=_SecondIsLate, num_learners=2)
    _, late = again.learners
    ((command_id, _),) = again.asked(late, training_pb2.AddModule)
    ready = training_pb2.ModuleReady(module_id="main-0", meeting_point="host:2")
    again.reply(late, command_id, ready)
    assert again.told_in_order(late)[:2] == ["Restore", "Reset"], (
        "it has as many updates, so the group could begin with its weights"
    )


def test_a_reset_to_a_copy_is_repeated_with_the_weights_of_that_copy(
    world: Changing, tmp_path: Path
) -> None:
    world.want(FreezePlayer("main-0"))
    world.send_weights(world.copies_asked_for()[-1])
    world.take_parts()
    saved = world.checkpoint(lambda: world.want(ResetPlayer("main-0", "main-0-v0")))
    begun = world.restored(world.learner)

    lost: list[str] = []
    frozen = kept_modules(tmp_path, copies_of(saved.counters), lost.append)
    again = resumed(tmp_path / "again", saved, frozen=frozen)
    assert again.told_in_order(again.learner) == ["Restore", "Reset", "Restore", "Group"]
    assert again.restored(again.learner)[-1] == begun[-1]

    assert saved.path is not None
    without = resumed(tmp_path / "without", read(saved.path))
    assert without.told_in_order(without.learner) == ["Restore", "Reset", "Group"]
    why = "since the weights of main-0-v0 are lost"
    assert f"league: main-0 is reset to what it began with, {why}" in without.told.messages


def test_a_reset_that_came_before_the_cut_of_a_checkpoint_is_not_repeated(
    world: Changing, tmp_path: Path
) -> None:
    world.want(ResetPlayer("main-0"))
    world.meet()
    again = resumed(tmp_path / "again", world.checkpoint())
    assert again.told_in_order(again.learner) == ["Restore", "Group"]
