"""Base class of builders, which pair players and grow a league."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from juggler.driver.league.results import LeagueResults
from juggler.driver.league.roster import (
    LEAGUE_EXPLOITER,
    MAIN,
    MAIN_EXPLOITER,
    AddPlayer,
    BuilderCommand,
)


@dataclass(frozen=True, slots=True)
class Pairing:
    """The player for which a match is held, and its possible opponents.

    Attributes:
        home: the player for which the match is held.
        opponents: by player, its weight. Each other side of the match draws one of them. A player
            that plays against itself is its own opponent.
        branch: name of the rule that chose the opponents, for people.
    """

    home: str
    opponents: Mapping[str, float]
    branch: str = "uniform"


@dataclass(kw_only=True)
class LeagueBuilder:
    """Base class: builds a league while it trains; adds no players later.

    A subclass overrides methods. It keeps no state: its decisions follow from the results, with
    randomness from `results.random`. So a league that continues from a checkpoint does what it
    would have done with the same results.

    ```python
    @dataclass(kw_only=True)
    class BeatThePast(LeagueBuilder):
        every: int = 100_000  # steps between copies

        def build(self, results):
            for player_id in results.players("main"):
                if results.player(player_id).phase_steps >= self.every:
                    yield FreezePlayer(player_id)

        def match(self, results):
            home = results.random.choice(results.players("main"))
            past = results.players(learning=False)
            if not past or results.random.random() < 0.5:
                return Pairing(home, {home: 1.0}, "self-play")
            return Pairing(home, results.pfsp(home, past, "squared"), "past")
    ```
    """

    mains: int = 1
    """Number of players with the role main, which learn from the beginning."""

    def __post_init__(self) -> None:
        self.check_at_least("mains", 1)

    def initial(self) -> Iterable[BuilderCommand]:
        """Return commands for the first players; at least one of them learns."""
        return [AddPlayer(f"main-{number}", MAIN) for number in range(self.mains)]

    def build(self, results: LeagueResults) -> Iterable[BuilderCommand]:
        """Return changes to make now; called repeatedly while the league trains."""
        return []

    def match(self, results: LeagueResults) -> Pairing:
        """Return the next match; at least one learning player can play."""
        home = results.random.choice(results.players(learning=True))
        others = [player for player in results.players() if player != home]
        return Pairing(home, dict.fromkeys(others or [home], 1.0))

    def check_at_least(self, key: str, least: int) -> None:
        """Check that a key is a whole number of at least `least`.

        Raises:
            ValueError: the value is not a whole number, or too small.
        """
        value: Any = getattr(self, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{key} = {value!r}: must be a whole number of at least {least}")

    def check_fractions(self, *keys: str) -> None:
        """Check that keys are numbers from 0 to 1.

        Raises:
            ValueError: a value is not a number from 0 to 1.
        """
        for key in keys:
            value: Any = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{key} = {value!r}: must be a number from 0 to 1")

    def _check_sum(self, one: str, other: str) -> None:
        """Check that two probabilities add up to at most 1.

        Raises:
            ValueError: they add up to more.
        """
        first, second = getattr(self, one), getattr(self, other)
        if first + second > 1:
            total = f"{first} + {second} = {first + second:g}"
            raise ValueError(f"{one} and {other} must add up to at most 1, not {total}")


def exploiters(of_mains: int, of_leagues: int) -> list[AddPlayer]:
    """Return commands that add exploiters of mains and of the whole league."""
    counts = ((MAIN_EXPLOITER, of_mains), (LEAGUE_EXPLOITER, of_leagues))
    return [
        AddPlayer(f"{role}-{number}", role) for role, count in counts for number in range(count)
    ]
