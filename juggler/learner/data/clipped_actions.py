"""Measure the share of action values outside an action space's bounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

from juggler.runtime.connectors.leaves import at
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.structures import has_bounds, space_leaves

#: Name of the metric.
CLIPPED: Final = "clipped_actions"
_NEARLY_ALL = 0.9
_ROUNDING = 1e-5  # relative to a bound, or to 1 if the bound is smaller


class ClippedActions:
    """Measures the share of a module's action values that are clipped.

    Args:
        module_id: id of the module, for the warning.
        action_space: action space of the policy.
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
            if np.any(has_bounds(box)):
                low = box.low - _ROUNDING * np.maximum(1, np.abs(box.low))  # [...]
                high = box.high + _ROUNDING * np.maximum(1, np.abs(box.high))  # [...]
                self._bounds[path] = low, high
        # A new policy's actions have about the size of these bounds, so it has learned larger ones.
        self._suits = all(((box.low == -1) & (box.high == 1)).all() for box in boxes.values())

    def share(self, batches: Iterable[EpisodeBatch]) -> float | None:
        """Return the share of clipped values; None: no live action has bounds."""
        outside = numbers = 0
        for batch in batches:
            for path, (low, high) in self._bounds.items():
                actions = at(batch.actions, path)[batch.live]  # [live steps, ...]
                outside += int(np.count_nonzero((actions < low) | (actions > high)))
                numbers += actions.size
        return outside / numbers if numbers else None

    def note(self, share: float) -> str:
        """Return a warning, once; "": nothing to warn about.

        Args:
            share: the result of `share`.
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
