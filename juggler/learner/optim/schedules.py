"""Values that change with the steps trained on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


class Schedule:
    """A piecewise linear function of steps, constant before its first point and after its last.

    It is computed where the step counter lies, so that no update waits for a device.
    """

    def __init__(self, points: float | Sequence[tuple[float, float]]) -> None:
        """Args:
            points: (step, value) pairs by rising step, or one value for all steps.

        Raises:
            ValueError: there are no points, or their steps do not rise.
        """
        pairs = [(0, float(points))] if isinstance(points, (int, float)) else list(points)
        if not pairs or any(a >= b for (a, _), (b, _) in pairwise(pairs)):
            raise ValueError(f"a schedule needs points of rising steps, not {points!r}")
        self.points = pairs

    def __call__(self, steps: Tensor) -> Tensor:
        """The value after so many steps, 0-d and float64."""
        value = torch.full_like(steps, self.points[0][1], dtype=torch.float64)  # []
        for (start, low), (stop, high) in pairwise(self.points):
            share = ((steps.double() - start) / (stop - start)).clamp(0, 1)  # []
            value = value + share * (high - low)  # []
        return value
