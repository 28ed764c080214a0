"""Matches of pairs of whom little is known."""

from __future__ import annotations

from itertools import combinations

from support.league_world import AGENTS, begun

from juggler.driver.league.alphastar import AlphaStar
from juggler.driver.league.builder import LeagueBuilder
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.events import AssignLineUp, MatchFinished, MatchRequested
from juggler.driver.league.league import League


def play(league: League, matches: int) -> list[AssignLineUp]:
    played = []
    for _ in range(matches):
        (line_up,) = league.book(MatchRequested())
        assert isinstance(line_up, AssignLineUp)
        returns = dict.fromkeys(line_up.players, 0.0)
        league.book(MatchFinished(line_up.match_id, line_up.attempt, returns, 1))
        played.append(line_up)
    return played


def test_in_time_every_pair_has_played_enough() -> None:
    builder = AlphaStar(mains=2, main_exploiters=1, league_exploiters=1)
    league = begun(LeagueConfig(evaluation_probability=0.2, min_games=5), builder)
    played = play(league, 1500)
    players = league.results().players()
    assert any(not league.roster[player].learning for player in players)
    assert all(league.payoffs.games(*pair) >= 5 for pair in combinations(players, 2))
    late = [each for each in play(league, 500) if each.branch == "evaluation"]
    assert not late, "what is known needs no more games"
    assert 0 < sum(each.branch == "evaluation" for each in played) < 0.3 * len(played)


def test_they_may_be_turned_off_and_one_player_alone_has_none() -> None:
    league = begun(LeagueConfig(evaluation_probability=0.0), AlphaStar())
    assert not any(each.branch == "evaluation" for each in play(league, 300))
    alone = begun(LeagueConfig(evaluation_probability=0.5), LeagueBuilder(mains=1))
    assert not any(each.branch == "evaluation" for each in play(alone, 50))
    assert set(AGENTS) == set(play(alone, 1)[0].players)
