"""Prioritized fictitious self-play: draw opponents by their difficulty.

O. Vinyals et al., Grandmaster level in StarCraft II using multi-agent reinforcement learning, 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from juggler.runtime.modules.import_by_name import found
from juggler.runtime.near_matches import nearest

#: Weight of an opponent as a function of the win rate against it, by name.
WEIGHTINGS: dict[str, Callable[[float], float]] = {
    "squared": lambda rate: (1 - rate) ** 2,  # the hard ones
    "variance": lambda rate: rate * (1 - rate),  # opponents at its level
    "linear": lambda rate: 1 - rate,
    "linear_capped": lambda rate: min(0.5, 1 - rate),  # opponents that it does not beat yet
    "uniform": lambda _: 1.0,
}

#: The name of a weighting, "package.module:function", or a function from win rate to weight.
Weighting = str | Callable[[float], float]

_NOTHING = 1e-10


def find_weighting(weighting: Weighting, key: str = "weighting") -> Callable[[float], float]:
    """Return the weighting of this name.

    Raises:
        ValueError: there is no weighting of that name.
    """
    if callable(weighting):
        return weighting
    if ":" in weighting:
        return found(weighting, key)
    if weighting not in WEIGHTINGS:
        raise ValueError(
            f"{key} = {weighting!r} is not known"
            + nearest(weighting, WEIGHTINGS, own="name your own as 'package.module:function'")
        )
    return WEIGHTINGS[weighting]


def pfsp(win_rates: Mapping[str, float], weighting: Weighting) -> dict[str, float]:
    """Return the probability of each opponent.

    Args:
        win_rates: win rates against each opponent, from 0 to 1.
        weighting: the weighting. If all weights are 0, as with "squared" against opponents that
            are always beaten, all opponents are equally likely.

    Raises:
        ValueError: there is no such weighting, or a weight is negative or not finite.
    """
    weigh = find_weighting(weighting)
    weights = {opponent: float(weigh(rate)) for opponent, rate in win_rates.items()}
    for opponent, weight in weights.items():
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(
                f"the weight of {opponent} is {weight} at a win rate of {win_rates[opponent]:.3f}: "
                "a weighting must return finite numbers of at least 0"
            )
    total = math.fsum(weights.values())
    if total < _NOTHING or not math.isfinite(total):
        return dict.fromkeys(weights, 1 / len(weights)) if weights else {}
    return {opponent: weight / total for opponent, weight in weights.items()}
