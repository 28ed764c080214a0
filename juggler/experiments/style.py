"""Style of pictures of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Distinguishable with any colour vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#404040")
GREY = "#555555"


def dress(axes: Axes, x_label: str, y_label: str, *, numbers_on_x: bool = True) -> None:
    """Label axes, and remove clutter.

    Args:
        numbers_on_x: shorten the numbers there, as on the other side.
    """
    axes.set_xlabel(x_label, color=GREY)
    axes.set_ylabel(y_label, color=GREY)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=GREY, labelsize=9)
    for axis in (axes.xaxis, axes.yaxis) if numbers_on_x else (axes.yaxis,):
        axis.set_major_formatter(tick)
    # One legend entry for each kind of line, for any number of runs.
    kinds = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if len(kinds) > 1:
        legend = axes.legend(kinds.values(), kinds.keys(), frameon=False, fontsize=9)
        for handle in legend.get_lines():
            handle.set_color(GREY)


def tick(value: float, _: float) -> str:
    """Short labels such as 10k and 1.25M, without making two ticks alike."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
