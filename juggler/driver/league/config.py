"""Keys of a league; imports no torch, because the driver reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, get_type_hints

from juggler.driver.league.builders import find_builder, make_builder, must_be_keys, of_type
from juggler.driver.league.league_builder import LeagueBuilder
from juggler.runtime.near_matches import nearest

#: Larger leagues would not fit in a receipt, and acting with more copies would be slow.
MOST_HISTORICAL: Final = 500
MOST_LEARNING: Final = 64  # maximum number of trained modules that an EnvRunner can act with
Recycled = Literal["easiest", "oldest"]  # rules for the copy to remove when there are too many


@dataclass(kw_only=True)
class LeagueConfig:
    """The keys of a league.

    The builder's own keys are in the table `options`.
    """

    builder: str = "self_play"
    """Builder that decides how the league grows and draws line-ups: self_play, self_play_window,
    fictitious, alphastar, rllib, none, or "package.module:Class", a subclass of
    juggler.LeagueBuilder."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keys of the builder."""

    teams: list[list[str]] = field(default_factory=list)
    """Lists of agents that one player plays together. Every other agent is its own team. With a
    gateway, the lists name every agent."""

    fixed: list[str] = field(default_factory=list)
    """Players that never learn: ids of modules, or random."""

    decay: float = 0.99
    """Factor on the earlier results of a pair of players at each of their games; 1: nothing is
    forgotten.
    """

    min_games: int = 8
    """Number of games of a pair before its win rate counts; until then, it is 0.5."""

    evaluation_probability: float = 0.05
    """Probability that a match is between two players with fewer than min_games games against each
    other."""

    draw_margin: float = 0.0
    """Difference of returns up to which a game is a draw."""

    max_historical: int = 50
    """Maximum number of copies, up to 500."""

    recycled: Recycled = "easiest"
    """Copy to remove when there are too many: the oldest, or the easiest, whose toughest main
    beats it most often. The newest copy of each player stays if possible."""

    max_learning: int = 32
    """Maximum number of players that learn at once, up to 64. A builder that asks for more is
    refused."""

    def validate(self) -> None:
        """Check the ranges, or raise a ValueError that names a key."""
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay = {self.decay!r}: must be above 0, and at most 1")
        if not 0 <= self.draw_margin < math.inf:
            raise ValueError(f"draw_margin = {self.draw_margin!r}: must be at least 0")
        if not 0 <= (share := self.evaluation_probability) <= 0.5:
            raise ValueError(f"evaluation_probability = {share!r}: must be from 0 to 0.5")
        for key, most in (
            ("min_games", math.inf),
            ("max_historical", MOST_HISTORICAL),
            ("max_learning", MOST_LEARNING),
        ):
            if (value := getattr(self, key)) < 1:
                raise ValueError(f"{key} = {value!r}: must be a whole number of at least 1")
            if value > most:
                raise ValueError(f"{key} = {value}: must be at most {most}")
        # A return belongs to one side.
        agents = [agent for team in self.teams for agent in team]
        if not all(self.teams) or len(set(agents)) < len(agents):
            raise ValueError(f"teams = {self.teams}: each needs agents, and no agent may be in two")
        if len(set(self.fixed)) < len(self.fixed):
            raise ValueError(f"fixed = {self.fixed}: names a player twice")
        self.make_builder()

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> LeagueConfig:
        """Read a table of keys.

        Raises:
            ValueError: the table has an unknown key or a wrong value; names it.
        """
        builder = find_builder(table.get("builder", cls.builder))
        of_builder = {each.name for each in fields(builder)} - {each.name for each in fields(cls)}
        for key in table:
            if key in of_builder:
                raise ValueError(f"league has no key {key!r}: it is a key of its table options")
        must_be_keys(table, cls, "league")
        hints = get_type_hints(cls)
        config = cls(**{key: of_type(key, value, hints[key]) for key, value in table.items()})
        config.validate()
        return config

    def make_builder(self) -> LeagueBuilder:
        """Make the builder that the keys name.

        Raises:
            ValueError: there is no such builder, or it has no such key, or a value is wrong.
        """
        return make_builder(self.builder, self.options)

    def sides(self, agents: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Return the agents on each side: teams, then single agents.

        Raises:
            ValueError: an agent of a team is not in the environment.
        """
        teams = [tuple(team) for team in self.teams]
        in_teams = {agent for team in teams for agent in team}
        for agent in in_teams - set(agents):
            raise ValueError(f"teams: no agent is called {agent!r}{nearest(agent, agents)}")
        sides = (*teams, *((agent,) for agent in agents if agent not in in_teams))
        if len(sides) < 2:
            raise ValueError("teams: all agents are in one team, so there is no opponent")
        return sides
