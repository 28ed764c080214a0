"""`juggler plot` and `juggler.plot`: draw runs over steps and time."""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import tyro

from juggler.cli.arguments import Flag, PlotError, command
from juggler.driver.reporting.episode_returns import Column
from juggler.driver.reporting.run_directory import (
    METRICS_FILE,
    STEPS,
    TIME,
    flat,
    number,
    read_metrics,
)
from juggler.driver.run_end import Result
from juggler.driver.start_run import StartedRun
from juggler.driver.watching.overview import names_of
from juggler.experiments.seeds import mean_curve, members

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

By: TypeAlias = Literal["auto", "run", "module", "agent"]


@dataclass(kw_only=True)
class Arguments:
    """Draw metrics of runs, over steps and over time of training.

    Without --metric, these are return, throughput and staleness.
    """

    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories; their curves are drawn in one picture. For a directory of `juggler train
    --seeds`, the interquartile mean is drawn with its 95 % interval."""

    output: str | None = None
    """File of the picture; none: plot.png in the directory of one run, comparison.png in the
    working directory for several."""

    together: Flag = False
    """Draw the interquartile mean of all runs, with its 95 % interval."""

    by: By = "auto"
    """Returns to draw: per run (summed over agents), per module (mean of one of its agents), or
    per agent. auto: for one run, per module if it has several, otherwise per agent if it has
    several; for several runs, per run."""

    metric: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Metric to draw instead, such as policy_loss or info/score/mean; repeat for more. A name is a
    key of metrics.jsonl, or the end of several keys: each module then has a curve."""

    smooth: int = 1
    """Number of metrics lines in a moving average. Evaluations are not averaged."""


def _plot(given: Arguments) -> int:
    how = {"together": given.together, "smooth": given.smooth}
    output = Path(given.output) if given.output else None
    run_dirs = [Path(name) for name in given.run_dirs]
    print(f"plot: {save(run_dirs, output, by=given.by, metrics=given.metric, **how)}")
    return 0


@dataclass(frozen=True, slots=True)
class Picture:
    """Runs as curves: return, throughput and staleness, over steps and over time.

    A notebook shows it.

    Attributes:
        figure: Matplotlib's figure, to change or save.
    """

    figure: Figure

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.figure.savefig(content, format="png")
        return content.getvalue()


def plot(
    *runs: Result | StartedRun | str | Path,
    by: By = "auto",
    together: bool = False,
    metrics: Sequence[str] = (),
    smooth: int = 1,
) -> Picture:
    """Draw runs into one picture, like `juggler plot`.

    Runs may still be training. Skipped lines are reported on stderr.

    Args:
        runs: results, runs from `juggler.start`, or directories of runs. A directory of runs with
            several seeds is drawn as their interquartile mean with its 95 % interval.
        by: returns per "run", per "module" or per "agent". "auto": for one run, per module if
            there are several, otherwise per agent if there are several; otherwise per run.
        together: draw the interquartile mean of all runs, with its 95 % interval.
        metrics: draw these instead, such as "policy_loss" or "info/score/mean".
        smooth: number of metrics lines to average over: each line and the lines before it.

    Raises:
        PlotError: a run has no metrics, no metrics by module or agent although `by` needs them, or
            no numbers of one of `metrics`.
    """
    run_dirs = [run.run_dir if isinstance(run, Result | StartedRun) else Path(run) for run in runs]
    if not run_dirs:
        raise PlotError("give at least one run directory")
    if smooth < 1:
        raise PlotError(f"--smooth {smooth}: give a number of lines, at least 1")
    if metrics and by != "auto":
        raise PlotError(f"a metric has a curve for each module or agent: leave out --by {by}")
    found: list[tuple[Path, str, str]] = []  # directory, name and group of each run
    for path, name in zip(run_dirs, names_of(run_dirs), strict=True):
        seeds = members(path)
        found += [(each, f"{name}/{each.name}", name) for each in seeds] or [(path, name, "")]
    if together:
        found = [(path, name, f"{len(found)} runs") for path, name, _ in found]
    # A group is drawn as its mean, which needs one curve of each run.
    grouped = any(group for *_, group in found)
    if by == "auto" and (metrics or len(found) > 1 or grouped):
        by = "run"
    if by != "run" and grouped:
        raise PlotError(f"the mean of several runs needs returns per run: leave out --by {by}")
    return Picture(_figure([read_run(*each, smooth) for each in found], by, metrics))


def save(run_dirs: Sequence[Path], output: Path | None = None, **how: Any) -> Path:
    """Draw runs into a file, like `plot`.

    Raises:
        PlotError: as for `plot`; or the picture cannot be written.
    """
    figure = plot(*run_dirs, **how).figure
    default = run_dirs[0] / "plot.png" if len(run_dirs) == 1 else Path("comparison.png")
    return save_figure(figure, output or default)


def save_figure(figure: Figure, output: Path) -> Path:
    """Save a figure; without a suffix, as PNG.

    Raises:
        PlotError: it cannot be written.
    """
    output = output if output.suffix else output.with_suffix(".png")
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise PlotError(f"cannot write {output}: {why}") from error
    return output


