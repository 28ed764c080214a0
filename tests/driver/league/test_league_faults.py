"""Faults in a league, and what its checkpoint keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from support.league_world import AGENTS, asking, begun, finished, line_up, ready

from juggler.driver.league.builders import AlphaStar, Rllib
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.league_builder import LeagueBuilder, Pairing
from juggler.driver.league.roster import (
    AddPlayer,
    AssignLineUp,
    FreezePlayer,
    Report,
    ResetPlayer,
    RetirePlayer,
)


@dataclass(kw_only=True)
class Broken(LeagueBuilder):
    wrong: Any = None

    def build(self, results: Any) -> Iterable[Any]:
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong

    def match(self, results: Any) -> Pairing:
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (RuntimeError("no idea"), "Broken.build failed: RuntimeError: no idea"),
        (None, "Broken.build failed: TypeError"),
        (["main-0"], "'main-0' is not a builder's command"),
        ([ResetPlayer(["x"])], "ResetPlayer: player_id must be a"),
        ([AddPlayer(None, None)], "AddPlayer: player_id must be a"),
        ([ResetPlayer("main-0", 3)], "ResetPlayer: source must be a name, not 3"),
        ([FreezePlayer("mian-0")], "no player is called 'mian-0': did"),
        ([RetirePlayer("main-0")], "main-0 is the last learning player"),
        ([ResetPlayer("main-0")], "main-0 has not been trained since"),
        ([ResetPlayer("main-0", "main-0")], "main-0 cannot be reset to main-0"),
        ([ResetPlayer("main-0", "random")], "'random' has no weights to begin with"),
        ([ResetPlayer("main-0", "missing-0")], "no player is called 'missing-0'"),
        ([AddPlayer("main-0", "main")], "has had a player 'main-0': use a new id"),
        ([AddPlayer("main 1", "main")], "'main 1' is not a player id"),
        ([AddPlayer("x", "historical")], "role = 'historical'"),
        ([AddPlayer("x", "main", source="random")], "'random' has no weights to begin with"),
        (
            [AddPlayer("x", "fixed", learning=False, source="main-0")],
            "x does not learn, so it cannot",
        ),
        ([AddPlayer(f"x{n}", "main") for n in range(4)], "at most max_learning = 2 players learn"),
    ],
)
def test_a_builder_that_is_wrong_is_told_of_and_the_league_goes_on(wrong, told) -> None:
    league = begun(LeagueConfig(max_learning=2), Broken(wrong=wrong))
    reports = [command for command in league.build() if isinstance(command, Report)]
    assert len(reports) == 1
    assert told in reports[0].message
    for _ in range(3):
        assigned = league.request_match()[-1]
        assert isinstance(assigned, AssignLineUp)
        assert assigned.branch == "self-play"


@pytest.mark.parametrize(
    ("pairing", "told"),
    [
        ("main-0", "is not a Pairing"),
        (Pairing("main-0", {}), "names no opponents"),
        (Pairing("main-0", {"main-0": float("nan")}), "the weight of 'main-0' is nan"),
        (Pairing("main-0", {"main-0": -1}), "the weight of 'main-0' is -1"),
        (Pairing("main-0", {"missing-0": 1}), "named players that cannot play"),
        (Pairing("missing-0", {"main-0": 1}), "named players that cannot play"),
    ],
)
def test_a_pairing_that_is_wrong_becomes_self_play_with_a_word(pairing, told) -> None:
    league = begun(LeagueConfig(), Broken(wrong=pairing))
    report, assigned = league.request_match()
    assert isinstance(report, Report)
    assert report.message.startswith("Broken.match failed: ValueError: ")
    assert told in report.message
    assert isinstance(assigned, AssignLineUp)
    assert set(assigned.players.values()) == {"main-0"}
    assert league.request_match()[0] != report  # told once


def test_players_that_cannot_play_are_left_out_of_a_pairing() -> None:
    league = begun(LeagueConfig(), Broken(wrong=Pairing("main-0", {"gone": 1e9, "main-0": 1})))
    assert set(line_up(league).players.values()) == {"main-0"}


@pytest.mark.parametrize(
    "again", [[ResetPlayer("main-0")], [FreezePlayer("main-0"), ResetPlayer("main-0")]]
)
def test_resets_cannot_go_in_a_circle(again) -> None:
    league, builder = asking()
    league.trained("main-0", 1)
    done = [builder.change(league, *again) for _ in range(5)]
    assert sum(ResetPlayer("main-0") in commands for commands in done) == 1


@pytest.mark.parametrize("source", ["main-1", "main-0-v0", "main-0-v1"])
def test_a_player_is_reset_to_a_frozen_player_that_can_play_and_to_no_other(source: str) -> None:
    league, builder = asking()
    league.trained("main-0", 1)
    builder.change(league, FreezePlayer("main-0"))
    league.trained("main-0", 1)
    builder.wanted = [FreezePlayer("main-0")]
    league.build()  # no worker has this copy yet
    before = league.to_state()
    builder.wanted = [reset := ResetPlayer("main-0", source)]
    commands = league.build()
    why = {
        "main-1": "main-0 cannot be reset to main-1, which learns: copy that player with",
        "main-0-v1": "main-0 cannot be reset to main-0-v1, which cannot play yet: ask again once",
    }
    if source in why:
        (report,) = commands
        assert isinstance(report, Report)
        assert why[source] in report.message
        assert league.to_state() == before | {"times_built": before["times_built"] + 1}
    else:
        assert commands == [reset]
        assert league.roster["main-0"].life == 1


def test_a_player_begins_as_a_copy_once_that_can_play_and_can_have_its_id_until_then() -> None:
    league, builder = asking()
    heir = AddPlayer("heir", "main", source="main-0-v0")
    builder.wanted = [FreezePlayer("main-0"), heir]
    frozen, report = league.build()
    assert frozen == FreezePlayer("main-0", "main-0-v0")
    assert isinstance(report, Report)
    why = (
        "heir cannot begin as main-0-v0, which cannot play yet: ask again once `results.players()`"
    )
    assert why in report.message
    assert "heir" not in league.roster.players
    league.ready("main-0-v0")
    assert builder.change(league, heir) == [heir]


def test_a_player_without_a_learner_is_reset_once_it_has_one() -> None:
    league, builder = asking()
    league.trained("main-0", 1)
    league.unready("main-0")
    builder.wanted = [ResetPlayer("main-0")]
    (report,) = league.build()
    assert isinstance(report, Report)
    assert "main-0 cannot be reset while it cannot play: ask again once" in report.message
    assert league.roster["main-0"].life == 0
    league.ready("main-0")
    assert builder.change(league, ResetPlayer("main-0")) == [ResetPlayer("main-0")]


def test_a_league_that_nobody_learns_in_is_refused() -> None:
    class Nobody(LeagueBuilder):
        def initial(self) -> list[Any]:
            return []

    with pytest.raises(ValueError, match="initial"):
        League(LeagueConfig(), AGENTS, 0, Nobody()).begin()


@pytest.mark.parametrize("source", ["stone", "main-0", "main-0-v0"])
def test_who_learns_from_the_beginning_begins_as_nobody_else(source: str) -> None:
    """Its weights would be new ones all the same."""

    class Heirs(LeagueBuilder):
        def initial(self) -> list[Any]:
            stone = AddPlayer("stone", "fixed", learning=False, source="rock")
            heir = AddPlayer("heir", "main", source=source)
            return [stone, AddPlayer("main-0", "main"), FreezePlayer("main-0"), heir]

    said = f"heir learns from the start, and cannot begin as '{source}': leave out source"
    with pytest.raises(ValueError, match=said):
        League(LeagueConfig(), AGENTS, 0, Heirs()).begin()


# What is kept.


def play(league: League, count: int) -> list[AssignLineUp]:
    """Matches whose outcome follows from their id, with changes in between."""
    line_ups = []
    for number in range(count):
        assigned = line_up(league)
        line_ups.append(assigned)
        league.finish_match(*finished(assigned, assigned.match_id % 3, 1))
        for player in set(assigned.players.values()):
            if league.roster[player].learning:
                league.trained(player, 1)
        if number % 10 == 9:
            ready(league, league.build())
    return line_ups


@pytest.mark.parametrize(
    "builder",
    [
        AlphaStar(mains=2, min_phase_steps=5, max_phase_steps=10),
        Rllib(min_matches=5, snapshot_at=0.5, keep_training_probability=0.2),
    ],
)
def test_the_next_100_line_ups_are_the_same_after_it_is_saved(builder) -> None:
    config = LeagueConfig(max_historical=20, fixed=["random"])
    league = begun(config, builder, seed=7)
    play(league, 250)
    open_match = line_up(league)  # is not part of the state

    data = json.loads(json.dumps(league.to_state()))
    other = League.from_state(data, config, AGENTS, builder)

    assert other.to_state() == league.to_state()
    assert play(league, 100) == play(other, 100)
    assert other.to_state() == league.to_state()
    before = other.to_state()
    other.finish_match(*finished(open_match, 1, -1))
    assert other.to_state() == before
    assert len(league.roster.players) > len(league.roster.present()) > 10


def test_a_league_goes_on_whose_games_since_a_copy_were_not_counted_when_it_was_saved() -> None:
    data = begun().to_state()
    for player in data["players"]:
        del player["phase_games"]
    assert League.from_state(data, LeagueConfig(), AGENTS).roster["main-0"].phase_games == 0


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ValueError, match="next_match_id"):
        League.from_state({"seed": 0}, LeagueConfig(), AGENTS)


# What people are told when a builder of their own fails.


@dataclass(kw_only=True)
class Fails(LeagueBuilder):
    at: str = "build"

    def initial(self):
        if self.at == "initial":
            raise KeyError("mains")
        return super().initial()

    def build(self, results):
        return results.player("ghost") if self.at == "build" else []

    def match(self, results):
        raise ZeroDivisionError("no games")


def test_the_line_that_failed_is_told_and_what_happens_now() -> None:
    league = begun(LeagueConfig(), Fails())
    (report,) = league.build()
    assert isinstance(report, Report)
    assert report.message.startswith("Fails.build failed: ValueError: no player is called 'ghost'")
    assert "(test_league_faults.py, line " in report.message
    assert ", in build). Nothing changes until it works" in report.message
    report, _ = league.request_match()
    assert isinstance(report, Report)
    assert ", in match). A learner plays against itself instead" in report.message
