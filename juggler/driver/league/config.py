"""The keys of a league. No torch, because the driver reads this."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, get_args, get_type_hints

from juggler.driver.league.builder import LeagueBuilder
from juggler.driver.league.builders import (
    find_builder,
    make_builder,
    must_be_keys,
    of_type,
)
from juggler.runtime.nearest import nearest

#: More would not fit in a receipt, nor would an EnvRunner act with as many in good time.
MOST_HISTORICAL: Final = 500
#: An EnvRunner may act with no more modules that are trained.
MOST_LEARNING: Final = 64
#: Which copy goes when there are too many.
Recycled = Literal["easiest", "oldest"]


@dataclass(kw_only=True)
class LeagueConfig:
    """Who plays in a league, and what is counted.

    A builder has keys of its own, which are in the table `options`.
    """

    builder: str = "self_play"
    """What decides how the league grows and who plays whom: self_play, self_play_window,
    fictitious, alphastar, rllib, or none, which has players that learn and play against each other;
    or "package.module:Class", a class derived from juggler.LeagueBuilder."""

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

    evaluation_probability: float = 0.05
    """How often a match is one of two players that have played fewer than min_games games against
    each other, instead of one that the builder wants. So win rates of copies among themselves are
    known, too."""

    draw_margin: float = 0.0
    """A game is a draw if the returns of two teams differ by this or less."""

    max_historical: int = 50
    """How many copies are kept: at most 500."""

    recycled: Recycled = "easiest"
    """Which copy goes when there are too many. easiest: the one whose worst opponent among the
    mains beats it most often, the oldest of them first, so that what is hard for any main stays;
    oldest. The newest copy of each player stays while there are others."""

    max_learning: int = 32
    """How many players may learn at once: at most 64. A builder that asks for more is refused, and
    the league goes on without them."""

    def validate(self) -> None:
        """
        Raises:
            ValueError: a key is wrong; names it.
        """
        if not (_is_number(self.decay) and 0 < self.decay <= 1):
            raise ValueError(f"decay = {self.decay!r}: must be above 0, and at most 1")
        if not (_is_number(self.draw_margin) and 0 <= self.draw_margin < math.inf):
            raise ValueError(f"draw_margin = {self.draw_margin!r}: must be at least 0")
        share = self.evaluation_probability
        if not (_is_number(share) and 0 <= share <= 0.5):
            raise ValueError(f"evaluation_probability = {share!r}: must be from 0 to 0.5")
        for key in ("min_games", "max_historical", "max_learning"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{key} = {value!r}: must be a whole number of at least 1")
        for key, most in (("max_historical", MOST_HISTORICAL), ("max_learning", MOST_LEARNING)):
            if getattr(self, key) > most:
                raise ValueError(f"{key} = {getattr(self, key)}: must be at most {most}")
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
        builder = find_builder(table.get("builder", cls.builder))
        of_builder = {each.name for each in fields(builder)} - {each.name for each in fields(cls)}
        for key in table:
            if key in of_builder:
                raise ValueError(f"league has no key {key!r}: it is a key of its table options")
        must_be_keys(table, cls, "league")
        for key in ("options", "teams", "fixed"):
            if key in table:
                of_type(key, table[key], get_type_hints(cls)[key])
        config = cls(**table)
        config.validate()
        return config

    def make_builder(self) -> LeagueBuilder:
        """
        Raises:
            ValueError: there is no such builder, or it has no such key, or a value is wrong.
        """
        return make_builder(self.builder, self.options)

    def sides(self, agents: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """The agents of each side of a match: the teams, then everybody else alone.

        Raises:
            ValueError: an agent of a team is not in the environment.
        """
        teams = [tuple(team) for team in self.teams]
        in_teams = {agent for team in teams for agent in team}
        for agent in in_teams - set(agents):
            raise ValueError(f"teams: no agent is called {agent!r}{nearest(agent, agents)}")
        sides = (*teams, *((agent,) for agent in agents if agent not in in_teams))
        if len(sides) < 2:
            raise ValueError("teams: all agents are in one, and there is nobody to play against")
        return sides


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
