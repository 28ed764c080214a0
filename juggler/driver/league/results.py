"""A builder's read-only view of the league: players and results."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.pfsp import Weighting, pfsp
from juggler.driver.league.roster import MAIN, Player, Roster
from juggler.policies.wilson import wilson


class LeagueResults:
    """The league as it is now.

    Args:
        roster: its players.
        payoffs: their results.
        random: for decisions by chance. It depends only on the seed of the run and
            the id of the match, or the number of times that the builder has been asked.
    """

    def __init__(self, roster: Roster, payoffs: Payoffs, random: Random) -> None:
        self._roster, self._payoffs, self.random = roster, payoffs, random

    def player(self, player_id: str) -> Player:
        """
        Raises:
            ValueError: the league has no such player, or no longer.
        """
        return self._roster[player_id]

    def players(
        self,
        role: str | None = None,
        *,
        learning: bool | None = None,
        parent: str | None = None,
        origin: str | None = None,
    ) -> list[str]:
        """Ids of players that can play now, in the order of birth.

        Args:
            role: only those with this role.
            learning: True: only players that learn; False: only frozen ones.
            parent: only copies of this player.
            origin: only players, or copies of players, with this role.
        """
        return [
            player.player_id
            for player in self._roster.present()
            if player.plays
            and role in (None, player.role)
            and learning in (None, player.learning)
            and parent in (None, player.parent)
            and origin in (None, player.origin)
        ]

    def mains(self) -> list[str]:
        """Players with the role "main" that can play now."""
        return self.players(MAIN)

    @property
    def steps(self) -> int:
        """Steps that all players together were trained on."""
        return sum(player.steps for player in self._roster.players.values())

    def win_rate(self, player_id: str, other: str) -> float:
        """From 0 to 1; 0.5 while they have played too few games."""
        return self._payoffs.win_rate(player_id, other)

    def least_win_rate(self, player_id: str, others: Iterable[str]) -> float | None:
        """Win rate against the hardest to beat; None: there are no others."""
        return min((self.win_rate(player_id, other) for other in others), default=None)

    def games(self, player_id: str, other: str) -> int:
        """How many games the two have played."""
        return self._payoffs.games(player_id, other)

    def interval(self, player_id: str, other: str) -> tuple[float, float]:
        """The 95 % Wilson interval of the win rate."""
        return self._payoffs.interval(player_id, other)

    def overall_win_rate(self, player_id: str, min_games: int) -> float | None:
        """Over all opponents together; None: it has played fewer games than that."""
        rivals = self._rivals(player_id)
        if sum(self.games(player_id, other) for other in rivals) < max(min_games, 1):
            return None
        points, games = self._payoffs.points(player_id, rivals)
        return points / games

    def overall_interval(self, player_id: str) -> tuple[float, float]:
        """The 95 % Wilson interval of it; (0, 1) without games."""
        return wilson(*self._payoffs.points(player_id, self._rivals(player_id)))

    def _rivals(self, player_id: str) -> list[str]:
        """Its opponents so far."""
        pairs = [pair for pair in self._payoffs.pairs if player_id in pair]
        return [other for pair in pairs for other in pair if other != player_id]

    def pfsp(
        self, player_id: str, opponents: Iterable[str], weighting: Weighting
    ) -> dict[str, float]:
        """The probability of each opponent, by how often the player beats it."""
        rates = {other: self.win_rate(player_id, other) for other in opponents}
        return pfsp(rates, weighting)
