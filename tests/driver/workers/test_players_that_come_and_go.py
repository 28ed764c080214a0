"""Players that come, go, are reset, and continue in a resumed run."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from google.protobuf import any_pb2
from support.workers_world import Asked, Changing, resumed

from juggler.driver.agent_tables import copies_of
from juggler.driver.checkpoint.first_weights import kept_modules
from juggler.driver.league.roster import AddPlayer, FreezePlayer, ResetPlayer, RetirePlayer
from juggler.driver.workers import league_run
from juggler.runtime.actors.hub import Worker
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import training_pb2


@pytest.fixture
def world(tmp_path: Path) -> Changing:
    Asked.wanted.clear()
    return Changing(tmp_path)


def test_a_player_plays_once_it_has_a_learner_and_every_envrunner_has_it(world: Changing) -> None:
    world.want(AddPlayer("new", "exploiter"))
    assert list(world.modules_asked_for()) == ["main-0", "new"]
    assert world.told_to(world.runner, training_pb2.AddPlayer) == ["new"]
    world.play()
    assert {each.module_id for _, each in world.requests()} == {"main-0"}, "no request waits for it"
    world.get_ready(world.learner)
    world.meet("new")
    assert not world.plays("new"), "the EnvRunner does not have it"
    world.take_parts()
    assert world.plays("new")
    assert "new" in world.told_to(world.runner, training_pb2.Learners)
    world.play()
    world.train()
    assert {each.module_id for _, each in world.requests()} == {"main-0", "new"}
    counters = world.parts.core.modules["new"].ledger.counters()
    assert counters.trained == 0 < world.parts.core.trained
    assert world.parts.registry.spaces["new"] == world.parts.registry.spaces["main-0"]


def test_a_player_begins_with_what_another_one_has_at_that_moment(world: Changing) -> None:
    world.want(AddPlayer("new", "main", source="main-0"))
    assert list(world.modules_asked_for()) == ["main-0"], "its weights are not here yet"
    (asked,) = world.copies_asked_for()
    world.send_weights(asked)
    assert list(world.modules_asked_for()) == ["main-0", "new"]
    restored = [each for _, each in world.asked(world.learner, training_pb2.Restore)]
    assert {each.module_id for each in restored} == {"new"}
    assert restored[-1].weights
    assert restored[-1].whole
    assert any(
        "new is new, and learns from the weights of main-0" in t for t in world.told.messages
    )


def test_players_that_come_and_go_in_a_cycle_leave_nothing_but_their_books(world: Changing) -> None:
    trained = 0
    for number in range(3):
        player = f"new-{number}"
        world.want(AddPlayer(player, "main"))
        world.has_been_added(player)
        for _ in range(4):
            world.play()
            world.train()
        trained = world.parts.core.trained
        assert world.parts.core.modules[player].ledger.trained
        updates = world.parts.core.updates
        world.want(RetirePlayer(player))
        assert player in world.parts.core.modules, "requests are under way"
        for _ in range(4):
            world.play()
            world.train()
        assert world.parts.core.updates >= updates
        assert world.told_to(world.learner, training_pb2.RemoveModule)[-1] == player
        assert world.told_to(world.runner, training_pb2.RemovePlayer)[-1] == player
        late = training_pb2.Arrivals(module_id=player)
        late.arrivals.add(batch_id=1, live_steps=1)
        world.report(world.learner, late)
    parts = world.parts
    for table in (parts.core.modules, parts.learners, parts.connectors, parts.registry.trained):
        assert list(table) == ["main-0"]
    assert parts.core.trained >= trained > parts.core.modules["main-0"].ledger.trained
    parts.core.counters().check()
    assert not world.why_dismissed(world.learner)
    saved = world.checkpoint()
    assert saved.module_ids == ("main-0",)
    assert saved.counters["past"]["trained"] == parts.core.past.counters.trained
    assert saved.version == parts.core.weights_version


def test_a_run_that_goes_on_has_the_players_that_were_added(
    world: Changing, tmp_path: Path
) -> None:
    world.want(AddPlayer("new", "main"), AddPlayer("gone", "main"))
    for player in ("new", "gone"):
        world.has_been_added(player)
    for _ in range(4):
        world.play()
        world.train()
    before = world.parts.core.modules["new"].ledger.trained
    together = world.parts.core.trained
    assert before > 0
    world.want(RetirePlayer("gone"))
    saved = world.checkpoint()
    assert saved.modules["new"]["settings_of"] == "main-0"
    assert "new" not in saved.config["agents"]["row"], "it describes the run as it was begun"

    again = resumed(tmp_path / "again", saved)
    core = again.parts.core
    assert set(core.modules) == {"main-0", "new"}
    assert core.modules["new"].ledger.trained == before
    assert core.trained == together, "what the other one did is counted"
    assert core.weights_version >= saved.version
    core.counters().check()
    assert set(again.modules_asked_for()) == {"main-0", "new"}
    assert "new" in again.told_to(again.learner, training_pb2.Restore)
    again.meet("new")
    assert again.plays("new")


def test_what_a_player_did_that_leaves_during_a_checkpoint_is_counted_once(
    world: Changing, tmp_path: Path
) -> None:
    world.want(AddPlayer("gone", "main"))
    world.has_been_added("gone")
    for _ in range(4):
        world.play()
        world.train()
    world.play()
    together = world.parts.core.trained

    def leaves() -> None:
        world.want(RetirePlayer("gone"))
        for _ in range(4):
            world.play()
            world.train()

    saved = world.checkpoint(leaves)
    assert saved.module_ids == ("main-0", "gone")
    assert together <= saved.counters["trained"] <= world.parts.core.trained
    again = resumed(tmp_path / "again", saved)
    assert list(again.parts.core.modules) == ["main-0"]
    assert again.parts.core.trained == saved.counters["trained"]
    assert again.parts.core.weights_version >= saved.version
    again.parts.core.counters().check()
    world.turn()
    assert list(world.parts.core.modules) == ["main-0"]


def test_a_player_that_was_added_just_before_a_checkpoint_begins_again(
    world: Changing, tmp_path: Path
) -> None:
    world.want(AddPlayer("new", "main", source="main-0"))
    saved = world.checkpoint()
    assert saved.module_ids == ("main-0",)
    again = resumed(tmp_path / "again", saved)
    first = again.parts.learners["new"].first
    assert first is not None
    assert first.text == "the weights of main-0"
    restored = [each for _, each in again.asked(again.learner, training_pb2.Restore)]
    assert [each.weights for each in restored if each.module_id == "new"][-1]
    again.meet("new")
    assert again.plays("new")


def test_a_player_whose_source_left_before_it_had_a_learner_begins_again_with_its_weights(
    world: Changing, tmp_path: Path
) -> None:
    world.want(AddPlayer("old", "main"))
    world.has_been_added("old")
    world.want(AddPlayer("heir", "main", source="old"), RetirePlayer("old"))
    world.send_weights(world.copies_asked_for()[-1], "old")
    for _ in range(4):
        world.play()
        world.train()
    saved = world.checkpoint()
    assert saved.module_ids == ("main-0", "old"), "the heir has had no learner yet"

    again = resumed(tmp_path / "again", saved)
    assert set(again.parts.core.modules) == {"main-0", "heir"}
    first = again.parts.learners["heir"].first
    assert first is not None
    assert first.text == "the weights of old"
    again.parts.core.counters().check()

    world.has_been_added("heir")
    for _ in range(4):
        world.play()
        world.train()
    assert world.checkpoint().module_ids == ("main-0", "heir"), "the other one is no longer needed"
    assert "old" not in world.parts.core.modules


def test_a_player_whose_source_is_lost_is_told_to_begin_with_new_weights(
    world: Changing, tmp_path: Path
) -> None:
    world.want(FreezePlayer("main-0"))
    world.send_weights(world.copies_asked_for()[-1])
    world.take_parts()
    world.want(AddPlayer("heir", "main", source="main-0-v0"))
    saved = world.checkpoint()
    again = resumed(tmp_path / "again", saved)  # without the directory of the copy
    (told,) = [text for text in again.told.messages if "heir" in text]
    assert told.startswith(
        "league: heir starts again with new weights, since the weights of main-0-v0"
    )


def test_a_player_that_cannot_learn_is_told_and_the_league_goes_on(world: Changing) -> None:
    world.want(AddPlayer("lost", "main", source="main-0"))
    (asked,) = world.copies_asked_for()
    header = training_pb2.StateHeader(module_id="main-0", extra="{}")
    (chunk,) = encode_frame(header, {"other": np.ones(3)}, digest=True)
    world.reply(world.learner, asked, any_pb2.Any(value=chunk))
    assert any("league: lost cannot learn" in text for text in world.told.messages)
    assert world.league.league.roster.players["lost"].retired


def test_people_are_told_once_which_call_of_a_builder_is_slow(
    world: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=7.0)
    monkeypatch.setattr(league_run, "time", SimpleNamespace(monotonic=clock.__next__))
    for index in (1, 2):
        world.league.matches.line_ups(world.join("envrunner", index), 1)
    (told,) = [text for text in world.told.messages if " took " in text]
    assert told.startswith("league: Asked.match took 7.0 s, in which the driver could do nothing")


# Players that are reset: their next opponents, and their state if learners die.


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
    world.meet("main-0")
    assert world.plays("main-0")
    assert world.core.weights_version.generation == before.generation + 1
    world.play()
    world.train()
    _, request = world.requests()[-1]
    assert request.at_least.generation == before.generation + 1


def test_the_next_learner_resets_a_player_again_that_was_reset_behind_the_checkpoint(
    world: Changing,
) -> None:
    world.checkpoint()
    world.want(ResetPlayer("main-0"))
    world.meet("main-0")
    ((_, reset),) = world.asked(world.learner, training_pb2.Reset)

    learner = next_learner(world)
    world.get_ready(learner)
    assert world.told_in_order(learner) == ["Restore", "Reset", "Group"]
    ((_, again),) = world.asked(learner, training_pb2.Reset)
    assert again == reset, "it is reset to the same weights"
    assert not world.plays("main-0")
    world.meet("main-0")
    assert world.plays("main-0")
    lost = "the learners' weights of module main-0 are lost: learner-0 continues from "
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
        world.meet("main-0")
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
    world.meet("main-0")
    assert world.copies_asked_for() == [], "it would be a copy of the new life"
    why = "league: there is no copy main-0-v0: its learner sent no weights, and other learners have"
    assert any(text.startswith(why) for text in world.told.messages)
    assert world.plays("main-0")


# What a league that goes on from a checkpoint makes of what was under way there.


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
    assert repeated == reset, "it is reset to the same weights"
    assert again.plays("main-0")
    assert not any("are lost" in text for text in again.told.messages)

    later = resumed(tmp_path / "later", again.checkpoint())
    assert later.told_in_order(later.learner) == ["Restore", "Group"], "it is of the new life"


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
    assert f"league: main-0 is reset to its first weights, {why}" in without.told.messages
