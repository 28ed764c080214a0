"""That action masks are made of 0 and 1, and leave every environment something to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.connectors.leaves import at, holds_masks
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import space_leaves
from juggler.runtime.wire.trees import Path, flatten, path_name

Space = gymnasium.Space[Any]


class LegalActions:
    """Finds action masks in which all is 0 for a Discrete action, or for one of MultiDiscrete ones.

    Args:
        mask_space: of the masks.
        action_space: what they are for.
        during: what steps are counted in, for people: "a fragment".

    Raises:
        ValueError: the masks do not fit the actions.
    """

    def __init__(self, mask_space: Space, action_space: Space, during: str) -> None:
        self._during = during
        actions = dict(space_leaves(action_space))
        self._starts: dict[Path, NDArray[np.intp]] = {}  # [choices] of each in the mask
        for path, mask in space_leaves(mask_space):
            if path not in actions:
                raise ValueError(
                    f"there is an action mask for {path_name(path)}, and no such action: masks "
                    f"must be laid out as actions are, which are in {action_space}"
                )
            counts = _choices(actions[path])
            if counts is not None:
                if mask.shape != (sum(counts),):
                    raise ValueError(
                        f"the action mask for {actions[path]} has shape {list(mask.shape or ())}, "
                        f"not [{sum(counts)}]: one number, 0 or 1, for each thing to choose"
                    )
                self._starts[path] = np.cumsum([0, *counts[:-1]])

    @classmethod
    def of(cls, observation_space: Space, action_space: Space, during: str) -> LegalActions | None:
        """None where observations hold no mask."""
        if not holds_masks(observation_space):
            return None
        return cls(at(observation_space, (ACTION_MASK,)), action_space, during)

    def require(self, masks: Any, step: int, over: NDArray[np.bool_] | None = None) -> None:
        """
        Args:
            masks: [N, ...]
            step: of the fragment, or of what else steps are counted in.
            over: [N] whose episode has ended, so that there is nothing to do.

        Raises:
            EnvironmentFailed: a mask has no legal action.
        """
        for path, legal in self.somewhere(masks):
            if over is not None:
                legal |= over
            if not legal.all():
                which = f" for {path_name(path)}" if path else ""
                raise EnvironmentFailed(
                    f"environment {int(legal.argmin())}",
                    "step",
                    f"before step {step} of {self._during} its action mask has no legal action"
                    f"{which}: an episode in which nothing can be done must end",
                )

    def require_zeros_and_ones(self, masks: Any) -> None:
        """
        Args:
            masks: [N, T, ...] of a whole fragment: those of a single step would cost as much.

        Raises:
            EnvironmentFailed: a mask has another number.
        """
        if found := other_number(masks):
            (row, step, *_), what = found
            said = f"before step {step} of {self._during} {what}"
            raise EnvironmentFailed(f"environment {row}", "step", said)

    def somewhere(self, masks: Any) -> Iterator[tuple[Path, NDArray[np.bool_]]]:
        """For each action that is one of several: its path, and where the masks leave it something
        to do [N]."""
        for path, starts in self._starts.items():
            each = np.logical_or.reduceat(at(masks, path), starts, axis=-1)  # [N, choices]
            legal: NDArray[np.bool_] = np.asarray(each.all(-1))  # [N]
            yield path, legal


def other_number(masks: Any) -> tuple[tuple[int, ...], str] | None:
    """Where masks [N, ...] first have another number than 0 and 1, and what to say of that; None:
    nowhere."""
    for path, mask in flatten(masks):
        other = (mask != 0) & (mask != 1)  # [N, ...]
        if other.any():
            place = tuple(np.argwhere(other)[0].tolist())
            which = f" for {path_name(path)}" if path else ""
            return place, f"the action mask{which} has other numbers than 0 and 1: {mask[place]}"
    return None


def _choices(space: Space) -> list[int] | None:
    """Among how many things each number of an action is one; None: nothing can be wrong."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.ravel()]
    return None
