"""A driver carries out a league's commands, even if its workers fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.workers_world import Asked, Changing, World

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
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.roster import (
    AddPlayer,
    AssignLineUp,
    FreezePlayer,
    ResetPlayer,
    RetirePlayer,
)
from juggler.driver.monitoring import plain_status
from juggler.driver.reporting.prometheus import families
from juggler.driver.workers.league_run import LeagueMatches, LeagueStandings
from juggler.runtime.actors.hub import Worker
from juggler.runtime.checkpoints import checkpoint as checkpoints
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import status_pb2, training_pb2


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    Asked.wanted.clear()
    Asked.fails = False
    yield World(tmp_path)
    Asked.fails = False


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
    (asked,) = world.copies_asked_for()
    world.send_weights(asked)
    world.take_parts()
    assert world.plays("main-0")
    assert world.plays("main-0-v0")


def test_an_envrunner_that_dies_with_a_copy_on_its_way_is_not_waited_for(world: World) -> None:
    other = world.join("envrunner", 1)
    world.want(FreezePlayer("main-0"))
    (asked,) = world.copies_asked_for()
    world.send_weights(asked)
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
    world.want(FreezePlayer("main-0"))
    world.send_weights(world.copies_asked_for()[-1])
    world.take_parts()
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
    Asked.wanted.clear()
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
    Asked.wanted.clear()
    world = World(tmp_path)
    world.parts.registry.frozen["rock"] = frozen_rock(7.0)
    world.want(FreezePlayer("main-0"), AddPlayer("stone", "fixed", learning=False, source="rock"))
    (asked,) = world.copies_asked_for()
    world.send_weights(asked)
    world.take_parts()
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
    Asked.wanted.clear()
    world = World(tmp_path)
    world.parts.registry.frozen["rock"] = rock
    world.want(FreezePlayer("main-0"), AddPlayer("stone", "fixed", learning=False, source="rock"))
    (asked,) = world.copies_asked_for()
    world.send_weights(asked)
    world.take_parts()
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


class LeagueMatchesWorld:
    """A league of two mains, with two EnvRunners of three environments."""

    def __init__(self) -> None:
        config = LeagueConfig(builder="none", options={"mains": 2}, min_games=1)
        self.league = League(config, AGENTS, seed=0)
        self.league.begin()
        for player_id in ("main-0", "main-1"):
            self.league.ready(player_id)
        self.matches = LeagueMatches(
            self.league, self.request, AGENTS, 3, lambda player_id: player_id
        )
        self.one, self.other = worker(0), worker(1)

    def request(self) -> None:
        for command in self.league.request_match():
            assert isinstance(command, AssignLineUp)
            self.matches.redraw(command)

    def ask(self, who: Worker, round: int = 0) -> list[training_pb2.LineUp]:
        return self.matches.line_ups(who, round)

    def finish(self, who: Worker, *line_ups: training_pb2.LineUp, red: float = 1.0) -> None:
        results = [
            training_pb2.MatchResult(
                match_id=each.match_id, attempt=each.attempt, returns=[red, -red], length=5
            )
            for each in line_ups
        ]
        self.matches.finished(who, results)

    @property
    def games(self) -> int:
        return self.league.results().games("main-0", "main-1")


def test_an_envrunner_has_more_line_ups_than_environments_and_gets_new_ones_for_old() -> None:
    world = LeagueMatchesWorld()
    first = world.ask(world.one)
    assert len(first) == 3 + 8
    assert [each.match_id for each in first] == list(range(11))
    assert world.ask(world.one) == []
    world.finish(world.one, *first[:2])
    assert len(world.ask(world.one)) == 2
    assert world.games == 2


def test_an_outcome_counts_once_and_only_from_who_was_to_play() -> None:
    world = LeagueMatchesWorld()
    line_up, *_ = world.ask(world.one)
    world.ask(world.other)
    world.finish(world.other, line_up)
    assert world.games == 0
    world.finish(world.one, line_up)
    world.finish(world.one, line_up)
    assert world.games == 1


def test_matches_of_an_envrunner_that_is_gone_are_drawn_anew_for_others() -> None:
    world = LeagueMatchesWorld()
    before = world.ask(world.one)
    for match_id in world.matches.left(world.one):
        (command,) = world.league.lose_match(match_id)
        assert isinstance(command, AssignLineUp)
        world.matches.redraw(command)
    again = world.ask(world.other)
    assert [each.match_id for each in again] == [each.match_id for each in before]
    assert {each.attempt for each in again} == {1}
    world.finish(world.one, *before)
    assert world.games == 0, "it is gone"
    world.finish(world.other, *again)
    assert world.games == len(again)


# How the players of a league do, as lines of metrics and Prometheus tell it.


def league_of_two() -> League:
    league = League(LeagueConfig(builder="none", options={"mains": 2}), ("row", "column"), 0)
    for command in league.begin():
        league.ready(command.player_id)  # type: ignore[union-attr]
    return league


def play(league: League, winner: str) -> None:
    (line_up,) = league.request_match()
    returns = {agent: float(player == winner) for agent, player in line_up.players.items()}  # type: ignore[union-attr]
    league.finish_match(line_up.match_id, line_up.attempt, returns, 3)  # type: ignore[union-attr]


def test_who_wins_is_rated_higher() -> None:
    league = league_of_two()
    for _ in range(30):
        play(league, "main-1")
    line = LeagueStandings(league).line()
    assert line["players"] == 2
    assert line["historical"] == 0
    first, second = line["learning"]["main-0"], line["learning"]["main-1"]
    assert second["elo"] > 100 > -100 > first["elo"]
    assert (first["win_rate"], second["win_rate"]) == (0.0, 1.0)
    assert first["win_rate_low"] == 0.0 < first["win_rate_high"] < 0.2
    assert second["win_rate_high"] == 1.0 > second["win_rate_low"] > 0.8
    assert first["nash"] == pytest.approx(0.0, abs=1e-9)
    assert second["nash"] == pytest.approx(1.0)
    assert line["kinds"] == {"main, main": {"games": 30, "win_rate": pytest.approx(0.5, abs=0.5)}}


def test_before_any_game_there_is_no_win_rate() -> None:
    learning = LeagueStandings(league_of_two()).line()["learning"].values()
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
    Asked.wanted.clear()
    world = Changing(tmp_path)
    for scale, copy_id in enumerate([*COPIES, "main-0-v3"]):
        world.want(FreezePlayer("main-0"))
        world.send_weights(world.copies_asked_for()[-1], scale=scale)
        world.take_parts()
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
