"""A driver carries out a league's commands, even if its workers fail."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import any_pb2
from support.workers_world import Asked, Changing, WorkersWorld, World, resumed

from juggler.driver.agent_tables import copies_of
from juggler.driver.checkpoint.first_weights import (
    FirstWeights,
    FrozenModule,
    keep,
    kept,
    kept_modules,
)
from juggler.driver.checkpoint.snapshots import must_be_sound, state_reader
from juggler.driver.config import RunConfig
from juggler.driver.league.roster import (
    AddPlayer,
    FreezePlayer,
    ResetPlayer,
    RetirePlayer,
)
from juggler.driver.monitoring import plain_status
from juggler.driver.reporting.prometheus import families
from juggler.driver.workers import league_run
from juggler.driver.workers.league_run import LeagueStandings
from juggler.runtime.actors.hub import Worker
from juggler.runtime.checkpoints import checkpoint as checkpoints
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import status_pb2, training_pb2


@pytest.fixture(autouse=True)
def _nothing_is_wanted() -> None:
    Asked.wanted.clear()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_copy_that_is_retired_before_it_is_made_is_forgotten(world: World) -> None:
    world.want(FreezePlayer("main-0"))
    (asked,) = world.copies_asked_for()
    world.want(RetirePlayer("main-0-v0"))
    world.send_weights(asked)
    assert world.parts.registry.frozen == {}
    assert not world.asked(world.runner, training_pb2.AddPlayer)
    assert not world.asked(world.runner, training_pb2.RemovePlayer)


def test_a_learner_that_cannot_make_a_copy_is_asked_again_and_then_let_go(world: World) -> None:
    world.want(FreezePlayer("main-0"))
    (first,) = world.copies_asked_for()
    world.fail(world.learner, first)
    _, second = world.copies_asked_for()
    world.fail(world.learner, second)
    assert world.why_dismissed(world.learner) == "failed again: cannot"


def test_a_copy_waits_for_the_next_learner_if_its_learner_dies(world: World) -> None:
    world.want(FreezePlayer("main-0"))
    world.leave(world.learner)
    assert not world.plays("main-0")
    world.learner = world.joined("learner")
    world.meet("main-0")
    world.send_weights(*world.copies_asked_for())
    world.take_parts()
    assert world.plays("main-0")
    assert world.plays("main-0-v0")


def test_an_envrunner_that_dies_with_a_copy_on_its_way_is_not_waited_for(world: World) -> None:
    other = world.join("envrunner", 1)
    world.want(FreezePlayer("main-0"))
    world.send_weights(*world.copies_asked_for())
    world.take_parts()
    assert not world.plays("main-0-v0")
    world.leave(other)
    assert world.plays("main-0-v0")


def test_a_copy_that_the_disk_refuses_is_told_and_the_league_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path, *_: Any, **__: Any) -> None:
        raise CheckpointError(path, "No space left on device")

    monkeypatch.setattr("juggler.driver.checkpoint.first_weights.write", refuses)
    world.want(FreezePlayer("main-0"))
    (asked,) = world.copies_asked_for()
    world.send_weights(asked)
    told = [text for text in world.told.messages if "there is no copy main-0-v0" in text]
    assert len(told) == 1
    assert "No space left on device" in told[0]
    assert not world.why_dismissed(world.learner), "it did nothing wrong"
    monkeypatch.setattr("juggler.driver.checkpoint.first_weights.write", checkpoints.write)
    world.copy()
    assert world.plays("main-0-v1")


def test_a_receipt_tells_of_as_many_matches_as_an_envrunner_with_many_environments_plays(
    world: World,
) -> None:
    matches = 3_000
    told = [training_pb2.MatchResult(match_id=each, returns=[1, -1]) for each in range(matches)]
    returns, lengths = [0.0] * matches, [1] * matches
    world.sample(env_returns=returns, env_lengths=lengths, matches=told, module_id="main-0")
    assert world.why_dismissed(world.runner) == ""
    assert world.parts.metrics.episodes == matches


def beginning(whole: bool) -> dict[str, FirstWeights]:
    """Weights of another run for the main."""
    weights, text = {"scale": np.full(3, 7.0, np.float32)}, "those of another run"
    return {"main-0": FirstWeights(weights, whole, text, text, selectable=True)}


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_reset_gives_a_player_what_the_run_began_with(
    tmp_path: Path, resumes: bool, whole: bool
) -> None:
    began = Changing(tmp_path, beginning=beginning(whole))
    saved = began.checkpoint() if resumes else None
    config = RunConfig.from_flat({"from_checkpoint": "runs/other"})
    keep(beginning(whole), config, tmp_path)
    found, lost = kept(config, tmp_path)
    assert not lost
    np.testing.assert_array_equal(found["main-0"].weights["scale"], np.full(3, 7.0))
    world = World(tmp_path / "again", resume=saved, beginning=found) if resumes else began
    world.league.league.roster.players["main-0"].steps += 1
    before = len(world.asked(world.learner, training_pb2.Restore))
    world.want(ResetPlayer("main-0"))
    assert len(world.asked(world.learner, training_pb2.Reset)) == 1
    last, weights = weights_given(world, before)
    assert last.weights
    assert last.whole == whole, "what was not given stays as the seed has it"
    np.testing.assert_array_equal(weights, np.full(3, 7.0))


def frozen_rock(scale: float, size: int = 300, **more: Any) -> FrozenModule:
    """A module that is not trained; `more`: further arrays of it."""
    config, weights = RunConfig.from_flat({}), {"scale": np.full(size, scale, np.float32), **more}
    return FrozenModule.copied("rock", "default", config, {}, weights, {}, Version(1, 1), "default")


def weights_given(world: World, before: int = 0) -> tuple[training_pb2.Restore, Any]:
    """A learner's starting state, and the weights after `before` versions."""
    given = [each for _, each in world.asked(world.learner, training_pb2.Restore)][before:]
    reader = state_reader()
    (frame,) = [frame for each in given if (frame := reader.feed(each.chunk)) is not None]
    return given[-1], frame.tree["default"]["scale"]


