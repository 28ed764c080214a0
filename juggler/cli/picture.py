"""Plots of runs: return, throughput and staleness, over steps and over time."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from juggler.driver.record.metrics_file import STEPS, TIME, number, read_metrics
from juggler.driver.record.run_directory import METRICS_FILE
from juggler.experiments.seeds import members
from juggler.experiments.statistics import mean_curve
from juggler.experiments.style import COLOURS, dress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KEYS = (
    STEPS,
    TIME,
    "episode_return_mean",
    "evaluation_return_mean",
    "steps_per_second",
    "staleness_mean",
    "staleness_max",
)
_OF_EACH = ("episode_return_mean", "evaluation_return_mean")  # of a module or an agent
_MOST_NAMES = 32
_STYLES = ("-", "--", ":", "-.")
_TIME_UNITS = (
    ("training time (h)", 3600.0),
    ("training time (min)", 60.0),
    ("training time (s)", 1.0),
)

Column: TypeAlias = NDArray[np.float64]  # [lines]
Columns: TypeAlias = dict[str, Column]  # by the keys above
By: TypeAlias = Literal["auto", "run", "module", "agent"]


class PlotError(Exception):
    """A run cannot be drawn; the message says which one and why."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's metrics by key, with NaN where a line has no number."""

    name: str
    columns: Columns
    broken: int  # lines that could not be read
    named: dict[str, Columns]  # the returns of each module or agent; {}: those of the run alone
    group: str = ""  # of runs whose returns are drawn as one curve; "": it is drawn by itself


