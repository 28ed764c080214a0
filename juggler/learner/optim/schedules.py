"""Schedules: numbers that depend on the steps trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from juggler.runtime.nearest import nearest


class Schedule:
    """Piecewise linear function of steps, constant outside of its points.

    It is computed on the device of the step counter, so that no update waits for a device.

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
        """The value after this many steps (0-d) -> 0-d, float64."""
        value = torch.full_like(steps, self.points[0][1], dtype=torch.float64)  # []
        for (start, low), (stop, high) in pairwise(self.points):
            share = ((steps.double() - start) / (stop - start)).clamp(0, 1)  # []
            value = value + share * (high - low)  # []
        return value


class ReplacedSchedules:
    """Overrides a core's schedules with numbers.

    Args:
        name: of the core, for errors.
        schedules: of the core, by name; these are changed.

    Attributes:
        values: the numbers, by the name of the schedule.
    """

    def __init__(self, name: str, schedules: dict[str, Callable[[Tensor], Tensor]]) -> None:
        self.values: dict[str, float] = {}
        self._name = name
        self._schedules = schedules
        self._replaced: dict[str, Callable[[Tensor], Tensor]] = {}

    def use(self, values: Mapping[str, float]) -> None:
        """Use these numbers, and the core's own schedules otherwise.

        Raises:
            ValueError: the core has no such schedule; nothing has changed.
        """
        for key in values:
            if key not in self._schedules:
                raise ValueError(
                    f"{self._name} has no schedule {key!r}{nearest(key, self._schedules)}"
                )
        self._schedules.update(self._replaced)
        self._replaced = {key: self._schedules[key] for key in values}
        self._schedules.update({key: Schedule(value) for key, value in values.items()})
        self.values = dict(values)