@pytest.mark.parametrize("source", ["main-0-v0", "stone"])
def test_a_reset_gives_a_player_a_new_optimizer_and_then_the_weights_of_another_one(
    tmp_path: Path, source: str
) -> None:
    world = World(tmp_path)
    world.parts.registry.frozen["rock"] = frozen_rock(7.0)
    world.want(AddPlayer("stone", "fixed", learning=False, source="rock"))
    world.copy()
    assert world.plays(source)
    world.want(ResetPlayer("main-0", source))
    ((reset, _),) = world.asked(world.learner, training_pb2.Reset)
    assert all(reset < restore for restore, _ in world.asked(world.learner, training_pb2.Restore))
    last, weights = weights_given(world)
    assert last.module_id == "main-0"
    assert last.source == f"league: main-0, reset to the weights of {source}"
    assert not last.selectable
    assert last.weights
    assert last.whole
    np.testing.assert_array_equal(weights, np.full(300, 1.0 if source == "main-0-v0" else 7.0))
    assert world.league.league.roster.players["main-0"].life == 1


@pytest.mark.parametrize(
    ("rock", "differs"),
    [
        (frozen_rock(7.0, size=3), "'scale', {} has shape [300], and these weights have shape [3]"),
        (
            frozen_rock(7.0, layer=np.zeros(3, np.float32)),
            "'layer', {} has nothing, and these weights have shape [3]",
        ),
    ],
    ids=["other shapes", "further arrays"],
)
def test_weights_of_another_network_are_told_and_the_league_goes_on(
    tmp_path: Path, rock: FrozenModule, differs: str
) -> None:
    world = World(tmp_path)
    world.parts.registry.frozen["rock"] = rock
    world.want(AddPlayer("stone", "fixed", learning=False, source="rock"))
    world.copy()
    league = world.league.league
    league.payoffs.book("main-0", "stone", 1)
    for _ in range(2):
        world.want(ResetPlayer("main-0", "stone"))
    main = league.roster["main-0"]
    assert (main.life, main.reset_at) == (0, 0), "it was not reset"
    assert league.payoffs.games("main-0", "stone") == 1, "nothing is forgotten"
    world.want(AddPlayer("heir", "main", source="stone"))
    assert not world.asked(world.learner, training_pb2.Reset)
    assert not world.asked(world.learner, training_pb2.Restore)
    other = f"the weights of stone are of another network: at {differs}"
    for told in (
        "Asked.build gave an impossible command: main-0 cannot be reset to stone: "
        f"{other.format('main-0')}",
        f"heir cannot learn: {other.format('heir')}",
    ):
        assert world.told.messages.count(f"league: {told}") == 1
    assert world.plays("main-0")
    assert league.roster.players["heir"].retired


