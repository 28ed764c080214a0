"""Finds numbers of a batch of episodes that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.trees import Tree, flatten

#: The largest reward. Learners square returns and gradients in float32. At a discount of 0.9999,
#: rewards of this size have a return of 1e16. A sum of a million squares of that is still finite.
MOST_REWARD: Final = float(np.float32(1e12))
TOO_LARGE: Final = f"scale rewards to at most {MOST_REWARD:g}, so that squared returns are finite"

_STEP_COLUMNS = ("observations", "critic_observations", "action_logp", "rewards")
_FINAL_COLUMNS = ("final_observations", "final_critic_observations")
_LAST_COLUMNS = ("last_observations", "last_critic_observations")


class NotFinite(NamedTuple):
    """A number that is not finite.

    Attributes:
        step: of its row.
        row: of the batch.
        column: such as "rewards" or, in a Dict, "observations/camera".
        value: the number.
    """

    step: int
    row: int
    column: str
    value: float


def all_finite(batch: EpisodeBatch) -> bool:
    """Whether observations, rewards and log-probabilities are finite numbers."""
    names = (*_STEP_COLUMNS, *_FINAL_COLUMNS, *_LAST_COLUMNS)
    columns = (getattr(batch, name) for name in names)
    return all(np.isfinite(array).all() for column in columns for _, array in floats("", column))


def first_not_finite(batch: EpisodeBatch) -> NotFinite | None:
    """The first in time of those numbers that are not finite; None: all are."""
    # Step, order within it, row, column, number
    found: list[tuple[int, int, int, str, float]] = []
    for order, column in enumerate(_STEP_COLUMNS):
        for name, array in floats(column, getattr(batch, column)):
            rows, steps = np.nonzero(not_finite(array, 2))
            if len(rows):
                first = steps.argmin()
                step, row = int(steps[first]), int(rows[first])
                found.append((step, order, row, name, _first_in(array[row, step])))
    for column in _FINAL_COLUMNS:
        for name, array in floats(column, getattr(batch, column)):
            found += [
                (
                    int(batch.final_steps[k]),
                    4,
                    int(batch.final_rows[k]),
                    name,
                    _first_in(array[k]),
                )
                for k in np.flatnonzero(not_finite(array, 1))
            ]
    for column in _LAST_COLUMNS:
        for name, array in floats(column, getattr(batch, column)):
            if (rows := np.flatnonzero(not_finite(array, 1))).size:
                row = int(rows[0])
                found.append((batch.steps - 1, 5, row, name, _first_in(array[row])))
    if not found:
        return None
    step, _, row, name, value = min(found)
    return NotFinite(step, row, name, value)


def floats(name: str, column: Tree) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the floating-point arrays of a column with their names."""
    for path, array in flatten(column):
        if array.dtype.kind == "f":
            yield "/".join((name, *path)), array


def not_finite(array: NDArray[Any], dimensions: int) -> NDArray[np.bool_]:
    """Tell which entries, by the leading dimensions, hold a number that is not finite."""
    bad = ~np.isfinite(array)
    flags: NDArray[np.bool_] = bad.any(axis=tuple(range(dimensions, bad.ndim)))
    return flags


def _first_in(array: NDArray[Any]) -> float:
    """The first number that is not finite in an array [...] that has one."""
    numbers = np.asarray(array)
    return float(numbers[~np.isfinite(numbers)][0])
