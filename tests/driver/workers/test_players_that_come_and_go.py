"""Players that learn, and are added to a league and let go of while its run goes on."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import any_pb2
from support.league_run_world import Asked, Changing, resumed

from juggler.driver.league.events import AddPlayer, FreezePlayer, RetirePlayer
from juggler.driver.upkeep import metrics_line
from juggler.driver.workers import league_run
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


@pytest.fixture
def world(tmp_path: Path) -> Changing:
    Asked.wanted.clear()
    return Changing(tmp_path)


def test_a_player_plays_once_it_has_a_learner_and_every_envrunner_has_it(world: Changing) -> None:
    world.want(AddPlayer("new", "exploiter"))
    assert list(world.modules_asked_for()) == ["main-0", "new"]
    assert world.told_to(world.runner, training_pb2.AddPlayer) == ["new"]
    world.play()
    assert {each.module_id for _, each in world.requests()} == {"main-0"}, "nobody waits for it"
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


def test_nobody_waits_for_an_evaluator_to_have_a_player(world: Changing) -> None:
    world.join("evaluator")
    world.want(AddPlayer("new", "exploiter"), FreezePlayer("main-0"))
    world.has_been_added("new")
    assert world.plays("new")
    world.send_weights(world.copies_asked_for()[-1])
    world.take_parts()
    assert world.plays("main-0-v0")


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


def test_a_player_begins_with_a_copy(world: Changing) -> None:
    world.want(FreezePlayer("main-0"))
    (asked,) = world.copies_asked_for()
    world.send_weights(asked)
    world.take_parts()
    world.want(AddPlayer("new", "main", source="main-0-v0"))
    assert world.copies_asked_for() == [asked], "no learner has to send anything"
    assert set(world.told_to(world.learner, training_pb2.Restore)) == {"new"}


def test_the_next_learner_is_told_the_same_if_one_dies_with_a_player_on_its_way(
    world: Changing,
) -> None:
    world.want(AddPlayer("new", "main"), AddPlayer("second", "main", source="main-0"))
    before = world.modules_asked_for()["new"]
    world.leave(world.learner)
    world.learner = world.join("learner")
    now = world.modules_asked_for()
    assert list(now) == ["main-0", "new"]
    assert now["new"].seed == before.seed, "it is the same player"
    world.get_ready(world.learner)
    world.meet()
    world.send_weights(world.copies_asked_for()[-1])
    for player in ("new", "second"):
        world.has_been_added(player)
        assert world.plays(player)


def test_an_envrunner_that_comes_at_that_moment_has_a_player_by_its_setup_or_behind_it(
    world: Changing,
) -> None:
    early = world.join("envrunner", 1)
    world.want(AddPlayer("new", "main"))
    late = world.join("envrunner", 2)
    (_, setup) = world.asked(late, training_pb2.Setup)[0]
    assert list(json.loads(setup.config)["modules"]) == ["main-0", "new"]
    assert not world.asked(early, training_pb2.AddPlayer), "it comes behind its setup"
    world.has_been_added("new")
    assert not world.plays("new")
    world.get_ready(early, "main-0")
    world.take_parts(early)
    assert world.plays("new")
    world.get_ready(late)
    for worker in (early, late):
        assert "new" in world.told_to(worker, training_pb2.Learners)
    assert not world.why_dismissed(world.runner)


def test_players_that_come_and_go_in_a_cycle_leave_nothing_but_their_books(
    world: Changing,
) -> None:
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


def test_lines_of_metrics_tell_no_more_of_players_that_have_gone(world: Changing) -> None:
    metrics = world.parts.metrics
    world.want(AddPlayer("new", "main"))
    world.has_been_added("new")
    for player in ("main-0", "new"):
        metrics.updated("learner-0", player, {player: {"loss": 0.5}})
        metrics.replayed("learner-0", player, {"replay_rows": 7.0})
        metrics.agents_ended(player, [1.0], [10])
    assert set(metrics_line(world.parts)["modules"]) == {"main-0", "new"}
    world.want(RetirePlayer("new"))
    for _ in range(4):
        world.play()
        world.train()
    metrics.played("copy-1", 3)  # what is late of a copy that has left
    assert list(metrics_line(world.parts)["modules"]) == list(metrics.by_module) == ["main-0"]


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


def test_a_player_is_not_forgotten_before_its_last_receipt_is_here(world: Changing) -> None:
    world.want(AddPlayer("new", "main"))
    world.has_been_added("new")
    for _ in range(2):
        world.play()
        world.train()
    world.want(RetirePlayer("new"))
    for _, request in world.requests():
        came = training_pb2.Arrivals(module_id=request.module_id)
        came.arrivals.add(batch_id=request.batch_id, live_steps=20)
        world.report(world.learner, came)
    world.train()
    assert not world.parts.core.modules["new"].ledger.requested, "its learner was faster"
    assert "new" in world.parts.core.modules
    world.play()
    assert "new" not in world.parts.core.modules
    assert not world.why_dismissed(world.runner)


def test_a_player_that_was_added_just_before_a_checkpoint_begins_again(
    world: Changing, tmp_path: Path
) -> None:
    world.want(AddPlayer("new", "main", source="main-0"))
    saved = world.checkpoint()
    assert saved.module_ids == ("main-0",)
    again = resumed(tmp_path / "again", saved)
    beginning = again.parts.learners["new"].beginning
    assert beginning is not None
    assert beginning.text == "the weights of main-0"
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
    beginning = again.parts.learners["heir"].beginning
    assert beginning is not None
    assert beginning.text == "the weights of old"
    again.parts.core.counters().check()

    world.has_been_added("heir")
    for _ in range(4):
        world.play()
        world.train()
    assert world.checkpoint().module_ids == ("main-0", "heir"), "nobody needs the other one now"
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
    assert told.startswith("league: heir begins again with new weights, since those of main-0-v0")


def test_a_checkpoint_does_not_wait_for_a_player_that_has_no_learner_yet(world: Changing) -> None:
    world.want(AddPlayer("new", "main"))
    assert world.checkpoint().module_ids == ("main-0",)
    world.has_been_added("new")
    assert world.checkpoint().module_ids == ("main-0", "new")


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
    monkeypatch.setattr(league_run, "_SLOW_SECONDS", 0.01)
    match = Asked.match
    monkeypatch.setattr(Asked, "match", lambda *given: time.sleep(0.02) or match(*given))
    for index in (1, 2):
        world.league.line_ups(world.join("envrunner", index), 1)
    (told,) = [text for text in world.told.messages if " took " in text]
    pattern = r"league: Asked\.match took \d+\.\d s, in which the driver could do nothing else"
    assert re.match(pattern, told)


def test_workers_that_do_not_learn_are_not_told_of_modules_to_host(world: Changing) -> None:
    world.want(AddPlayer("random-9", "fixed", learning=False, source="random"))
    assert world.plays("random-9")
    assert list(world.modules_asked_for()) == ["main-0"]
    assert not world.asked(world.runner, training_pb2.AddPlayer)
    command_id, _ = world.asked(world.learner, training_pb2.AddModule)[0]
    world.reply(world.learner, command_id, attach_pb2.Done())  # a second answer changes nothing
    assert not world.why_dismissed(world.learner)
