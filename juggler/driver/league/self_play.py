"""Leagues of players that play against themselves and their past."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from juggler.driver.league.league_builder import LeagueBuilder, Pairing
from juggler.driver.league.results import LeagueResults
from juggler.driver.league.roster import MAIN, BuilderCommand, FreezePlayer


@dataclass(kw_only=True)
class SelfPlay(LeagueBuilder):
    """Each main plays against itself.

    This is best in games where the better player always wins. Train with entropy, and let it fall.
    """

    def match(self, results: LeagueResults) -> Pairing:
        home = results.random.choice(results.players(learning=True))
        return Pairing(home, {home: 1.0}, "self-play")


@dataclass(kw_only=True)
class Fictitious(LeagueBuilder):
    """Each main plays against all of its copies, equally often.

    The average over time converges, the latest policy does not.
    """

    save_steps: int = 100_000
    """Steps between copies of a main. The first copy is of the initial policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least("save_steps", 1)

    def initial(self) -> Iterable[BuilderCommand]:
        mains = list(super().initial())
        return [*mains, *(FreezePlayer(main.player_id) for main in mains)]

    def build(self, results: LeagueResults) -> Iterable[BuilderCommand]:
        for main in results.players(MAIN, learning=True):
            if results.player(main).phase_steps >= self.save_steps:
                yield FreezePlayer(main)

    def match(self, results: LeagueResults) -> Pairing:
        home = results.random.choice(results.players(learning=True))
        past = self.past(home, results)
        if not past:
            return Pairing(home, {home: 1.0}, "self-play")
        return Pairing(home, dict.fromkeys(past, 1.0), "past")

    def past(self, home: str, results: LeagueResults) -> list[str]:
        """Return the copies that a main may play against now."""
        return results.players(parent=home)


@dataclass(kw_only=True)
class SelfPlayWindow(Fictitious):
    """Each main plays against itself or one of its newest copies.

    ML-Agents does the same.

    Opponents are drawn for each match, so they do not change at fixed steps.
    """

    window: int = 10
    """Number of newest copies that may be drawn."""

    latest_probability: float = 0.5
    """Probability that a main plays against itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least("window", 1)
        self.check_fractions("latest_probability")

    def past(self, home: str, results: LeagueResults) -> list[str]:
        if results.random.random() < self.latest_probability:
            return []
        return super().past(home, results)[-self.window :]