def plot(
    run_dirs: Sequence[Path],
    output: Path | None = None,
    by: By = "auto",
    *,
    together: bool = False,
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

    Returns:
        The path of the picture.

    Raises:
        PlotError: a directory has no metrics, or none of modules or agents where `by` asks for
            them; or the picture cannot be written.
        RunDirectoryError: metrics cannot be read.
    """
    figure = draw(run_dirs, by, together=together)
    default = run_dirs[0] / "plot.png" if len(run_dirs) == 1 else Path("comparison.png")
    output = output or default
    output = output if output.suffix else output.with_suffix(".png")
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise PlotError(f"cannot write {output}: {error}") from error
    return output


def draw(run_dirs: Sequence[Path], by: By = "auto", *, together: bool = False) -> Figure:
    """Draw runs into one figure, as `plot` does.

    Raises:
        PlotError: as `plot`.
        RunDirectoryError: likewise.
    """
    if not run_dirs:
        raise PlotError("give at least one run directory")
    names = [path.resolve().name for path in run_dirs]
    unique = len(set(names)) == len(names)
    found: list[tuple[Path, str, str]] = []  # directory, name and group of each run
    for path, own in zip(run_dirs, names, strict=True):
        name = own if unique else str(path)
        seeds = members(path)
        found += [(each, f"{name}/{each.name}", name) for each in seeds] or [(path, name, "")]
    if by == "auto" and (together or len(found) > 1 or any(group for *_, group in found)):
        by = "run"
    if together:
        found = [(path, name, f"{len(found)} runs") for path, name, _ in found]
    if by != "run" and any(group for *_, group in found):
        raise PlotError(f"the mean of several runs is of their own returns: leave out --by {by}")
    runs = [replace(read_run(path, name, by), group=group) for path, name, group in found]
    for run, (path, *_) in zip(runs, found, strict=True):
        if run.broken:
            count = "1 line" if run.broken == 1 else f"{run.broken} lines"
            print(f"left out {count} of {path / METRICS_FILE}: not metrics", file=sys.stderr)
    return _figure(runs)


def read_run(path: Path, name: str, by: By = "run") -> Run:
    """The metrics of a run. Steps that a resumed run made again count once.

    Args:
        path: of the run.
        name: for people.
        by: as for `plot`.

    Raises:
        PlotError: there are no metrics, or none of what `by` asks for.
        RunDirectoryError: they cannot be read.
    """
    file = path / METRICS_FILE
    if not file.exists():
        what = f"has no {METRICS_FILE}" if path.is_dir() else "is not a directory"
        raise PlotError(f"{path} {what}; give the directory of a run")
    metrics = read_metrics(path)
    if not (found := metrics.lines):
        count = metrics.broken
        what = f"none of its {count} lines is one of metrics" if count else "it is empty"
        raise PlotError(f"{file}: {what}; the first line is written a second after the start")
    rows = [[number(values.get(key)) for key in _KEYS] for values in found]
    names, key = _names(found, by)
    if by in ("module", "agent") and not names:
        raise PlotError(
            f"{file}: it has no metrics by {by}, as a run with several {by}s has: leave out --by"
        )
    for row, values in zip(rows, found, strict=True):
        for each in names:
            told = _of(_of(values, key), each)
            row += [number(told.get(of_each)) for of_each in _OF_EACH]
    table = np.array(rows, dtype=np.float64)  # [lines, keys]
    columns = {key: table[:, i] for i, key in enumerate(_KEYS)}
    of_names = iter(table[:, len(_KEYS) :].T)  # [lines] each
    named = {each: {of_each: next(of_names) for of_each in _OF_EACH} for each in names}
    return Run(name, columns, metrics.broken, named)


def _names(lines: list[dict[str, Any]], by: By) -> tuple[list[str], str]:
    """The modules or agents whose returns are drawn, and the key of lines that has them."""
    kinds: Sequence[str] = ("module", "agent") if by == "auto" else (by,)
    for kind in kinds:
        key = f"by_{kind}"
        names = list(dict.fromkeys(name for values in lines for name in _of(values, key)))
        if len(names) > 1 or (names and by != "auto"):
            return names[:_MOST_NAMES], key
    return [], ""


def _of(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A table within a line; {} where there is none."""
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _figure(runs: list[Run]) -> Figure:
    # Matplotlib takes half a second; without pyplot it needs no window system.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    longest = max(float(run.columns[TIME][-1]) for run in runs)
    unit, seconds = next((u for u in _TIME_UNITS if longest >= 2 * u[1]), _TIME_UNITS[-1])
    abscissae = ((STEPS, 1.0, "environment steps"), (TIME, seconds, unit))
    figure = Figure(figsize=(13, 7), dpi=140, layout="constrained")
    grid = figure.subplots(2, len(_PANELS), sharex="row", sharey="col")  # [rows, columns]
    for row, (key, scale, x_label) in enumerate(abscissae):
        for axes, (y_label, draw) in zip(grid[row], _PANELS.items(), strict=True):
            for curve in _curves(runs) if draw is _draw_return else _whole(runs):
                x = curve.run.columns[key] / scale
                if draw is _draw_return and curve.together:
                    _draw_mean(axes, curve.together, key, scale, curve.colour, curve.style)
                else:
                    draw(axes, x, curve.columns, curve.colour, curve.style)
            if draw is not _draw_return:
                axes.set_ylim(bottom=0)
            dress(axes, x_label, y_label)
    if len(runs) == 1:
        figure.suptitle(runs[0].name, fontweight="bold")
    curves = _curves(runs)
    if len(curves) > 1:
        handles = [
            Line2D([], [], color=each.colour, ls=each.style, linewidth=2, label=each.name)
            for each in curves
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


@dataclass(frozen=True, slots=True)
class _Curve:
    """A line of the picture."""

    run: Run
    name: str
    columns: Columns
    colour: str
    style: str
    together: Sequence[Run] = ()  # the runs whose mean it is; (): it is of one


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
                group = [each for each in runs if each.group == run.group]
                found.append(_Curve(run, run.group, run.columns, *next(looks), together=group))
            continue
        if not run.named:
            found.append(_Curve(run, run.name, run.columns, *next(looks)))
        for name, columns in run.named.items():
            label = f"{run.name}: {name}" if len(runs) > 1 else name
            found.append(_Curve(run, label, columns, *next(looks)))
    return found


def _draw_return(axes: Axes, x: Column, columns: Columns, colour: str, style: str) -> None:
    returns = columns["episode_return_mean"]
    axes.plot(x, returns, style, color=colour, linewidth=1.8, label="training")
    evaluation = columns["evaluation_return_mean"]
    # Each line repeats the last evaluation until there is a new one.
    is_new = np.isfinite(evaluation) & (evaluation != np.roll(evaluation, 1))
    is_new[0] = np.isfinite(evaluation[0])
    if is_new.any():
        axes.plot(x[is_new], evaluation[is_new], "o", color=colour, ms=4.5, label="evaluation")


def _draw_mean(
    axes: Axes, runs: Sequence[Run], key: str, scale: float, colour: str, style: str
) -> None:
    curves = [(run.columns[key] / scale, run.columns["episode_return_mean"]) for run in runs]
    for x, y in curves:
        axes.plot(x, y, style, color=colour, linewidth=0.8, alpha=0.3, label="one run")
    if (mean := mean_curve(curves)) is not None:
        axes.plot(mean.x, mean.mean, style, color=colour, linewidth=2, label="interquartile mean")
        if np.isfinite(mean.low).all():
            axes.fill_between(mean.x, mean.low, mean.high, color=colour, alpha=0.2, linewidth=0)


def _draw_throughput(axes: Axes, x: Column, columns: Columns, colour: str, style: str) -> None:
    axes.plot(x, columns["steps_per_second"], style, color=colour, linewidth=1.2)


def _draw_staleness(axes: Axes, x: Column, columns: Columns, colour: str, style: str) -> None:
    axes.plot(x, columns["staleness_mean"], style, color=colour, linewidth=1.8, label="mean")
    axes.plot(x, columns["staleness_max"], ".", color=colour, ms=4, alpha=0.5, label="max")


#: What each column of the picture shows.
_PANELS: dict[str, Callable[[Axes, Column, Columns, str, str], None]] = {
    "mean return per episode": _draw_return,
    "throughput (steps/s)": _draw_throughput,
    "staleness (updates)": _draw_staleness,
}
