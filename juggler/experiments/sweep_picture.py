"""The picture of a sweep: its trials in their order, and over each key of its space."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from juggler.experiments.space import Axis, Range
from juggler.experiments.style import COLOURS, GREY, dress
from juggler.experiments.sweep_directory import PICTURE_FILE, SweepPlan
from juggler.experiments.trials import TrialOver

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3


def write_picture(
    path: Path, over: Sequence[TrialOver], plan: SweepPlan, axes: Sequence[Axis]
) -> Path:
    """Draw a sweep into its directory.

    Args:
        path: of the directory.
        over: the trials, of which one at least is complete.
        plan: of the sweep.
        axes: its space.
    """
    figure = draw(over, plan, axes)
    file = path / PICTURE_FILE
    figure.savefig(file)
    return file


def draw(over: Sequence[TrialOver], plan: SweepPlan, axes: Sequence[Axis]) -> Figure:
    """The same as a figure of Matplotlib."""
    # Matplotlib takes half a second; without pyplot it needs no window system.
    from matplotlib.figure import Figure

    rows = -(-(len(axes) + 1) // _COLUMNS)
    figure = Figure(figsize=(13, 3.6 * rows), dpi=140, layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).flat
    shown = [each for each in over if each.value is not None]
    _draw_course(next(panels), shown, plan)
    for axis in axes:
        _draw_key(next(panels), shown, plan, axis)
    for panel in panels:
        panel.set_visible(False)
    return figure


def _draw_course(panel: Axes, shown: Sequence[TrialOver], plan: SweepPlan) -> None:
    """The trials in their order, and the best one so far."""
    from matplotlib.ticker import MaxNLocator

    _scatter(panel, [float(each.number) for each in shown], shown)
    good = sorted((each for each in shown if each.complete), key=lambda each: each.number)
    values = np.array([each.value for each in good], dtype=np.float64)  # [complete trials]
    best = (np.minimum if plan.minimize else np.maximum).accumulate(values)
    numbers = [each.number for each in good]
    panel.step(numbers, best, where="post", color=COLOURS[1], linewidth=1.5, label="best so far")
    dress(panel, "trial", plan.metric)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_key(panel: Axes, shown: Sequence[TrialOver], plan: SweepPlan, axis: Axis) -> None:
    """The trials over one key."""
    chosen = [each.settings[axis.key] for each in shown]
    if isinstance(axis, Range):
        if axis.log:
            panel.set_xscale("log")
        _scatter(panel, chosen, shown)
        dress(panel, axis.key, plan.metric, numbers_on_x=not axis.log)
        _bound(panel, axis)
        return
    names = [str(name) for name in axis.names()]
    places = [float(names.index(str(name))) for name in chosen]
    _scatter(panel, places, shown)
    dress(panel, axis.key, plan.metric, numbers_on_x=False)
    panel.set_xticks(range(len(names)), names)
    panel.set_xlim(-0.5, len(names) - 0.5)


def _bound(panel: Axes, axis: Range) -> None:
    """Show the whole range of a key, and a little more."""
    low, high = np.log([axis.low, axis.high]) if axis.log else (axis.low, axis.high)
    around = 0.03 * (high - low)
    limits = low - around, high + around
    panel.set_xlim(*(np.exp(limits) if axis.log else limits))


def _scatter(panel: Axes, x: Sequence[float], shown: Sequence[TrialOver]) -> None:
    for complete, mark, colour, label in (
        (True, "o", COLOURS[0], "complete"),
        (False, "x", GREY, "pruned"),
    ):
        points = [
            (at, each.value)
            for at, each in zip(x, shown, strict=True)
            if each.complete == complete and each.value is not None
        ]
        if points:
            panel.plot(*zip(*points, strict=True), mark, color=colour, ms=5, label=label)