def test_a_player_that_does_not_learn_needs_a_module_that_is_not_trained(world: World) -> None:
    world.want(AddPlayer("odd", "fixed", learning=False, source="nosuch"))
    assert any("odd cannot play: 'nosuch'" in each for each in world.told.messages)
    assert world.league.league.roster.players["odd"].retired


# EnvRunners have line-ups for what they begin next, and every outcome counts once.


AGENTS = ("red", "blue")


def worker(index: int) -> Worker:
    return Worker(f"envrunner-{index}", "x", "envrunner", index, "host", 1, (), (), False)


class MatchesWorld:
    """A league of two mains, with two EnvRunners of three environments."""

    def __init__(self, directory: Path) -> None:
        mains = ["main-0", "main-1"]
        table = {"builder": "none", "options": {"mains": 2}, "min_games": 1}
        keys: dict[str, Any] = {"agents": dict.fromkeys(AGENTS, mains), "envs_per_runner": 3}
        world = WorkersWorld(directory, league=table, **keys)
        for player_id in mains:
            world.meet(player_id)
        assert world.parts.league is not None
        self.run = world.parts.league
        self.league = self.run.league
        self.one, self.other = worker(1), worker(2)

    def ask(self, who: Worker, round: int = 0) -> list[training_pb2.LineUp]:
        return self.run.line_ups(who, round)

    def finish(self, who: Worker, *line_ups: training_pb2.LineUp, red: float = 1.0) -> None:
        results = [
            training_pb2.MatchResult(match_id=each.match_id, returns=[red, -red], length=5)
            for each in line_ups
        ]
        self.run.finished(who, results)

    @property
    def games(self) -> int:
        return self.league.results().games("main-0", "main-1")


@pytest.fixture
def matches(tmp_path: Path) -> MatchesWorld:
    return MatchesWorld(tmp_path)


def test_an_envrunner_has_more_line_ups_than_environments_and_gets_new_ones_for_old(
    matches: MatchesWorld,
) -> None:
    world = matches
    first = world.ask(world.one)
    assert len({each.match_id for each in first}) == 3 + 8
    assert world.ask(world.one) == []
    world.finish(world.one, *first[:2])
    assert len(world.ask(world.one)) == 2
    assert world.games == 2


def test_an_outcome_counts_once_and_only_from_who_was_to_play(matches: MatchesWorld) -> None:
    world = matches
    line_up, *_ = world.ask(world.one)
    world.ask(world.other)
    world.finish(world.other, line_up)
    assert world.games == 0
    world.finish(world.one, line_up)
    world.finish(world.one, line_up)
    assert world.games == 1


def test_matches_of_a_lost_envrunner_are_cancelled_and_others_play_new_ones(
    matches: MatchesWorld,
) -> None:
    world = matches
    before = world.ask(world.one)
    world.run.left(world.one)
    assert not any(world.league.is_open(each.match_id) for each in before)
    again = world.ask(world.other)
    assert min(each.match_id for each in again) > max(each.match_id for each in before)
    world.finish(world.one, *before)
    assert world.games == 0, "it is gone"
    world.finish(world.other, *again)
    assert world.games == len(again)


def test_new_line_ups_come_in_place_of_matches_that_a_change_has_closed(
    matches: MatchesWorld,
) -> None:
    world = matches
    before = world.ask(world.one)
    world.league.unready("main-1")
    closed = [each for each in before if "main-1" in each.players]
    assert closed
    again = world.ask(world.one)
    assert len(again) == len(closed)
    assert not any("main-1" in each.players for each in again)
    world.finish(world.one, *closed)
    assert world.games == 0


# How the players of a league do, as lines of metrics and Prometheus tell it.


