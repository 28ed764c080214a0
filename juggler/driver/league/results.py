"""Results of a league's matches, and a builder's view of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from juggler.driver.league.pfsp import Weighting, pfsp
from juggler.driver.league.roster import MAIN, Player, Roster
from juggler.policies.wilson import wilson


@dataclass(slots=True)
class Pair:
    """The results of two players, or of two kinds of players."""

    first: str  # the ids are in alphabetical order
    second: str
    # Of the first. Of players, these numbers decay with each later result
    wins: float = 0.0
    draws: float = 0.0
    losses: float = 0.0
    games: int = 0  # total, without decay

    @property
    def weight(self) -> float:
        """Decayed number of games."""
        return self.wins + self.draws + self.losses


@dataclass(slots=True)
class Means:
    """Decayed means of a player's matches."""

    player_id: str
    matches: int = 0  # total, without decay
    weight: float = 0.0  # the decayed number of matches
    return_mean: float = 0.0  # of the sides that it played
    length_mean: float = 0.0  # in environment steps


class Payoffs:
    """The results of all pairs.

    Each new result of a pair multiplies its earlier results by `decay`. A draw counts as half a
    win. A pair with fewer than `min_games` games has the win rate 0.5, because little is known of
    it. Decayed numbers never exceed 1 / (1 - decay), so games are counted separately.
    """

    def __init__(
        self,
        decay: float,
        min_games: int,
        pairs: Iterable[Pair] = (),
        kinds: Iterable[Pair] = (),
        means: Iterable[Means] = (),
    ) -> None:
        self._decay, self.min_games = decay, min_games
        self.pairs = {(pair.first, pair.second): pair for pair in pairs}
        self.kinds = {(count.first, count.second): count for count in kinds}
        self.means = {mean.player_id: mean for mean in means}

    def book(self, player: str, other: str, result: int) -> None:
        """Book one result: 1, a win; 0, a draw; -1, a loss."""
        if player != other:
            _book(self.pairs, player, other, result, self._decay)

    def book_kinds(self, kind: str, other: str, result: int) -> None:
        """Book one result between players of these kinds."""
        _book(self.kinds, kind, other, result, decay=1.0)

    def book_match(self, player: str, side_return: float, length: int) -> None:
        """Book a player's return and the length of the match."""
        mean = self.means.setdefault(player, Means(player))
        mean.matches += 1
        mean.weight = mean.weight * self._decay + 1
        mean.return_mean += (side_return - mean.return_mean) / mean.weight
        mean.length_mean += (length - mean.length_mean) / mean.weight

    def forget(self, player: str) -> None:
        """Forget a player that has left, or has new weights."""
        self.pairs = {names: pair for names, pair in self.pairs.items() if player not in names}
        self.means.pop(player, None)

    def games(self, player: str, other: str) -> int:
        """Return how many games the two have played."""
        pair = self._pair(player, other)
        return pair.games if pair else 0

    def counts(self, player: str, other: str) -> tuple[float, float, float]:
        """Return decayed wins, draws and losses of the player against the other."""
        pair = self._pair(player, other)
        if pair is None:
            return 0.0, 0.0, 0.0
        if player == pair.first:
            return pair.wins, pair.draws, pair.losses
        return pair.losses, pair.draws, pair.wins

    def points(self, player: str, others: Iterable[str]) -> tuple[float, float]:
        """Return decayed points (0.5 for a draw) and games against these players."""
        counts = [self.counts(player, other) for other in others]
        return sum(wins + draws / 2 for wins, draws, _ in counts), sum(map(sum, counts))

    def win_rate(self, player: str, other: str) -> float:
        """Return the win rate from 0 to 1, 0.5 at first."""
        if self.games(player, other) < self.min_games:
            return 0.5
        wins, draws, losses = self.counts(player, other)
        if wins == losses:
            return 0.5
        fewer, more = sorted((wins, losses))
        rate = (fewer + draws / 2) / (fewer + draws + more)
        return rate if wins < losses else 1 - rate  # so that both add up to 1 exactly

    def interval(self, player: str, other: str) -> tuple[float, float]:
        """Return the 95 % Wilson interval of the win rate.

        Draws count as half a win and half a loss, and the decayed number of games as the number of
        games. Both make it wider than necessary.
        """
        wins, draws, losses = self.counts(player, other)
        return wilson(wins + draws / 2, wins + draws + losses)

    def _pair(self, player: str, other: str) -> Pair | None:
        return self.pairs.get((player, other) if player < other else (other, player))


def _book(
    pairs: dict[tuple[str, str], Pair], one: str, other: str, result: int, decay: float
) -> None:
    if one > other:
        one, other, result = other, one, -result
    pair = pairs.setdefault((one, other), Pair(one, other))
    pair.wins = pair.wins * decay + (result > 0)
    pair.draws = pair.draws * decay + (result == 0)
    pair.losses = pair.losses * decay + (result < 0)
    pair.games += 1


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
        """Return a player of the league.

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
