"""The random numbers of a replay: what they begin with, and their state as an array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.trees import Tree

_WORD = (1 << 64) - 1


class Draws:
    """The random numbers of a replay, which begin anew whenever it discards all rows.

    They follow from a seed, from how often they have begun, and from the learner's rank in its
    group. A state has the first two. So a run that is resumed, whose processes have other seeds,
    draws what the run that went on draws.

    Attributes:
        generator: of the numbers; another one each time that they begin.
    """

    generator: np.random.Generator

    def __init__(self, seed: int, beginnings: int = 0, rank: int = 0) -> None:
        self._seed, self._beginnings, self._rank = seed, beginnings, rank
        self._begin()

    def begin_anew(self) -> None:
        """Begin with other numbers than each time before."""
        self._beginnings += 1
        self._begin()

    def draw_apart(self, rank: int, *, going_on: bool) -> None:
        """Draw other numbers than learners of other ranks: from here on, or from the beginning
        where nothing was drawn yet."""
        self._rank = rank
        if going_on:
            draw_apart(self.generator, rank)
        else:
            self._begin()

    def state(self, *, anew: bool) -> dict[str, Tree]:
        """What `restored` needs; `anew`: it is to begin as after `begin_anew`."""
        return {"seed": np.array(self._seed), "beginnings": np.array(self._beginnings + anew)}

    def restored(self, state: Mapping[str, Any]) -> Draws:
        """Those of such a state, for a learner of this rank; older versions say less in it."""
        seed = int(state.get("seed", self._seed))
        return Draws(seed, int(state.get("beginnings", 0)), self._rank)

    def _begin(self) -> None:
        self.generator = np.random.Generator(np.random.PCG64([self._seed, self._beginnings]))
        draw_apart(self.generator, self._rank)


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