def test_before_any_game_there_is_no_win_rate(matches: MatchesWorld) -> None:
    learning = LeagueStandings(matches.league).line()["learning"].values()
    assert [(each["elo"], each["win_rate"]) for each in learning] == [(0.0, None), (0.0, None)]
    assert {(each["win_rate_low"], each["win_rate_high"]) for each in learning} == {(None, None)}


def test_prometheus_has_a_line_for_each_player() -> None:
    standing = {"elo": 12.5, "win_rate": None, "nash": 0.25, "steps": 400, "copies": 6}
    league = {"players": 7, "historical": 6, "learning": {"main-0": standing}}
    status = unwatched({"league": league})
    told = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(status)
        for sample in family.samples
    }
    assert told["juggler_league_players",] == 7
    assert told["juggler_league_historical_players",] == 6
    assert told["juggler_player_elo", "main-0"] == 12.5
    assert told["juggler_player_nash", "main-0"] == 0.25
    assert told["juggler_player_copies_total", "main-0"] == 6
    assert ("juggler_player_win_rate", "main-0") not in told
    told = {sample.name for family in families(unwatched({})) for sample in family.samples}
    assert not any(name.startswith(("juggler_league", "juggler_player")) for name in told)


def unwatched(line: dict[str, Any]) -> dict[str, Any]:
    empty = status_pb2.Histogram(counts=[0])
    names = ("staleness", "sample_request_seconds", "update_seconds")
    return plain_status(
        status_pb2.RunStatus(metrics=json.dumps(line), **dict.fromkeys(names, empty))
    )


# A checkpoint knows what the copies of its league play with, so that none is taken for another.


COPIES = ("main-0-v0", "main-0-v1", "main-0-v2")


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    """A checkpoint of a league: three copies, one gone, one pending."""
    world = Changing(tmp_path)
    for scale, copy_id in enumerate([*COPIES, "main-0-v3"]):
        world.copy(scale)
        assert world.plays(copy_id)
    world.want(RetirePlayer("main-0-v3"))
    world.want(FreezePlayer("main-0"))
    world.answered.add(world.copies_asked_for()[-1])  # not yet
    checkpoint = world.checkpoint()
    must_be_sound(checkpoint)
    return checkpoint


def test_copies_that_are_exchanged_for_each_other_are_told(
    saved: Checkpoint, tmp_path: Path
) -> None:
    one, other = (tmp_path / "frozen" / each for each in COPIES[:2])
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    told: list[str] = []

    found = kept_modules(tmp_path, copies_of(saved.counters), told.append)

    assert [*found] == [COPIES[2]]
    assert told[:2] == [
        f"league: the copy {each.name} is missing, so it does not play: {each} has other "
        "weights than were copied"
        for each in (one, other)
    ]
    assert len(told) == 3, "the last was not made yet"


def test_copies_of_a_checkpoint_without_digests_are_taken_as_they_are(
    saved: Checkpoint, tmp_path: Path
) -> None:
    counters = {key: value for key, value in saved.counters.items() if key != "copies"}
    assert copies_of(counters) == dict.fromkeys([*COPIES, "main-0-v4"], "")
    found = kept_modules(tmp_path, copies_of(counters), lambda _: None)
    assert [*found] == [*COPIES]
    assert {copy_id: each.digest for copy_id, each in found.items()} == saved.counters["copies"]


# Players that come, go, are reset, and continue in a resumed run.


@pytest.fixture
def changing(tmp_path: Path) -> Changing:
    return Changing(tmp_path)


def test_a_player_plays_once_it_has_a_learner_and_every_envrunner_has_it(
    changing: Changing,
) -> None:
    changing.want(AddPlayer("new", "exploiter"))
    assert list(changing.modules_asked_for()) == ["main-0", "new"]
    assert changing.told_to(changing.runner, training_pb2.AddPlayer) == ["new"]
    changing.play()
    assert {each.module_id for _, each in changing.requests()} == {"main-0"}, (
        "no request waits for it"
    )
    changing.get_ready(changing.learner)
    changing.meet("new")
    assert not changing.plays("new"), "the EnvRunner does not have it"
    changing.take_parts()
    assert changing.plays("new")
    assert "new" in changing.told_to(changing.runner, training_pb2.Learners)
    changing.play()
    changing.train()
    assert {each.module_id for _, each in changing.requests()} == {"main-0", "new"}
    counters = changing.parts.core.modules["new"].ledger.counters()
    assert counters.trained == 0 < changing.parts.core.trained
    assert changing.parts.registry.spaces["new"] == changing.parts.registry.spaces["main-0"]