_MOST_NAMES = 32
_RETURN, _EVALUATION = "episode_return_mean", "evaluation_return_mean"
#: Names of the usual panels, and their metrics.
_USUAL = {
    "mean return per episode": _RETURN,
    "throughput (steps/s)": "steps_per_second",
    "staleness (updates)": "staleness_mean",
}
#: By usual metric, the label of its curve; a metric drawn as points with it, their label, marker.
_LABELS = {
    _RETURN: ("training", (_EVALUATION, "evaluation", "o")),
    "staleness_mean": ("mean", ("staleness_max", "max", ".")),
}
#: Distinguishable with any colour vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#404040")
GREY = "#555555"
STYLES = ("-", "--", ":", "-.")
_TIME_UNITS = (
    ("training time (h)", 3600.0),
    ("training time (min)", 60.0),
    ("training time (s)", 1.0),
)


@dataclass(frozen=True, slots=True)
class RunCurves:
    """A run's metrics."""

    name: str
    columns: dict[str, Column]  # by flat key, [lines]; NaN if a line has no number
    group: str = ""  # runs of a group are drawn as one curve; "": this run has its own curve

    def column(self, key: str) -> Column:
        """Return a metric, [lines]; NaN if a line has no number."""
        return self.columns.get(key, np.full(len(self.columns[STEPS]), np.nan))

    def keys_of(self, metric: str) -> list[str]:
        """Return keys that are or end in this metric, and have numbers."""
        ends = [key for key in self.columns if key.endswith(f"/{metric}")]
        keys = [metric] if metric in self.columns else ends
        return [key for key in keys if np.isfinite(self.columns[key]).any()][:_MOST_NAMES]

    def keys_by(self, by: By) -> list[str]:
        """Return the keys of mean returns, per run, module or agent."""
        for kind in {"auto": ("module", "agent"), "run": ()}.get(by, (by,)):
            found = [
                key
                for key in self.columns
                if key.startswith(f"by_{kind}/") and key.endswith(f"/{_RETURN}")
            ]
            if len(found) > 1 or (found and by != "auto"):
                return found[:_MOST_NAMES]
            if by != "auto":
                raise PlotError(
                    f"{self.name}: it has no metrics by {by}, not having several {by}s: leave out "
                    "--by"
                )
        return [_RETURN]


def read_run(path: Path, name: str, group: str = "", smooth: int = 1) -> RunCurves:
    """Read a run's metrics; repeated steps count once.

    Raises:
        PlotError: the run has no metrics.
    """
    file = path / METRICS_FILE
    if not file.exists():
        what = f"has no {METRICS_FILE}" if path.is_dir() else "is not a directory"
        raise PlotError(f"{path} {what}; give the directory of a run")
    found = read_metrics(path)
    if not found.lines:
        what = f"none of its {found.broken} lines has metrics" if found.broken else "it is empty"
        raise PlotError(f"{file}: {what}; the first line is written a second after the start")
    if found.broken:
        count = "1 line" if found.broken == 1 else f"{found.broken} lines"
        print(f"left out {count} of {file}: not metrics", file=sys.stderr)
    # Steps and evaluations stay as they are: a mean of them would mean nothing.
    lines = [flat(line) for line in found.lines]
    # A key may first appear in a later line.
    columns = {}
    for key in dict.fromkeys(key for line in lines for key in line):
        column = np.array([number(line.get(key)) for line in lines], dtype=np.float64)
        is_raw = key in (STEPS, TIME) or key.endswith(_EVALUATION)
        columns[key] = column if is_raw else smoothed(column, smooth)
    return RunCurves(name, columns, group)


def smoothed(column: Column, lines: int) -> Column:
    """Average a column over a number of lines; NaN stays NaN."""
    known = np.isfinite(column)  # [lines]
    sums, counts = (
        np.convolve(each, np.ones(lines))[: len(column)]  # [lines]
        for each in (np.where(known, column, 0.0), known)
    )
    return np.where(known, sums / np.maximum(counts, 1), np.nan)


@dataclass(frozen=True, slots=True)
class _Curve:
    """A metric of one run, or of a group's runs."""

    name: str
    key: str
    runs: list[RunCurves]
    colour: str
    style: str
    label: str  # in the panel's legend of kinds of lines
    points: tuple[str, str, str]  # a metric drawn with it, its label and marker

    def draw(self, axes: Axes, x: str, scale: float) -> None:
        """Draw it over a key, whose numbers are divided by `scale`."""
        curves = [(run.column(x) / scale, run.column(self.key)) for run in self.runs]
        if self.runs[0].group:
            return self._draw_mean(axes, curves)
        ((places, y),) = curves
        prefix, (metric, label, marker) = self.key[: self.key.rfind("/") + 1], self.points
        known = np.isfinite(y)  # [lines]; not every line has a number from the learner
        (line,) = axes.plot(places[known], y[known], self.style, linewidth=1.5, label=self.label)
        line.set_color(self.colour)
        points = self.runs[0].column(f"{prefix}{metric}")
        shown = np.isfinite(points)
        if metric == _EVALUATION:  # each line repeats the last evaluation until the next one
            shown[1:] &= points[1:] != points[:-1]
        if shown.any():
            (line,) = axes.plot(places[shown], points[shown], marker, ms=4.5, label=label)
            line.set(color=self.colour, alpha=0.7)

    def _draw_mean(self, axes: Axes, curves: Sequence[tuple[Column, Column]]) -> None:
        colour, style = self.colour, self.style
        for x, y in curves:
            axes.plot(x, y, style, color=colour, linewidth=0.8, alpha=0.3, label="one run")
        if (mean := mean_curve(curves)) is None:
            return
        axes.plot(mean.x, mean.mean, style, color=colour, linewidth=2, label="interquartile mean")
        if np.isfinite(mean.low).all():
            axes.fill_between(mean.x, mean.low, mean.high, color=colour, alpha=0.2, linewidth=0)


