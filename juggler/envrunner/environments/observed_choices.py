"""Check that observations are in their spaces before a learner refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymnasium import Space

from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.connectors.leaves import observed_leaves
from juggler.runtime.wire.structures import OutsideSpace, choices_of, find_outside
from juggler.runtime.wire.trees import Tree


class ObservedChoices:
    """Checks observations against Discrete, MultiDiscrete and MultiBinary spaces.

    Args:
        space: of an observation, as batches hold it. Action masks have their own checks.
        during: the period in which errors count steps, such as "a fragment".
    """

    def __init__(self, space: Space[Any], during: str) -> None:
        self._choices = choices_of(observed_leaves(space).items())
        self._during = during

    def __bool__(self) -> bool:
        """Return whether there is anything to check."""
        return bool(self._choices)

    def require(self, observations: Tree, place: Callable[..., tuple[int, int]]) -> None:
        """Check observations.

        Args:
            observations: [*leading, ...]
            place: returns the environment and step for a leading index.

        Raises:
            EnvironmentFailed: a number is outside its space.
        """
        if self._choices and (found := find_outside(self._choices, observations)):
            index, what = found
            raise self._failure(*place(*index), what)

    def through(
        self,
        connectors: Callable[[Any], Tree],
        observations: Any,
        place: Callable[[int], tuple[int, int]],
    ) -> Tree:
        """Apply connectors to observations [B, ...], with places as in `require`.

        Raises:
            EnvironmentFailed: a connector found a number outside its space.
        """
        try:
            return connectors(observations)
        except OutsideSpace as error:
            raise self._failure(*place(error.row), error.what) from None

    def _failure(self, row: int, step: int, what: str) -> EnvironmentFailed:
        reason = f"before step {step} of {self._during} its observation{what}"
        return EnvironmentFailed(f"environment {row}", "step", reason, lasting=True)
