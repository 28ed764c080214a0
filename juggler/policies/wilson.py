"""Decides games, and computes confidence intervals of win rates."""

from __future__ import annotations

import math

_Z = 1.959964  # for 95 %


def outcome(score: float, other: float, margin: float = 0.0) -> int:
    """Return the first side's outcome: 1, 0 (a draw) or -1.

    Args:
        score: the return of the first side.
        other: the return of the other side.
        margin: a game is a draw if the returns differ by this or less.
    """
    if abs(score - other) <= margin:
        return 0
    return 1 if score > other else -1


def wilson(wins: float, games: float) -> tuple[float, float]:
    """The 95 % Wilson interval of a rate; (0, 1) without games.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.

    Args:
        wins: number of wins, whole or not.
        games: number of games, at least `wins`.
    """
    if games <= 0:
        return 0.0, 1.0
    rate, share = wins / games, _Z * _Z / games
    middle = (rate + share / 2) / (1 + share)
    half = _Z * math.sqrt(max(rate * (1 - rate), 0.0) / games + share / (4 * games)) / (1 + share)
    return max(middle - half, 0.0), min(middle + half, 1.0)
