"""The state of a generator of random numbers as an array, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORD = (1 << 64) - 1


def words_of(generator: np.random.Generator) -> NDArray[np.uint64]:
    """The state of a PCG64 as numbers [6]."""
    told: Any = generator.bit_generator.state
    state, increment = told["state"]["state"], told["state"]["inc"]
    words = [state & _WORD, state >> 64, increment & _WORD, increment >> 64]
    return np.array([*words, told["has_uint32"], told["uinteger"]], np.uint64)


def draw_apart(generator: np.random.Generator, rank: int) -> None:
    """Have a PCG64 go on elsewhere in its sequence: as far apart for each rank, so that those that
    had one state do not draw alike. That of rank 0 goes on as it would."""
    told: Any = generator.bit_generator
    if rank:  # a jump, even by nothing, would discard half of a number that is left from a draw
        told.state = told.jumped(rank).state


def go_on_from(generator: np.random.Generator, words: NDArray[np.uint64]) -> None:
    """Give a PCG64 the state that `words_of` told."""
    low, high, increment_low, increment_high, has_uint32, uinteger = map(int, words)
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": increment_high << 64 | increment_low},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