def test_a_player_begins_with_what_another_one_has_at_that_moment(changing: Changing) -> None:
    changing.want(AddPlayer("new", "main", source="main-0"))
    assert list(changing.modules_asked_for()) == ["main-0"], "its weights are not here yet"
    (asked,) = changing.copies_asked_for()
    changing.send_weights(asked)
    assert list(changing.modules_asked_for()) == ["main-0", "new"]
    restored = [each for _, each in changing.asked(changing.learner, training_pb2.Restore)]
    assert {each.module_id for each in restored} == {"new"}
    assert restored[-1].weights
    assert restored[-1].whole
    assert any(
        "new is new, and learns from the weights of main-0" in t for t in changing.told.messages
    )


def test_players_that_come_and_go_in_a_cycle_leave_nothing_but_their_books(
    changing: Changing,
) -> None:
    trained = 0
    for number in range(3):
        player = f"new-{number}"
        changing.want(AddPlayer(player, "main"))
        changing.has_been_added(player)
        changing.play_and_train()
        trained = changing.parts.core.trained
        assert changing.parts.core.modules[player].ledger.trained
        updates = changing.parts.core.updates
        changing.want(RetirePlayer(player))
        assert player in changing.parts.core.modules, "requests are under way"
        changing.play_and_train()
        assert changing.parts.core.updates >= updates
        assert changing.told_to(changing.learner, training_pb2.RemoveModule)[-1] == player
        assert changing.told_to(changing.runner, training_pb2.RemovePlayer)[-1] == player
        late = training_pb2.Arrivals(module_id=player)
        late.arrivals.add(batch_id=1, live_steps=1)
        changing.report(changing.learner, late)
    parts = changing.parts
    for table in (parts.core.modules, parts.modules, parts.registry.trained):
        assert list(table) == ["main-0"]
    assert parts.core.trained >= trained > parts.core.modules["main-0"].ledger.trained
    parts.core.counters().check()
    assert not changing.why_dismissed(changing.learner)
    saved = changing.checkpoint()
    assert saved.module_ids == ("main-0",)
    assert saved.counters["past"]["trained"] == parts.core.past.counters.trained
    assert saved.version == parts.core.weights_version


def test_a_run_that_goes_on_has_the_players_that_were_added(
    changing: Changing, tmp_path: Path
) -> None:
    changing.want(AddPlayer("new", "main"), AddPlayer("gone", "main"))
    for player in ("new", "gone"):
        changing.has_been_added(player)
    changing.play_and_train()
    before = changing.parts.core.modules["new"].ledger.trained
    together = changing.parts.core.trained
    assert before > 0
    changing.want(RetirePlayer("gone"))
    saved = changing.checkpoint()
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
    changing: Changing, tmp_path: Path
) -> None:
    changing.want(AddPlayer("gone", "main"))
    changing.has_been_added("gone")
    changing.play_and_train()
    changing.play()
    together = changing.parts.core.trained

    def leaves() -> None:
        changing.want(RetirePlayer("gone"))
        changing.play_and_train()

    saved = changing.checkpoint(leaves)
    assert saved.module_ids == ("main-0", "gone")
    assert together <= saved.counters["trained"] <= changing.parts.core.trained
    again = resumed(tmp_path / "again", saved)
    assert list(again.parts.core.modules) == ["main-0"]
    assert again.parts.core.trained == saved.counters["trained"]
    assert again.parts.core.weights_version >= saved.version
    again.parts.core.counters().check()
    changing.turn()
    assert list(changing.parts.core.modules) == ["main-0"]


