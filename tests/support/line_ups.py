"""Functions that say who plays, for runs of `support.pair_game:Pair`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def main_and_another(agents: Sequence[str], rng: np.random.Generator) -> Mapping[str, str]:
    """One agent is played by main, the other by main, old or random."""
    first = int(rng.integers(2))
    other = ("main", "old", "random")[int(rng.integers(3))]
    return {agents[first]: "main", agents[1 - first]: other}


def unknown_module(agents: Sequence[str], rng: np.random.Generator) -> Mapping[str, str]:
    return {agents[0]: "main", agents[1]: "mian"}
