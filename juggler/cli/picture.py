"""Draw return, throughput and staleness, or other metrics, over steps and time."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from juggler.cli.picture_runs import By, Column, Columns, PlotError, Run, read_run
from juggler.driver.record.metrics_file import STEPS, TIME
from juggler.driver.record.run_directory import METRICS_FILE
from juggler.experiments.seeds import members
from juggler.experiments.statistics import mean_curve
from juggler.experiments.style import COLOURS, dress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RETURN = "episode_return_mean"
_STYLES = ("-", "--", ":", "-.")
_TIME_UNITS = (
    ("training time (h)", 3600.0),
    ("training time (min)", 60.0),
    ("training time (s)", 1.0),
)


def plot(
    run_dirs: Sequence[Path],
    output: Path | None = None,
    by: By = "auto",
    *,
    together: bool = False,
    metrics: Sequence[str] = (),
    smooth: int = 1,
    log: bool = False,
) -> Path:
    """Draw runs into one picture, and say on stderr how many lines had to be left out.

    Args:
        run_dirs: directories of runs. Runs with several seeds, of the directory that has them, are
            drawn as the interquartile mean of their returns and its 95 % interval.
        output: file of the picture. Its suffix decides the format, PNG without one. None: plot.png
            in the directory of one run, comparison.png in the working directory for several.
        by: whose returns are drawn. "auto": of one run, those of each module if there are several,
            else those of each agent if there are several; else those of the run.
        together: draw all runs so.
        metrics: draw these instead. Each is a key of a flat line, or the end of a key.
        smooth: number of lines to average over: each line and the lines before it.
        log: draw on logarithmic axes.

    Returns:
        The path of the picture.

    Raises:
        PlotError: a directory has no metrics, or none of modules or agents where `by` asks for
            them; or the picture cannot be written.
        RunDirectoryError: metrics cannot be read.
    """
    figure = draw(run_dirs, by, together=together, metrics=metrics, smooth=smooth, log=log)
    default = run_dirs[0] / "plot.png" if len(run_dirs) == 1 else Path("comparison.png")
    output = output or default
    output = output if output.suffix else output.with_suffix(".png")
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise PlotError(f"cannot write {output}: {error}") from error
    return output


def draw(
    run_dirs: Sequence[Path],
    by: By = "auto",
    *,
    together: bool = False,
    metrics: Sequence[str] = (),
    smooth: int = 1,
    log: bool = False,
) -> Figure:
    """Draw runs into one figure, as `plot` does.

    Raises:
        PlotError: as `plot`.
        RunDirectoryError: likewise.
    """
    if not run_dirs:
        raise PlotError("give at least one run directory")
    if smooth < 1:
        raise PlotError(f"--smooth {smooth}: give a number of lines, at least 1")
    if metrics and by != "auto":
        raise PlotError(f"a metric has a curve for each module or agent: leave out --by {by}")
    names = [path.resolve().name for path in run_dirs]
    unique = len(set(names)) == len(names)
    found: list[tuple[Path, str, str]] = []  # directory, name and group of each run
    for path, own in zip(run_dirs, names, strict=True):
        name = own if unique else str(path)
        seeds = members(path)
        found += [(each, f"{name}/{each.name}", name) for each in seeds] or [(path, name, "")]
    if by == "auto" and (
        metrics or together or len(found) > 1 or any(group for *_, group in found)
    ):
        by = "run"
    if together:
        found = [(path, name, f"{len(found)} runs") for path, name, _ in found]
    if by != "run" and any(group for *_, group in found):
        raise PlotError(f"the mean of several runs is of their own returns: leave out --by {by}")
    runs = [
        replace(read_run(path, name, by, metrics, smooth), group=group)
        for path, name, group in found
    ]
    for run, (path, *_) in zip(runs, found, strict=True):
        if run.broken:
            count = "1 line" if run.broken == 1 else f"{run.broken} lines"
            print(f"left out {count} of {path / METRICS_FILE}: not metrics", file=sys.stderr)
    return _figure(runs, metrics, log=log)


def _figure(runs: list[Run], metrics: Sequence[str] = (), *, log: bool = False) -> Figure:
    # Matplotlib takes half a second; without pyplot it needs no window system.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    longest = max(float(run.columns[TIME][-1]) for run in runs)
    unit, seconds = next((u for u in _TIME_UNITS if longest >= 2 * u[1]), _TIME_UNITS[-1])
    abscissae = ((STEPS, 1.0, "environment steps"), (TIME, seconds, unit))
    panels = _panels_of(runs, metrics) if metrics else _usual_panels(runs)
    figure = Figure(figsize=(13 / 3 * max(len(panels), 2), 7), dpi=140, layout="constrained")
    grid = figure.subplots(2, len(panels), sharex="row", sharey="col", squeeze=False)
    for row, (key, scale, x_label) in enumerate(abscissae):
        for axes, (y_label, curves, draw) in zip(grid[row], panels, strict=True):
            for curve in curves:
                draw(axes, curve, key, scale)
            _set_range(
                axes, y_label, log=log, from_zero=draw in (_draw_throughput, _draw_staleness)
            )
            dress(axes, x_label, y_label)
    if len(runs) == 1:
        figure.suptitle(runs[0].name, fontweight="bold")
    # Panels share their colours and styles, so one legend entry is enough for each.
    looks = {
        each.name: each for _, curves, _ in (panels if metrics else panels[:1]) for each in curves
    }
    if len(looks) > 1:
        handles = [
            Line2D([], [], color=each.colour, ls=each.style, linewidth=2, label=each.name)
            for each in looks.values()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _set_range(axes: Axes, y_label: str, *, log: bool, from_zero: bool) -> None:
    """
    Raises:
        PlotError: `log` is set, and no number is above 0.
    """
    if log:
        drawn = [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.get_lines()]
        if not any((each > 0).any() for each in drawn):
            raise PlotError(f"--log: {y_label} has no number above 0: leave out --log")
        axes.set_yscale("log", nonpositive="mask")
    elif from_zero:
        axes.set_ylim(bottom=0)


@dataclass(frozen=True, slots=True)
class _Curve:
    """A line of the picture."""

    run: Run
    name: str
    columns: Columns
    colour: str
    style: str
    # The runs and columns to average; (): the curve shows one run.
    together: Sequence[tuple[Run, Column]] = ()


def _whole(runs: list[Run]) -> list[_Curve]:
    """A curve for each run."""
    names = dict.fromkeys(run.group or run.name for run in runs)
    colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))
    return [_Curve(run, run.name, run.columns, colours[run.group or run.name], "-") for run in runs]


def _curves(runs: list[Run]) -> list[_Curve]:
    """A curve for each module or agent of each run that has them, else for the run or its group."""
    looks = ((colour, style) for style in itertools.cycle(_STYLES) for colour in COLOURS)
    found = []
    drawn = set()
    for run in runs:
        if run.group:
            if run.group not in drawn:
                drawn.add(run.group)
                group = [(each, each.columns[_RETURN]) for each in runs if each.group == run.group]
                found.append(_Curve(run, run.group, run.columns, *next(looks), together=group))
            continue
        if not run.named:
            found.append(_Curve(run, run.name, run.columns, *next(looks)))
        for name, columns in run.named.items():
            label = f"{run.name}: {name}" if len(runs) > 1 else name
            found.append(_Curve(run, label, columns, *next(looks)))
    return found


def _draw_return(axes: Axes, curve: _Curve, key: str, scale: float) -> None:
    if curve.together:
        return _draw_mean(axes, curve, key, scale)
    x, columns = curve.run.columns[key] / scale, curve.columns
    colour, style = curve.colour, curve.style
    returns = columns[_RETURN]
    axes.plot(x, returns, style, color=colour, linewidth=1.8, label="training")
    evaluation = columns["evaluation_return_mean"]
    # Each line repeats the last evaluation until there is a new one.
    is_new = np.isfinite(evaluation) & (evaluation != np.roll(evaluation, 1))
    is_new[0] = np.isfinite(evaluation[0])
    if is_new.any():
        axes.plot(x[is_new], evaluation[is_new], "o", color=colour, ms=4.5, label="evaluation")


def _draw_mean(axes: Axes, curve: _Curve, key: str, scale: float) -> None:
    colour, style = curve.colour, curve.style
    curves = [(run.columns[key] / scale, y) for run, y in curve.together]
    for x, y in curves:
        axes.plot(x, y, style, color=colour, linewidth=0.8, alpha=0.3, label="one run")
    if (mean := mean_curve(curves)) is not None:
        axes.plot(mean.x, mean.mean, style, color=colour, linewidth=2, label="interquartile mean")
        if np.isfinite(mean.low).all():
            axes.fill_between(mean.x, mean.low, mean.high, color=colour, alpha=0.2, linewidth=0)


def _draw_throughput(axes: Axes, curve: _Curve, key: str, scale: float) -> None:
    y = curve.columns["steps_per_second"]
    axes.plot(curve.run.columns[key] / scale, y, curve.style, color=curve.colour, linewidth=1.2)


def _draw_staleness(axes: Axes, curve: _Curve, key: str, scale: float) -> None:
    x, columns, colour = curve.run.columns[key] / scale, curve.columns, curve.colour
    axes.plot(x, columns["staleness_mean"], curve.style, color=colour, linewidth=1.8, label="mean")
    axes.plot(x, columns["staleness_max"], ".", color=colour, ms=4, alpha=0.5, label="max")


def _draw_metric(axes: Axes, curve: _Curve, key: str, scale: float) -> None:
    if curve.together:
        return _draw_mean(axes, curve, key, scale)
    (y,) = curve.columns.values()
    known = np.isfinite(y)  # [lines]; not every line has a number from the learner
    x = curve.run.columns[key][known] / scale
    axes.plot(x, y[known], curve.style, color=curve.colour, linewidth=1.5)


#: A panel's name, its curves, and the function that draws a curve.
_Panel: TypeAlias = tuple[str, list[_Curve], Callable[..., None]]


def _usual_panels(runs: list[Run]) -> list[_Panel]:
    whole = _whole(runs)
    return [
        ("mean return per episode", _curves(runs), _draw_return),
        ("throughput (steps/s)", whole, _draw_throughput),
        ("staleness (updates)", whole, _draw_staleness),
    ]


def _panels_of(runs: list[Run], metrics: Sequence[str]) -> list[_Panel]:
    """
    Raises:
        PlotError: for one of these metrics, no run has numbers.
    """
    looks = ((colour, style) for style in itertools.cycle(_STYLES) for colour in COLOURS)
    known: dict[str, tuple[str, str]] = {}  # by the name of a curve
    panels: list[_Panel] = []
    for metric in dict.fromkeys(metrics):
        curves = []
        for name, key, of in _curves_of(runs, metric):
            known[name] = known.get(name) or next(looks)
            first, columns = of[0], {key: of[0].metrics[metric][key]}
            together = [(run, run.metrics[metric][key]) for run in of] if first.group else ()
            curves.append(_Curve(first, name, columns, *known[name], together=together))
        if not curves:
            raise PlotError(
                f"no run has numbers of the metric {metric!r}: take a key of the lines of "
                f"{METRICS_FILE}, such as episode_length_mean, or of a table in them, such as kl"
            )
        panels.append((metric, curves, _draw_metric))
    return panels


def _curves_of(runs: list[Run], metric: str) -> Iterator[tuple[str, str, list[Run]]]:
    """List a metric's curves: name of the curve, full key, runs."""
    owners = dict.fromkeys(run.group or run.name for run in runs)
    for owner in owners:
        of = [run for run in runs if owner == (run.group or run.name)]
        keys = dict.fromkeys(key for run in of for key in run.metrics[metric])
        for key in keys:
            part = key.removesuffix(metric).strip("/").removeprefix("modules/")
            names = [owner] * (len(owners) > 1 or len(keys) == 1) + [part] * (len(keys) > 1)
            yield ": ".join(names), key, [run for run in of if key in run.metrics[metric]]