def _figure(runs: list[RunCurves], by: By = "run", metrics: Sequence[str] = ()) -> Figure:
    # Matplotlib takes half a second; without pyplot it needs no window system.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    longest = max(float(run.column(TIME)[-1]) for run in runs)
    # The longest run decides the unit, since all share the axis.
    unit, seconds = next((u for u in _TIME_UNITS if longest >= 2 * u[1]), _TIME_UNITS[-1])
    abscissae = ((STEPS, 1.0, "environment steps"), (TIME, seconds, unit))
    panels = _panels(runs, by, metrics)
    figure = Figure(figsize=(13 / 3 * max(len(panels), 2), 7), dpi=140, layout="constrained")
    grid = figure.subplots(2, len(panels), sharex="row", sharey="col", squeeze=False)
    for row, (key, scale, x_label) in enumerate(abscissae):
        for axes, (y_label, curves) in zip(grid[row], panels.items(), strict=True):
            for curve in curves:
                curve.draw(axes, key, scale)
            if _USUAL.get(y_label, _RETURN) != _RETURN:
                axes.set_ylim(bottom=0)
            style_axes(axes, x_label, y_label)
    if len(runs) == 1:
        figure.suptitle(runs[0].name, fontweight="bold")
    # Panels share their colours and styles, so one legend entry is enough for each.
    shown = panels.values() if metrics else [panels[next(iter(_USUAL))]]
    looks = {each.name: each for curves in shown for each in curves}
    if len(looks) > 1:
        handles = [
            Line2D([], [], color=each.colour, ls=each.style, linewidth=2, label=each.name)
            for each in looks.values()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def style_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Label axes, and remove clutter."""
    axes.set_xlabel(x_label, color=GREY)
    axes.set_ylabel(y_label, color=GREY)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=GREY, labelsize=9)
    for axis in (axes.xaxis, axes.yaxis):
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


def _panels(runs: list[RunCurves], by: By, metrics: Sequence[str]) -> dict[str, list[_Curve]]:
    """Make the curves of each panel, by the panel's name."""
    looks = ((colour, style) for style in itertools.cycle(STYLES) for colour in COLOURS)
    known: dict[str, tuple[str, str]] = {}  # by the name of a curve
    owners: dict[str, list[RunCurves]] = {}  # runs by group, or by their own name
    for run in runs:
        owners.setdefault(run.group or run.name, []).append(run)
    # A module keeps its look in all panels, so that one legend serves them.
    panels: dict[str, list[_Curve]] = {}
    for panel, metric in (dict(zip(metrics, metrics, strict=True)) or _USUAL).items():
        panels[panel] = curves = []
        label, points = (None if metrics else _LABELS.get(metric)) or (panel, ("", "", ""))
        # With one run, the names of modules say enough; with several, its own name comes first.
        for owner, of in owners.items():
            for part, (key, having) in _keys(of, by, metric, is_usual=not metrics).items():
                parts = [owner] * (len(owners) > 1 or not part) + [part] * bool(part)
                name = ": ".join(parts)
                known[name] = known.get(name) or next(looks)
                curves.append(_Curve(name, key, having, *known[name], label, points))
        if metrics and not curves:
            raise PlotError(
                f"no run has numbers of the metric {metric!r}: give a key of the lines of "
                f"{METRICS_FILE}, such as episode_length_mean, or of a table in them, such as kl"
            )
    return panels


def _keys(
    runs: list[RunCurves], by: By, metric: str, *, is_usual: bool
) -> dict[str, tuple[str, list[RunCurves]]]:
    """Return a metric's keys and their runs, by the differing part."""
    having: dict[str, list[RunCurves]] = {}
    for run in runs:
        keys = [metric] if is_usual else run.keys_of(metric)
        for key in run.keys_by(by) if is_usual and metric == _RETURN else keys:
            having.setdefault(key, []).append(run)
    parts = {key: key.removesuffix(metric).strip("/").removeprefix("modules/") for key in having}
    if not is_usual and len(having) == 1:
        parts = dict.fromkeys(having, "")
    names = {key: re.sub("^by_(module|agent)/", "", part) for key, part in parts.items()}
    return {names[key]: (key, of) for key, of in having.items()}


run = command("plot", Arguments, _plot)
