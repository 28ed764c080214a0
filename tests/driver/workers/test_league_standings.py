"""How the players of a league do, as lines of metrics and Prometheus tell it."""

from __future__ import annotations

import pytest

from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.events import MatchFinished, MatchRequested, PlayerReady
from juggler.driver.league.league import League, LeagueState
from juggler.driver.league.roster import Player
from juggler.driver.record.prometheus import families
from juggler.driver.workers.league_standings import LeagueStandings
from juggler.runtime.wire.v1 import status_pb2


def league_of_two() -> League:
    league = League(LeagueConfig(builder="none", options={"mains": 2}), ("row", "column"), 0)
    for command in league.begin():
        league.book(PlayerReady(command.player_id))  # type: ignore[union-attr]
    return league


def play(league: League, winner: str) -> None:
    (line_up,) = league.book(MatchRequested())
    returns = {agent: float(player == winner) for agent, player in line_up.players.items()}  # type: ignore[union-attr]
    league.book(MatchFinished(line_up.match_id, line_up.attempt, returns, 3))  # type: ignore[union-attr]


def test_who_wins_is_rated_higher() -> None:
    league = league_of_two()
    for _ in range(30):
        play(league, "main-1")
    line = LeagueStandings(league).now().line()
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
    learning = LeagueStandings(league_of_two()).now().learning
    assert [(each.elo, each.win_rate) for each in learning] == [(0.0, None), (0.0, None)]
    assert {(each.win_rate_low, each.win_rate_high) for each in learning} == {(None, None)}


def test_a_league_of_very_many_has_no_equilibrium_in_its_metrics() -> None:
    for mains, known in ((128, True), (129, False)):
        options = {"mains": mains}
        config = LeagueConfig(builder="none", options=options, max_learning=64)
        names = [f"main-{number}" for number in range(mains)]
        players = [Player(name, "main", True, "initial", ready=True) for name in names]
        state = LeagueState(0, 0, 0, players, [], [], [])
        league = League(config, ("row", "column"), 0, state=state)
        learning = LeagueStandings(league).now().learning
        assert {each.nash is not None for each in learning} == {known}


def test_ratings_that_take_long_are_made_less_often() -> None:
    league, seconds = league_of_two(), [0.0]

    def clock() -> float:
        seconds[0] += 1.0  # so that ratings take a second
        return seconds[0]

    standings = LeagueStandings(league, clock)
    standings.now()
    for _ in range(30):
        play(league, "main-1")
    assert standings.now().learning[1].elo == 0.0
    assert standings.now().learning[1].win_rate == 1.0
    seconds[0] += 50
    assert standings.now().learning[1].elo > 100


def test_prometheus_has_a_line_for_each_player() -> None:
    status = unwatched()
    league = status.league
    league.players, league.historical = 7, 6
    league.learning.add(player_id="main-0", role="main", elo=12.5, nash=0.25, steps=400, copies=6)
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
    told = {sample.name for family in families(unwatched()) for sample in family.samples}
    assert not any(name.startswith(("juggler_league", "juggler_player")) for name in told)


def unwatched() -> status_pb2.RunStatus:
    empty = status_pb2.Histogram(counts=[0])
    return status_pb2.RunStatus(staleness=empty, sample_request_seconds=empty, update_seconds=empty)
