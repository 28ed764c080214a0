"""The keys of a league. No torch, because the driver reads this."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, get_args

from juggler.driver.league.alphastar import AlphaStar
from juggler.driver.league.builder import LeagueBuilder
from juggler.driver.league.rllib import Rllib
from juggler.driver.league.self_play import Fictitious, SelfPlay, SelfPlayWindow
from juggler.runtime.nearest import nearest

#: The builders that ship.
BUILDERS: Final[dict[str, type[LeagueBuilder]]] = {
    "alphastar": AlphaStar,
    "fictitious": Fictitious,
    "none": LeagueBuilder,
    "rllib": Rllib,
    "self_play": SelfPlay,
    "self_play_window": SelfPlayWindow,
}

#: Which copy goes when there are too many.
Recycled = Literal["easiest", "oldest"]


@dataclass(kw_only=True)
class LeagueConfig:
    """Who plays in a league, and what is counted.

    A builder has keys of its own, which are in the table `options`.
    """

    builder: str = "self_play"
    """What decides how the league grows and who plays whom: self_play, self_play_window,
    fictitious, alphastar, rllib, or none, which has players that learn and play against each
    other."""

    options: dict[str, Any] = field(default_factory=dict)
    """The keys of the builder."""

    teams: list[list[str]] = field(default_factory=list)
    """Agents that one player plays together, a list for each team. An agent that is in none is a
    team by itself. Who wins is decided between teams."""

    fixed: list[str] = field(default_factory=list)
    """Players that never learn and are there from the beginning: ids of modules, or random."""

    decay: float = 0.99
    """What is known of a pair of players is multiplied by this with each of their games; 1: nothing
    is forgotten."""

    min_games: int = 8
    """The win rate of a pair is 0.5 until the two have played so many games."""

    draw_margin: float = 0.0
    """A game is a draw if the returns of two teams differ by this or less."""

    max_historical: int = 50
    """How many copies are kept."""

    recycled: Recycled = "easiest"
    """Which copy goes when there are too many. easiest: the one whose worst opponent among the
    mains beats it most often, the oldest of them first, so that what is hard for any main stays;
    oldest. The newest copy of each player stays while there are others."""

    max_learning: int = 32
    """How many players may learn at once."""

    def validate(self) -> None:
        """
        Raises:
            ValueError: a key is wrong; names it.
        """
        if not (_is_number(self.decay) and 0 < self.decay <= 1):
            raise ValueError(f"decay = {self.decay!r}: must be above 0, and at most 1")
        if not (_is_number(self.draw_margin) and 0 <= self.draw_margin < math.inf):
            raise ValueError(f"draw_margin = {self.draw_margin!r}: must be at least 0")
        for key in ("min_games", "max_historical", "max_learning"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{key} = {value!r}: must be a whole number of at least 1")
        if self.recycled not in get_args(Recycled):
            raise ValueError(
                f"recycled = {self.recycled!r} is not known"
                f"{nearest(self.recycled, get_args(Recycled))}"
            )
        agents = [agent for team in self.teams for agent in team]
        if not all(self.teams) or len(set(agents)) < len(agents):
            raise ValueError(f"teams = {self.teams}: each has agents, and no agent is in two")
        if len(set(self.fixed)) < len(self.fixed):
            raise ValueError(f"fixed = {self.fixed}: names a player twice")
        self.make_builder()

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> LeagueConfig:
        """
        Raises:
            ValueError: the table has a key that there is not, or a wrong value; names it.
        """
        _must_be_keys(table, cls, "league")
        config = cls(**table)
        config.validate()
        return config

    def make_builder(self) -> LeagueBuilder:
        """
        Raises:
            ValueError: there is no such builder, or it has no such key, or a value is wrong.
        """
        if self.builder not in BUILDERS:
            raise ValueError(
                f"builder = {self.builder!r} is not known{nearest(self.builder, BUILDERS)}"
            )
        kind = BUILDERS[self.builder]
        _must_be_keys(self.options, kind, "options")
        try:
            return kind(**self.options)
        except ValueError as error:
            raise ValueError(f"options: {error}") from None

    def sides(self, agents: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """The agents of each side of a match: the teams, then everybody else alone.

        Raises:
            ValueError: an agent of a team is not in the environment.
        """
        teams = [tuple(team) for team in self.teams]
        in_teams = {agent for team in teams for agent in team}
        for agent in in_teams - set(agents):
            raise ValueError(f"teams: no agent is called {agent!r}{nearest(agent, agents)}")
        return (*teams, *((agent,) for agent in agents if agent not in in_teams))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _must_be_keys(table: Mapping[str, Any], kind: type[Any], name: str) -> None:
    known = [each.name for each in fields(kind)]
    for key in table:
        if key not in known:
            raise ValueError(f"{name} has no key {key!r}{nearest(key, known)}")
