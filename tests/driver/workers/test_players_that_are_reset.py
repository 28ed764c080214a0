"""Players that begin anew: who plays their next matches, and what is left if learners die."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.league_run_world import Asked, Changing

from juggler.driver.league.events import AddPlayer, FreezePlayer, ResetPlayer
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.wire.v1 import training_pb2


@pytest.fixture
def world(tmp_path: Path) -> Changing:
    Asked.wanted.clear()
    return Changing(tmp_path)


def next_learner(world: Changing) -> Worker:
    """The one that takes the place of a learner that has died."""
    world.leave(world.learner)
    world.learner = world.join("learner")
    return world.learner


def test_a_player_that_was_reset_plays_again_once_envrunners_get_its_new_weights(
    world: Changing,
) -> None:
    before = world.core.weights_version
    world.want(ResetPlayer("main-0"))
    assert world.told_in_order(world.learner) == ["Group", "Reset", "Group"]
    assert not world.plays("main-0"), "EnvRunners would play with its old weights"
    world.meet()
    assert world.plays("main-0")
    assert world.core.weights_version.generation == before.generation + 1
    world.play()
    world.train()
    _, request = world.requests()[-1]
    assert request.at_least.generation == before.generation + 1


def test_a_player_that_was_reset_does_not_play_because_others_have_come(world: Changing) -> None:
    world.want(AddPlayer("new", "main"), ResetPlayer("main-0"))
    world.get_ready(world.learner)
    world.meet("new")
    world.take_parts()
    assert world.plays("new")
    assert not world.plays("main-0")


def test_the_next_learner_resets_a_player_again_that_was_reset_behind_the_checkpoint(
    world: Changing,
) -> None:
    world.checkpoint()
    world.want(ResetPlayer("main-0"))
    world.meet()
    ((_, reset),) = world.asked(world.learner, training_pb2.Reset)

    learner = next_learner(world)
    world.get_ready(learner)
    assert world.told_in_order(learner) == ["Restore", "Reset", "Group"]
    ((_, again),) = world.asked(learner, training_pb2.Reset)
    assert again == reset, "it begins anew with the same weights"
    assert not world.plays("main-0")
    world.meet()
    assert world.plays("main-0")
    lost = "the learners' weights of module main-0 are lost: learner-0 goes on from "
    assert not any(text.startswith(lost + "update") for text in world.told.messages)

    world.checkpoint()
    learner = next_learner(world)
    world.get_ready(learner)
    assert world.told_in_order(learner) == ["Restore", "Group"], "the checkpoint is of its new life"


@pytest.mark.parametrize("has_met", [False, True])
def test_a_learner_that_kept_its_weights_while_it_was_lost_is_not_reset_again(
    world: Changing, has_met: bool
) -> None:
    world.want(ResetPlayer("main-0"))
    if has_met:
        world.meet()
    generation = world.core.generation
    learner = next_learner(world)
    ((command_id, module),) = world.asked(learner, training_pb2.AddModule)
    assert module.oldest_handover.generation == generation, "others are from before the reset"
    ready = training_pb2.ModuleReady(module_id="main-0")
    ready.handed_over.generation = generation
    world.reply(learner, command_id, ready)
    assert world.told_in_order(learner) == ["Group"]


def test_there_is_no_copy_of_a_life_whose_last_learner_died_before_it_had_sent_it(
    world: Changing,
) -> None:
    world.want(FreezePlayer("main-0"), ResetPlayer("main-0"))
    assert len(world.copies_asked_for()) == 1
    world.get_ready(next_learner(world))
    world.meet()
    assert world.copies_asked_for() == [], "it would be a copy of the new life"
    why = "league: there is no copy main-0-v0: its learner sent no weights, and others have begun"
    assert any(text.startswith(why) for text in world.told.messages)
    assert world.plays("main-0")
