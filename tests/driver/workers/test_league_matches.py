"""EnvRunners have line-ups for what they begin next, and every outcome counts once."""

from __future__ import annotations

import math

import pytest

from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.events import CancelMatch, PlayerReady
from juggler.driver.league.league import League
from juggler.driver.workers.league_matches import LeagueMatches
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.wire.v1 import training_pb2

AGENTS = ("red", "blue")


def worker(index: int) -> Worker:
    return Worker(f"envrunner-{index}", "x", "envrunner", index, "host", 1, (), (), False)


class World:
    """A league of two mains, and the matches of two EnvRunners with three environments each."""

    def __init__(self) -> None:
        config = LeagueConfig(builder="none", options={"mains": 2}, min_games=1)
        self.league = League(config, AGENTS, seed=0)
        self.league.begin()
        for player_id in ("main-0", "main-1"):
            self.league.book(PlayerReady(player_id))
        self.matches = LeagueMatches(self.league.book, AGENTS, 3, lambda player_id: player_id)
        self.one, self.other = worker(0), worker(1)

    def ask(self, who: Worker, round: int = 0) -> list[training_pb2.LineUp]:
        return self.matches.line_ups(who, round)

    def finish(self, who: Worker, *line_ups: training_pb2.LineUp, red: float = 1.0) -> None:
        results = [
            training_pb2.MatchResult(
                match_id=each.match_id, attempt=each.attempt, returns=[red, -red], length=5
            )
            for each in line_ups
        ]
        for command in self.matches.finished(who, results):
            raise AssertionError(command)

    @property
    def games(self) -> int:
        return self.league.results().games("main-0", "main-1")


def test_an_envrunner_has_more_line_ups_than_environments_and_gets_new_ones_for_old() -> None:
    world = World()
    first = world.ask(world.one)
    assert len(first) == 3 + 8
    assert [each.match_id for each in first] == list(range(11))
    assert world.ask(world.one) == []
    world.finish(world.one, *first[:2])
    assert len(world.ask(world.one)) == 2
    assert world.games == 2


def test_short_matches_are_drawn_ahead_within_bounds() -> None:
    world = World()
    open_now = world.ask(world.one)
    for _ in range(6):
        world.finish(world.one, *open_now)
        open_now = world.ask(world.one)
    assert len(open_now) == 3 + 64


def test_one_request_of_a_round_has_all_line_ups() -> None:
    world = World()
    assert world.ask(world.one, round=4)
    world.matches.left(world.one)
    assert world.ask(world.one, round=5)
    assert world.ask(world.one, round=5) == []
    assert world.ask(world.other, round=5)


def test_an_outcome_counts_once_and_only_from_who_was_to_play() -> None:
    world = World()
    line_up, *_ = world.ask(world.one)
    world.ask(world.other)
    world.finish(world.other, line_up)
    assert world.games == 0
    world.finish(world.one, line_up)
    world.finish(world.one, line_up)
    assert world.games == 1


def test_matches_of_an_envrunner_that_is_gone_are_drawn_anew_for_others() -> None:
    world = World()
    before = world.ask(world.one)
    for command in world.matches.left(world.one):
        assert not isinstance(command, CancelMatch)
        world.matches.redraw(command)
    again = world.ask(world.other)
    assert [each.match_id for each in again] == [each.match_id for each in before]
    assert {each.attempt for each in again} == {1}
    world.finish(world.one, *before)
    assert world.games == 0, "it is gone"
    world.finish(world.other, *again)
    assert world.games == len(again)


def test_what_cannot_be_is_refused() -> None:
    world = World()
    line_up, *_ = world.ask(world.one)
    short = training_pb2.MatchResult(match_id=line_up.match_id, returns=[1.0], length=1)
    with pytest.raises(ValueError, match="1 returns of match 0: the environment has 2 agents"):
        world.matches.finished(world.one, [short])


def test_an_agent_that_never_acted_has_no_return() -> None:
    world = World()
    line_up, *_ = world.ask(world.one)
    half = training_pb2.MatchResult(match_id=line_up.match_id, returns=[math.nan, 3.0], length=1)
    world.matches.finished(world.one, [half])
    assert world.games == 1
