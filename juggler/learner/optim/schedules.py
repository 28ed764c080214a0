"""Schedules: numbers that depend on the steps trained on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


class Schedule:
    """Piecewise linear function of steps, constant outside of its points.

    It is computed on the device of the step counter, so no update waits for a device.

    Args:
        points: (step, value) pairs by rising step, or one value for all steps.

    Raises:
        ValueError: there are no points, or their steps do not rise.
    """

    def __init__(self, points: float | Sequence[tuple[float, float]]) -> None:
        pairs = [(0, float(points))] if isinstance(points, (int, float)) else list(points)
        if not pairs or any(a >= b for (a, _), (b, _) in pairwise(pairs)):
            raise ValueError(f"a schedule needs points of rising steps, not {points!r}")
        self.points = pairs

    def __call__(self, steps: Tensor) -> Tensor:
        """Return the value after this many steps (0-d) -> 0-d, float64."""
        value = torch.full_like(steps, self.points[0][1], dtype=torch.float64)  # []
        for (start, low), (stop, high) in pairwise(self.points):
            share = ((steps.double() - start) / (stop - start)).clamp(0, 1)  # []
            value = value + share * (high - low)  # []
        return value
