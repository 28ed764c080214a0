"""Schedules: numbers that depend on the steps trained on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from juggler.runtime.wrong_value import points_of


class Schedule:
    """Piecewise linear function of steps, constant outside of its points.

    It is computed on the device of the step counter, so no update waits for a device.

    Args:
        points: (step, value) pairs by rising step, or one value for all steps.

    Raises:
        ValueError: as for `points_of`.
    """

    def __init__(self, points: float | Sequence[tuple[float, float]]) -> None:
        self.points = points_of(points)

    def __call__(self, steps: Tensor) -> Tensor:
        """Return the value after this many steps (0-d) -> 0-d, float64."""
        value = torch.full_like(steps, self.points[0][1], dtype=torch.float64)  # []
        for (start, low), (stop, high) in pairwise(self.points):
            share = ((steps.double() - start) / (stop - start)).clamp(0, 1)  # []
            value = value + share * (high - low)  # []
        return value
