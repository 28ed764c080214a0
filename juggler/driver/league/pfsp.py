"""Prioritized fictitious self-play: draw opponents by their difficulty.

O. Vinyals et al., Grandmaster level in StarCraft II using multi-agent reinforcement learning, 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from juggler.runtime.modules.by_name import found
from juggler.runtime.nearest import nearest

#: By name, the weight of an opponent that is beaten at this rate.
WEIGHTINGS: dict[str, Callable[[float], float]] = {
    "squared": lambda rate: (1 - rate) ** 2,  # the hard ones
    "variance": lambda rate: rate * (1 - rate),  # those of its own level
    "linear": lambda rate: 1 - rate,
    "linear_capped": lambda rate: min(0.5, 1 - rate),  # opponents that it does not beat yet
    "uniform": lambda _: 1.0,
}

#: The name of a weighting, "package.module:function", or a function from win rate to weight.
Weighting = str | Callable[[float], float]

_NOTHING = 1e-10


def find_weighting(weighting: Weighting, key: str = "weighting") -> Callable[[float], float]:
    """
    Args:
        weighting: which one.
        key: of a configuration that names it.

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
            + nearest(
                weighting, WEIGHTINGS, own="one of your own is named as 'package.module:function'"
            )
        )
    return WEIGHTINGS[weighting]


def pfsp(win_rates: Mapping[str, float], weighting: Weighting) -> dict[str, float]:
    """The probability of each opponent.

    Args:
        win_rates: by opponent, how often it is beaten, from 0 to 1.
        weighting: gives each its weight. All are equally likely where the weights add up to
            nothing, as "squared" does against opponents that are always beaten.

    Raises:
        ValueError: there is no such weighting, or a weight is negative or not finite.
    """
    weigh = find_weighting(weighting)
    weights = {opponent: float(weigh(rate)) for opponent, rate in win_rates.items()}
    for opponent, weight in weights.items():
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(
                f"the weight of {opponent} is {weight} at a win rate of {win_rates[opponent]:.3f}: "
                "a weighting must give finite numbers of at least 0"
            )
    total = math.fsum(weights.values())
    if total < _NOTHING or not math.isfinite(total):
        return dict.fromkeys(weights, 1 / len(weights)) if weights else {}
    return {opponent: weight / total for opponent, weight in weights.items()}
