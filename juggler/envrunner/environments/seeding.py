"""Derives every random generator of an EnvRunner from its seed."""

from __future__ import annotations

import random

import numpy as np

# The noise of actions has the key 0.
_ENVIRONMENTS, _PROCESS, _MODULES, _LINE_UPS, _PLAYERS, _SESSIONS = 1, 2, 3, 4, 5, 6


def seed_process(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch.

    User code may draw from them.
    """
    import torch  # the rest of this file is for processes without it

    sequence = np.random.SeedSequence(seed, spawn_key=(_PROCESS,))
    for_python, for_numpy, for_torch = sequence.generate_state(3).tolist()
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.manual_seed(for_torch)


def module_seeds(seed: int, count: int) -> list[int]:
    """Return a different seed for the noise of each module."""
    sequence = np.random.SeedSequence(seed, spawn_key=(_MODULES,))
    return [int(each) >> 1 for each in sequence.generate_state(count, np.uint64)]


def player_seed(seed: int, number: int) -> int:
    """Return the seed for the noise of the n-th player."""
    sequence = np.random.SeedSequence(seed, spawn_key=(_PLAYERS, number))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def line_up_generator(seed: int, env: int, episode: int) -> np.random.Generator:
    """Make the generator of one episode of one environment."""
    sequence = np.random.SeedSequence(seed, spawn_key=(_LINE_UPS, env, episode))
    return np.random.default_rng(sequence)


def session_seed(seed: int, place: int, number: int) -> int:
    """Return the first of a simulator's seeds, below 2**31."""
    sequence = np.random.SeedSequence(seed, spawn_key=(_SESSIONS, place, number))
    return int(sequence.generate_state(1)[0]) >> 1


def environment_seeds(seed: int, count: int) -> list[int]:
    """Return a different seed for each environment of an EnvRunner.

    They are below 2**31, since simulators in C++ often take no larger ones.
    """
    seeds: dict[int, None] = {}
    sequence = np.random.SeedSequence(seed, spawn_key=(_ENVIRONMENTS,))
    while len(seeds) < count:
        for child in sequence.spawn(count - len(seeds)):
            seeds[int(child.generate_state(1)[0]) >> 1] = None
    return list(seeds)
