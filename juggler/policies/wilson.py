"""How sure a rate is that was seen in a number of games."""

from __future__ import annotations

import math

_Z = 1.959964  # for 95 %


def wilson(wins: float, games: float) -> tuple[float, float]:
    """The Wilson score interval of 95 % of a rate: lower and upper bound, (0, 1) without games.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.

    Args:
        wins: need not be a whole number.
        games: likewise; at least `wins`.
    """
    if games <= 0:
        return 0.0, 1.0
    rate, share = wins / games, _Z * _Z / games
    middle = (rate + share / 2) / (1 + share)
    half = _Z * math.sqrt(max(rate * (1 - rate), 0.0) / games + share / (4 * games)) / (1 + share)
    return max(middle - half, 0.0), min(middle + half, 1.0)
