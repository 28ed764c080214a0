"""Win rates: decayed results of each pair of players, and counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from juggler.policies.wilson import wilson


@dataclass(slots=True)
class Pair:
    """The results of two players, or of two kinds of players.

    Attributes:
        first, second: their ids, in alphabetical order.
        wins, draws, losses: of the first. Of players, they decay with each later result.
    """

    first: str
    second: str
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

    Args:
        decay: above 0, at most 1; with 1 nothing is forgotten.
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
        """Book one result: 1, a win; 0, a draw; -1, a loss.

        A match against itself does not count.
        """
        if player == other:
            return
        _book(self.pairs, player, other, result, self._decay)

    def book_kinds(self, kind: str, other: str, result: int) -> None:
        """Count one result between players of these kinds."""
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
        """Return the number of all games of the two."""
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
        """Return the win rate from 0 to 1, 0.5 at first.

        `win_rate(a, b) + win_rate(b, a)` is 1.
        """
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
