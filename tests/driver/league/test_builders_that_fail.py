"""What people are told when a builder of their own fails."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from support.league_world import AGENTS, begun

from juggler.driver.league.builder import LeagueBuilder
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.events import MatchRequested, Report
from juggler.driver.league.league import League


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
    assert "(test_builders_that_fail.py, line " in report.message
    assert ", in build). Nothing changes until it works" in report.message
    report, _ = league.book(MatchRequested())
    assert isinstance(report, Report)
    assert ", in match). A player that learns plays against itself instead" in report.message


def test_a_league_that_cannot_begin_says_why() -> None:
    league = League(LeagueConfig(), AGENTS, 0, Fails(at="initial"))
    with pytest.raises(ValueError, match="'mains'"):
        league.begin()