def test_a_player_that_was_added_just_before_a_checkpoint_begins_again(
    changing: Changing, tmp_path: Path
) -> None:
    changing.want(AddPlayer("new", "main", source="main-0"))
    saved = changing.checkpoint()
    assert saved.module_ids == ("main-0",)
    again = resumed(tmp_path / "again", saved)
    first = again.parts.modules["new"].first
    assert first is not None
    assert first.text == "the weights of main-0"
    restored = [each for _, each in again.asked(again.learner, training_pb2.Restore)]
    assert [each.weights for each in restored if each.module_id == "new"][-1]
    again.meet("new")
    assert again.plays("new")


def test_a_player_whose_source_left_before_it_had_a_learner_begins_again_with_its_weights(
    changing: Changing, tmp_path: Path
) -> None:
    changing.want(AddPlayer("old", "main"))
    changing.has_been_added("old")
    changing.want(AddPlayer("heir", "main", source="old"), RetirePlayer("old"))
    changing.send_weights(changing.copies_asked_for()[-1], "old")
    changing.play_and_train()
    saved = changing.checkpoint()
    assert saved.module_ids == ("main-0", "old"), "the heir has had no learner yet"

    again = resumed(tmp_path / "again", saved)
    assert set(again.parts.core.modules) == {"main-0", "heir"}
    first = again.parts.modules["heir"].first
    assert first is not None
    assert first.text == "the weights of old"
    again.parts.core.counters().check()

    changing.has_been_added("heir")
    changing.play_and_train()
    assert changing.checkpoint().module_ids == ("main-0", "heir"), (
        "the other one is no longer needed"
    )
    assert "old" not in changing.parts.core.modules


def test_a_player_whose_source_is_lost_is_told_to_begin_with_new_weights(
    changing: Changing, tmp_path: Path
) -> None:
    changing.copy()
    changing.want(AddPlayer("heir", "main", source="main-0-v0"))
    saved = changing.checkpoint()
    again = resumed(tmp_path / "again", saved)  # without the directory of the copy
    (told,) = [text for text in again.told.messages if "heir" in text]
    assert told.startswith(
        "league: heir starts again with new weights, since the weights of main-0-v0"
    )


def test_a_player_that_cannot_learn_is_told_and_the_league_goes_on(changing: Changing) -> None:
    changing.want(AddPlayer("lost", "main", source="main-0"))
    (asked,) = changing.copies_asked_for()
    header = training_pb2.StateHeader(module_id="main-0", extra="{}")
    (chunk,) = encode_frame(header, {"other": np.ones(3)}, digest=True)
    changing.reply(changing.learner, asked, any_pb2.Any(value=chunk))
    assert any("league: lost cannot learn" in text for text in changing.told.messages)
    assert changing.league.league.roster.players["lost"].retired


def test_people_are_told_once_which_call_of_a_builder_is_slow(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=7.0)
    monkeypatch.setattr(league_run, "time", SimpleNamespace(monotonic=clock.__next__))
    for index in (1, 2):
        changing.league.line_ups(changing.join("envrunner", index), 1)
    (told,) = [text for text in changing.told.messages if " took " in text]
    assert told.startswith("league: Asked.match took 7.0 s, in which the driver could do nothing")


# Players that are reset: their next opponents, and their state if learners die.


def next_learner(changing: Changing) -> Worker:
    """The one that takes the place of a learner that has died."""
    changing.leave(changing.learner)
    changing.learner = changing.join("learner")
    return changing.learner


def test_a_player_that_was_reset_plays_again_once_envrunners_get_its_new_weights(
    changing: Changing,
) -> None:
    before = changing.core.weights_version
    changing.want(ResetPlayer("main-0"))
    assert changing.told_in_order(changing.learner) == ["Group", "Reset", "Group"]
    assert not changing.plays("main-0"), "EnvRunners would play with its old weights"
    changing.meet("main-0")
    assert changing.plays("main-0")
    assert changing.core.weights_version.generation == before.generation + 1
    changing.play()
    changing.train()
    _, request = changing.requests()[-1]
    assert request.at_least.generation == before.generation + 1


