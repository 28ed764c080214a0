"""Checks that action masks and observations lie in their spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.connectors.leaves import at, holds_masks, observed_leaves
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import OutsideSpace, choices_of, find_outside, space_leaves
from juggler.runtime.wire.trees import Path, Tree, flatten, path_name


class LegalActions:
    """Checks action masks of Discrete and MultiDiscrete actions.

    Args:
        mask_space: of one environment's masks.
        action_space: of one environment's actions.
        during: the period in which errors count steps, such as "a fragment".

    Raises:
        ValueError: the masks do not fit the actions.
    """

    def __init__(self, mask_space: Space[Any], action_space: Space[Any], during: str) -> None:
        self._during = during
        actions = dict(space_leaves(action_space))
        self._starts: dict[Path, NDArray[np.intp]] = {}  # [choices] where each begins in the mask
        for path, mask in space_leaves(mask_space):
            if path not in actions:
                raise ValueError(
                    f"there is an action mask for {path_name(path)}, and no such action: masks "
                    f"must have the structure of the action space, {action_space}"
                )
            counts = _choices(actions[path])
            if counts is not None:
                if mask.shape != (sum(counts),):
                    raise ValueError(
                        f"the action mask for {actions[path]} has shape {list(mask.shape or ())}, "
                        f"not [{sum(counts)}]: one number, 0 or 1, for each choice"
                    )
                self._starts[path] = np.cumsum([0, *counts[:-1]])

    @classmethod
    def of(
        cls, observation_space: Space[Any], action_space: Space[Any], during: str
    ) -> LegalActions | None:
        """Build it from an observation space; None if observations hold no mask."""
        if not holds_masks(observation_space):
            return None
        return cls(at(observation_space, (ACTION_MASK,)), action_space, during)

    def require(self, masks: Any, step: int, over: NDArray[np.bool_] | None = None) -> None:
        """Check that every environment has a legal action.

        Args:
            masks: [N, n] each.
            step: of the fragment, for the error.
            over: [N] environments whose episode has ended, which need no legal action.

        Raises:
            EnvironmentFailed: a mask has no legal action.
        """
        for path, legal in self.has_legal_action(masks):
            if over is not None:
                legal |= over
            if not legal.all():
                which = f" for {path_name(path)}" if path else ""
                raise EnvironmentFailed(
                    f"environment {int(legal.argmin())}",
                    "step",
                    f"before step {step} of {self._during} its action mask has no legal action"
                    f"{which}: an episode without legal actions must end",
                )

    def require_zeros_and_ones(self, masks: Any) -> None:
        """Check that masks hold only 0 and 1.

        Args:
            masks: [N, T, n] each, of a whole fragment: checking one step would cost as much.

        Raises:
            EnvironmentFailed: a mask holds another number.
        """
        if found := find_non_binary(masks):
            (row, step, *_), what = found
            reason = f"before step {step} of {self._during} {what}"
            raise EnvironmentFailed(f"environment {row}", "step", reason)

    def has_legal_action(self, masks: Any) -> Iterator[tuple[Path, NDArray[np.bool_]]]:
        """Yield each discrete action's path, and which environments may act [N].

        Args:
            masks: [N, n] each.
        """
        for path, starts in self._starts.items():
            each = np.logical_or.reduceat(at(masks, path), starts, axis=-1)  # [N, choices]
            legal: NDArray[np.bool_] = np.asarray(each.all(-1))  # [N]
            yield path, legal


def find_non_binary(masks: Any) -> tuple[tuple[int, ...], str] | None:
    """Find the first non-binary number in masks [N, ...].

    Returns its index and the text of an error, or None.
    """
    for path, mask in flatten(masks):
        other = (mask != 0) & (mask != 1)  # [N, ...]
        if other.any():
            place = tuple(np.argwhere(other)[0].tolist())
            which = f" for {path_name(path)}" if path else ""
            return place, f"the action mask{which} has other numbers than 0 and 1: {mask[place]}"
    return None


def _choices(space: Space[Any]) -> list[int] | None:
    """Return the number of choices of each discrete action; None: not discrete."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.ravel()]
    return None


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
