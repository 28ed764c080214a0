"""The share of chosen numbers outside of the bounds of an action space."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

from juggler.runtime.connectors.leaves import at
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.structures import space_leaves

#: The metric's name.
CLIPPED: Final = "clipped_actions"
_NEARLY_ALL = 0.9
_ROUNDING = 1e-5  # of a bound, or of 1 for a smaller one


class ClippedActions:
    """Measures how much of a module's actions is clipped to the bounds of a Box.

    Args:
        module_id: of the module, for the note.
        action_space: in which the policy acts.
    """

    def __init__(self, module_id: str, action_space: gymnasium.Space[Any]) -> None:
        self._module_id = module_id
        boxes = {
            path: leaf
            for path, leaf in space_leaves(action_space)
            if isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f"
        }
        self._bounds = {}
        for path, box in boxes.items():
            if (box.bounded_below | box.bounded_above).any():
                low = box.low - _ROUNDING * np.maximum(1, np.abs(box.low))  # [...]
                high = box.high + _ROUNDING * np.maximum(1, np.abs(box.high))  # [...]
                self._bounds[path] = low, high
        # A policy's actions are about that large, so that those outside were learned.
        self._suits = all(((box.low == -1) & (box.high == 1)).all() for box in boxes.values())

    def share(self, batches: Iterable[EpisodeBatch]) -> float | None:
        """The share of the numbers in live actions; None: there are none with bounds."""
        outside = numbers = 0
        for batch in batches:
            for path, (low, high) in self._bounds.items():
                actions = at(batch.actions, path)[batch.live]  # [live steps, ...]
                outside += int(np.count_nonzero((actions < low) | (actions > high)))
                numbers += actions.size
        return outside / numbers if numbers else None

    def note(self, share: float) -> str:
        """A warning, once; "": nothing is wrong.

        Args:
            share: as `share` returned it.
        """
        if self._suits or share < _NEARLY_ALL:
            return ""
        self._suits = True
        return (
            f"found {share:.0%} of the numbers in actions of module {self._module_id!r} outside of "
            "the bounds of the action space: all of them become a bound, and little can be "
            'learned so. Set connectors.module_to_env = ["rescale_actions"], which maps [-1, 1] '
            "to finite bounds, or model.squash = true"
        )
