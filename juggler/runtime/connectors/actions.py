"""The connectors clip_actions and rescale_actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.connectors.connector import ActionConnector, Space
from juggler.runtime.connectors.leaves import LeafFunctions, beside, space_with
from juggler.runtime.wire.structures import has_bounds, space_leaves, two_bounds


class ClipActions(ActionConnector):
    """Clips numbers to the bounds of their Box, and leaves everything else alone."""

    takes_tensors = True

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        self._functions = LeafFunctions(
            {
                path: _Clip(leaf)
                for path, leaf in space_leaves(action_space)
                if isinstance(leaf, spaces.Box) and np.any(has_bounds(leaf))
            }
        )
        self.idle = not self._functions.functions
        super().__init__(observation_space, action_space)

    def __call__(self, actions: Any) -> Any:
        return self._functions(actions)

    def undo(self, actions: Any) -> Any:
        return actions


class RescaleActions(ActionConnector):
    """Maps the policy's actions in [-1, 1] to the environment's bounds.

    This applies to each number of a float Box with two finite bounds. A bound of 1e30 or more
    counts as infinite. All other numbers stay as they are. Actions beyond [-1, 1] become a bound.
    """

    takes_tensors = True

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        rescaled = {
            path: _Rescale(leaf)
            for path, leaf in space_leaves(action_space)
            if isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f" and two_bounds(leaf).any()
        }
        self.idle = not rescaled
        self._functions = LeafFunctions(rescaled)
        self._undo = LeafFunctions({path: each.undo for path, each in rescaled.items()})
        leaves = {path: each.space for path, each in rescaled.items()}
        super().__init__(observation_space, space_with(action_space, leaves))

    def __call__(self, actions: Any) -> Any:
        return self._functions(actions)

    def undo(self, actions: Any) -> Any:
        return self._undo(actions)


class _Clip:
    def __init__(self, space: spaces.Box) -> None:
        self._low, self._high = space.low, space.high

    def __call__(self, actions: Any) -> Any:
        if isinstance(actions, Tensor):
            low, high = beside(actions, self._low), beside(actions, self._high)  # [...] both
            return torch.minimum(torch.maximum(actions.to(low.dtype), low), high)  # [N, ...]
        # Compute in the dtype of the bounds: a float64 bound, rounded to float32, may lie outside
        # itself.
        clipped: NDArray[Any] = np.maximum(actions, self._low, dtype=self._low.dtype)  # [N, ...]
        np.minimum(clipped, self._high, out=clipped)  # [N, ...]
        return clipped


class _Rescale:
    def __init__(self, space: spaces.Box) -> None:
        bounded = two_bounds(space)  # [...]
        low, high = space.low, space.high  # [...] both
        self.space = spaces.Box(
            np.where(bounded, -1, low).astype(low.dtype),
            np.where(bounded, 1, high).astype(low.dtype),
            dtype=low.dtype.type,
        )
        # Halve first, because the whole width may exceed the range of the dtype.
        half_low, half_high = np.where(bounded, low, -1) / 2, np.where(bounded, high, 1) / 2
        self._middle = (half_high + half_low).astype(low.dtype)  # [...] 0 where not bounded
        self._half_width = (half_high - half_low).astype(low.dtype)  # [...] 1 there
        self._fit = _Clip(space)  # rounding may exceed the bounds

    def __call__(self, actions: Any) -> Any:
        if isinstance(actions, Tensor):
            half = beside(actions, self._half_width)  # [...]
            middle = beside(actions, self._middle)  # [...]
            return self._fit(actions.to(half.dtype) * half + middle)  # [N, ...]
        scaled = np.multiply(actions, self._half_width, dtype=self._half_width.dtype)  # [N, ...]
        scaled += self._middle
        return self._fit(scaled)

    def undo(self, actions: Any) -> Any:
        """Actions from -1 to 1 [N, ...], where they are bounded. A bound that allows one number has
        a width of 0, and any action is as good."""
        width = np.where(self._half_width > 0, self._half_width, 1)  # [...]
        return (np.asarray(actions) - self._middle) / width  # [N, ...]
