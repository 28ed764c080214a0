"""Schedules follow their points."""

from __future__ import annotations

import pytest
import torch

from juggler.learner.optim.schedules import Schedule


@pytest.mark.parametrize(
    ("steps", "value"), [(0, 1.0), (10, 1.0), (15, 0.75), (20, 0.5), (60, 0.25), (1000, 0.0)]
)
def test_a_schedule_is_linear_between_its_points_and_constant_beyond(
    steps: int, value: float
) -> None:
    schedule = Schedule([(10, 1.0), (20, 0.5), (100, 0.0)])
    assert schedule(torch.tensor(steps)).item() == pytest.approx(value, rel=1e-12)


def test_a_schedule_from_one_value_is_constant() -> None:
    schedule = Schedule(3e-4)
    assert [schedule(torch.tensor(steps)).item() for steps in (0, 10**12)] == [3e-4, 3e-4]


@pytest.mark.parametrize("points", [[], [(10, 1.0), (10, 2.0)], [(10, 1.0), (5, 2.0)]])
def test_a_schedule_whose_steps_do_not_rise_is_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="points of rising steps"):
        Schedule(points)
