"""Check the values of Discrete, MultiDiscrete and MultiBinary spaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from juggler.runtime.wire.trees import Path, path_name


class OutsideSpace(ValueError):
    """An observation holds a number that is not in its space.

    Attributes:
        row: row of the observation in its batch.
        what: the reason, for a message.
    """

    def __init__(self, row: int, what: str) -> None:
        super().__init__(f"an observation{what}")
        self.row = row
        self.what = what


class Choice(NamedTuple):
    """A Discrete, MultiDiscrete or MultiBinary leaf of a space.

    Attributes:
        path: of the leaf.
        space: of the leaf.
        first, last: min and max of its numbers: [...], or one number for all.
    """

    path: Path
    space: Space[Any]
    first: Any
    last: Any

    def outside(self, array: NDArray[Any]) -> tuple[int, ...] | None:
        """Find the index of the first number outside the space, if any.

        Args:
            array: [*leading, ...] values of the leaf.
        """
        if not array.size:
            return None
        if isinstance(self.first, int) and array.min() >= self.first and array.max() <= self.last:
            return None
        beyond = (array < self.first) | (array > self.last)  # [*leading, ...]
        if not beyond.any():
            return None
        return tuple(int(each) for each in np.unravel_index(beyond.argmax(), beyond.shape))

    def told(self, number: Any) -> str:
        """Describe a number outside the space, for a message."""
        at = f" at {path_name(self.path)}" if self.path else ""
        return f"{at} holds {number}, which is not in its space {self.space}"

    def require(self, array: NDArray[Any]) -> None:
        """
        Raises:
            OutsideSpace: the values [B, ...] hold a number outside the space.
        """
        if (found := self.outside(array)) is not None:
            raise OutsideSpace(found[0], self.told(array[found]))


def choices_of(leaves: Iterable[tuple[Path, Space[Any]]]) -> list[Choice]:
    """Select the Discrete, MultiDiscrete and MultiBinary leaves of a space."""
    bounds = ((path, space, *bounds_of_choices(space)) for path, space in leaves)
    return [Choice(*each) for each in bounds if each[2] is not None]


def find_outside(choices: Iterable[Choice], tree: Any) -> tuple[tuple[int, ...], str] | None:
    """Find a tree's first number outside its space: index and reason.

    Args:
        choices: the choices of the tree's space.
        tree: [*leading, ...] values.
    """
    for choice in choices:
        array: Any = tree
        for key in choice.path:
            array = array[key]
        if (found := choice.outside(array)) is not None:
            return found, choice.told(array[found])
    return None


def bounds_of_choices(space: Space[Any]) -> tuple[Any, Any]:
    """Return min and max of a Discrete, MultiDiscrete or MultiBinary space.

    For any other space, both are None.
    """
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    return None, None
