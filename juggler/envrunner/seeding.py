"""The streams of randomness that one seed of a runner becomes."""

from __future__ import annotations

import numpy as np

_NOISE, _ENVIRONMENTS = 0, 1


def noise_seed(seed: int) -> int:
    """For the noise that a policy acts with."""
    sequence = np.random.SeedSequence(seed, spawn_key=(_NOISE,))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def environment_seeds(seed: int, count: int) -> list[int]:
    """One for each environment of a runner, no two of them equal.

    Below 2**31: simulators written in C++ take no more.
    """
    seeds: dict[int, None] = {}
    sequence = np.random.SeedSequence(seed, spawn_key=(_ENVIRONMENTS,))
    while len(seeds) < count:
        for child in sequence.spawn(count - len(seeds)):
            seeds[int(child.generate_state(1)[0]) >> 1] = None
    return list(seeds)
