"""A builder's read-only view of the league: players and results."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.pfsp import Weighting, pfsp
from juggler.driver.league.roster import MAIN, Player, Roster
from juggler.policies.wilson import wilson


class LeagueResults:
    """The current league.

    Args:
        roster: its players.
        payoffs: their results.
        random: for random decisions. It depends only on the seed of the run and the id of the
            match, or the number of calls of `build`.
    """

    def __init__(self, roster: Roster, payoffs: Payoffs, random: Random) -> None:
        self._roster, self._payoffs, self.random = roster, payoffs, random

    def player(self, player_id: str) -> Player:
        """
        Raises:
            ValueError: the league has no such player, or has retired it.
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
        """Return ids of players that can play now, oldest first.

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
        """Return players with the role "main" that can play now."""
        return self.players(MAIN)

    @property
    def steps(self) -> int:
        """Steps trained on, summed over all players."""
        return sum(player.steps for player in self._roster.players.values())

    def win_rate(self, player_id: str, other: str) -> float:
        """Return the win rate from 0 to 1, 0.5 at first."""
        return self._payoffs.win_rate(player_id, other)

    def least_win_rate(self, player_id: str, others: Iterable[str]) -> float | None:
        """Return the win rate against the toughest opponent; None without opponents."""
        return min((self.win_rate(player_id, other) for other in others), default=None)

    def games(self, player_id: str, other: str) -> int:
        """Return how many games the two have played."""
        return self._payoffs.games(player_id, other)

    def interval(self, player_id: str, other: str) -> tuple[float, float]:
        """Return the 95 % Wilson interval of the win rate."""
        return self._payoffs.interval(player_id, other)

    def overall_win_rate(self, player_id: str, min_games: int) -> float | None:
        """Return the win rate over all opponents; None below `min_games` games."""
        rivals = self._rivals(player_id)
        if sum(self.games(player_id, other) for other in rivals) < max(min_games, 1):
            return None
        points, games = self._payoffs.points(player_id, rivals)
        return points / games

    def overall_interval(self, player_id: str) -> tuple[float, float]:
        """Return the overall win rate's 95 % Wilson interval."""
        return wilson(*self._payoffs.points(player_id, self._rivals(player_id)))

    def _rivals(self, player_id: str) -> list[str]:
        """Return a player's opponents so far."""
        pairs = [pair for pair in self._payoffs.pairs if player_id in pair]
        return [other for pair in pairs for other in pair if other != player_id]

    def pfsp(
        self, player_id: str, opponents: Iterable[str], weighting: Weighting
    ) -> dict[str, float]:
        """Return the probability of each opponent, from the player's win rates."""
        rates = {other: self.win_rate(player_id, other) for other in opponents}
        return pfsp(rates, weighting)
