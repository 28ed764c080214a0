"""Leagues without workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.league_builder import LeagueBuilder, Pairing
from juggler.driver.league.results import LeagueResults
from juggler.driver.league.roster import (
    AddPlayer,
    AssignLineUp,
    BuilderCommand,
    Command,
    FreezePlayer,
    ResetPlayer,
)

AGENTS = ("row", "column")


def begun(
    config: LeagueConfig | None = None,
    builder: LeagueBuilder | None = None,
    agents: tuple[str, ...] = AGENTS,
    seed: int = 0,
) -> League:
    """A league whose first players are ready."""
    league = League(config or LeagueConfig(), agents, seed, builder)
    ready(league, league.begin())
    return league


def ready(league: League, commands: Iterable[Command]) -> list[Command]:
    """Report added, copied and reset players as ready; return the commands."""
    commands = list(commands)
    for command in commands:
        match command:
            case AddPlayer() | ResetPlayer():
                league.ready(command.player_id)
            case FreezePlayer():
                league.ready(command.copy_id)
    return commands


@dataclass(kw_only=True)
class Asking(LeagueBuilder):
    """Pairs players as another builder does, with extra commands.

    Attributes:
        inner: the other one.
        wanted: what it asks for next.
    """

    inner: LeagueBuilder = field(default_factory=LeagueBuilder)
    wanted: list[Any] = field(default_factory=list)

    def initial(self) -> Iterable[BuilderCommand]:
        return self.inner.initial()

    def build(self, results: LeagueResults) -> Iterable[BuilderCommand]:
        asked, self.wanted = self.wanted, []
        return asked

    def match(self, results: LeagueResults) -> Pairing:
        return self.inner.match(results)

    def change(self, league: League, *wanted: Any) -> list[Command]:
        """Have the league do this; report new players as ready."""
        self.wanted = list(wanted)
        return ready(league, league.build())


def line_up(league: League) -> AssignLineUp:
    """The next one."""
    (command,) = league.request_match()
    assert isinstance(command, AssignLineUp)
    return command


def finished(assigned: AssignLineUp, *returns: float) -> tuple[int, dict[str, float], int]:
    """What `League.finish_match` takes."""
    by_agent = dict(zip(assigned.players, returns, strict=True))
    return assigned.match_id, by_agent, 1


def asking(inner: LeagueBuilder | None = None, **keys: Any) -> tuple[League, Asking]:
    builder = Asking(inner=inner or LeagueBuilder(mains=2))
    return begun(
        LeagueConfig(**{"min_games": 1, "decay": 1.0, "evaluation_probability": 0.0, **keys}),
        builder,
    ), builder


def book_games(league: League, player: str, other: str, wins: int, losses: int) -> None:
    """Book games for a wanted win rate of a pair."""
    for result in [1] * wins + [-1] * losses:
        league.payoffs.book(player, other, result)
        for each in (player, other):
            league.roster[each].phase_games += 1
