"""How the players of a league do, for those who watch a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from juggler.driver.league.league import League
from juggler.driver.league.ratings import elo, nash_averaging
from juggler.driver.league.results import LeagueResults
from juggler.driver.league.roster import Player

_MOST_TOLD = 32  # players
_MOST_KINDS = 64
_MOST_IN_EQUILIBRIA = 128  # players: more take seconds, in which the driver does nothing else
_SHARE = 0.02  # of the driver's time, that ratings may take


@dataclass(frozen=True, slots=True)
class Standing:
    """Of a player that learns.

    Attributes:
        player_id: its id.
        role: of it.
        elo: its rating. The mean over all players that can play is 0.
        win_rate: against all its opponents together; None: it has not played against others.
        win_rate_low, win_rate_high: the 95 % Wilson interval of the win rate; likewise.
        nash: its probability in the Nash equilibrium over all players that can play; None: it came
            after the last rating, or there are more than 128, of which that would take too long.
        steps: that it was trained on.
        copies: of it, so far.
        resets: how often it began anew.
    """

    player_id: str
    role: str
    elo: float
    win_rate: float | None
    win_rate_low: float | None
    win_rate_high: float | None
    nash: float | None
    steps: int
    copies: int
    resets: int


@dataclass(frozen=True, slots=True)
class Standings:
    """
    Attributes:
        players: how many can play.
        historical: how many of them are frozen.
        learning: those that learn; at most 32.
        kinds: for two roles, as in "main, historical": games, and the win rate of the first.
    """

    players: int
    historical: int
    learning: tuple[Standing, ...]
    kinds: dict[str, dict[str, float]]

    def line(self) -> dict[str, Any]:
        """For a line of metrics."""
        told = {each.player_id: asdict(each) for each in self.learning}
        for each in told.values():
            del each["player_id"], each["role"]
        return {
            "players": self.players,
            "historical": self.historical,
            "learning": told,
            "kinds": self.kinds,
        }


class LeagueStandings:
    """Rates the players, and not more often than that takes 2 % of the time.

    Args:
        league: whose players.
        clock: in seconds.
    """

    def __init__(self, league: League, clock: Callable[[], float] = time.monotonic) -> None:
        self._league, self._clock = league, clock
        self._ratings: dict[str, float] = {}
        self._equilibrium: dict[str, float] = {}
        self._next = float("-inf")

    def now(self) -> Standings:
        """The league as it is. Ratings of many players may be some seconds old."""
        roster, results = self._league.roster, self._league.results()
        playing = results.players()
        self._rate(playing)
        learning = [each for each in roster.learners() if each.plays][:_MOST_TOLD]
        return Standings(
            len(playing),
            sum(not roster.players[each].learning for each in playing),
            tuple(self._standing(each, results) for each in learning),
            self._kinds(),
        )

    def _standing(self, player: Player, results: LeagueResults) -> Standing:
        name = player.player_id
        rate = results.overall_win_rate(name, 1)
        low, high = (None, None) if rate is None else results.overall_interval(name)
        return Standing(
            player_id=name,
            role=player.role,
            elo=self._ratings.get(name, 0.0),
            win_rate=rate,
            win_rate_low=low,
            win_rate_high=high,
            nash=self._equilibrium.get(name),
            steps=player.steps,
            copies=player.copies,
            resets=player.life,
        )

    def _rate(self, playing: list[str]) -> None:
        before = self._clock()
        if before < self._next:
            return
        payoffs = self._league.payoffs
        self._ratings, self._equilibrium = elo(payoffs, playing), {}
        if len(playing) <= _MOST_IN_EQUILIBRIA:
            self._equilibrium, _ = nash_averaging(payoffs, playing)
        after = self._clock()
        self._next = after + (after - before) / _SHARE

    def _kinds(self) -> dict[str, dict[str, float]]:
        found = {}
        for each in list(self._league.payoffs.kinds.values())[:_MOST_KINDS]:
            games = each.wins + each.draws + each.losses
            # The role that learns comes first, as people ask for it.
            turned = each.first == "historical" or each.first == "fixed"
            names = (each.second, each.first) if turned else (each.first, each.second)
            points = (each.losses if turned else each.wins) + each.draws / 2
            found[", ".join(names)] = {"games": games, "win_rate": points / games}
        return found