def test_the_next_learner_resets_a_player_again_that_was_reset_behind_the_checkpoint(
    changing: Changing,
) -> None:
    changing.checkpoint()
    changing.want(ResetPlayer("main-0"))
    changing.meet("main-0")
    ((_, reset),) = changing.asked(changing.learner, training_pb2.Reset)

    learner = next_learner(changing)
    changing.get_ready(learner)
    assert changing.told_in_order(learner) == ["Restore", "Reset", "Group"]
    ((_, again),) = changing.asked(learner, training_pb2.Reset)
    assert again == reset, "it is reset to the same weights"
    assert not changing.plays("main-0")
    changing.meet("main-0")
    assert changing.plays("main-0")
    lost = "the learners' weights of module main-0 are lost: learner-0 continues from "
    assert not any(text.startswith(lost + "update") for text in changing.told.messages)

    changing.checkpoint()
    learner = next_learner(changing)
    changing.get_ready(learner)
    assert changing.told_in_order(learner) == ["Restore", "Group"], (
        "the checkpoint is of its new life"
    )


@pytest.mark.parametrize("has_met", [False, True])
def test_a_learner_that_kept_its_weights_while_it_was_lost_is_not_reset_again(
    changing: Changing, has_met: bool
) -> None:
    changing.want(ResetPlayer("main-0"))
    if has_met:
        changing.meet("main-0")
    generation = changing.core.generation
    learner = next_learner(changing)
    ((command_id, module),) = changing.asked(learner, training_pb2.AddModule)
    assert module.oldest_handover.generation == generation, "others are from before the reset"
    ready = training_pb2.ModuleReady(module_id="main-0")
    ready.handed_over.generation = generation
    changing.reply(learner, command_id, ready)
    assert changing.told_in_order(learner) == ["Group"]


def test_there_is_no_copy_of_a_life_whose_last_learner_died_before_it_had_sent_it(
    changing: Changing,
) -> None:
    changing.want(FreezePlayer("main-0"), ResetPlayer("main-0"))
    assert len(changing.copies_asked_for()) == 1
    changing.get_ready(next_learner(changing))
    changing.meet("main-0")
    assert changing.copies_asked_for() == [], "it would be a copy of the new life"
    why = "league: there is no copy main-0-v0: its learner sent no weights, and other learners have"
    assert any(text.startswith(why) for text in changing.told.messages)
    assert changing.plays("main-0")


# What a league that goes on from a checkpoint makes of what was under way there.


def test_a_copy_that_not_every_envrunner_had_at_the_checkpoint_plays_when_the_run_goes_on(
    changing: Changing, tmp_path: Path
) -> None:
    changing.want(FreezePlayer("main-0"))
    changing.send_weights(changing.copies_asked_for()[-1])
    assert not changing.plays("main-0-v0"), "it is on its way to the EnvRunner"
    saved = changing.checkpoint()

    lost: list[str] = []
    frozen = kept_modules(tmp_path, copies_of(saved.counters), lost.append)
    again = resumed(tmp_path / "again", saved, frozen=frozen)
    assert not lost
    assert again.plays("main-0-v0")


def test_a_reset_that_came_between_the_cuts_of_a_checkpoint_is_repeated_when_the_run_goes_on(
    changing: Changing, tmp_path: Path
) -> None:
    saved = changing.checkpoint(lambda: changing.want(ResetPlayer("main-0")))
    ((_, reset),) = changing.asked(changing.learner, training_pb2.Reset)
    assert saved.counters["league"]["players"][0]["life"] == 1
    assert saved.version_of("main-0")[0] < changing.core.generation, "its weights are of before"

    again = resumed(tmp_path / "again", saved)
    assert again.told_in_order(again.learner) == ["Restore", "Reset", "Group"]
    ((_, repeated),) = again.asked(again.learner, training_pb2.Reset)
    assert repeated == reset, "it is reset to the same weights"
    assert again.plays("main-0")
    assert not any("are lost" in text for text in again.told.messages)

    later = resumed(tmp_path / "later", again.checkpoint())
    assert later.told_in_order(later.learner) == ["Restore", "Group"], "it is of the new life"


def test_a_reset_to_a_copy_is_repeated_with_the_weights_of_that_copy(
    changing: Changing, tmp_path: Path
) -> None:
    changing.copy()
    saved = changing.checkpoint(lambda: changing.want(ResetPlayer("main-0", "main-0-v0")))
    begun = changing.restored(changing.learner)

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
