"""`juggler plot` and `juggler.plot`: draw runs over steps and time."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import tyro
from numpy.typing import NDArray

from juggler.cli.arguments import Flag, PlotError, parse, report_errors
from juggler.driver.record.metrics_file import STEPS, TIME, number, read_metrics
from juggler.driver.record.run_directory import METRICS_FILE, flat
from juggler.driver.result import Result
from juggler.driver.started import StartedRun
from juggler.experiments.seeds import members
from juggler.experiments.statistics import mean_curve
from juggler.experiments.style import COLOURS, dress

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

    log: Flag = False
    """Draw on logarithmic axes, without numbers that are not above 0."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "plot")
    return report_errors("plot", lambda: _plot(given))


def _plot(given: Arguments) -> int:
    output = Path(given.output) if given.output else None
    run_dirs = [Path(name) for name in given.run_dirs]
    picture = save(
        run_dirs,
        output,
        given.by,
        together=given.together,
        metrics=given.metric,
        smooth=given.smooth,
        log=given.log,
    )
    print(f"plot: {picture}")
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
    log: bool = False,
) -> Picture:
    """Draw runs into one picture, like `juggler plot`.

    Runs may still be training.

    Args:
        runs: results, runs from `juggler.start`, or directories of runs.
        by: returns per "run", per "module" or per "agent". "auto": for one run, per module if
            there are several, otherwise per agent if there are several; otherwise per run.
        together: draw the interquartile mean of all runs, with its 95 % interval.
        metrics: draw these instead, such as "policy_loss" or "info/score/mean".
        smooth: number of metrics lines to average over: each line and the lines before it.
        log: draw on logarithmic axes.

    Raises:
        PlotError: a run has no metrics, no metrics by module or agent although `by` needs them, or
            no numbers of one of `metrics`.
    """
    given = [run.run_dir if isinstance(run, Result | StartedRun) else Path(run) for run in runs]
    return Picture(draw(given, by, together=together, metrics=metrics, smooth=smooth, log=log))


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

Column: TypeAlias = NDArray[np.float64]  # [lines]
Columns: TypeAlias = dict[str, Column]  # by the keys above


@dataclass(frozen=True, slots=True)
class Run:
    """A run's metrics by key; NaN if a line has no number."""

    name: str
    columns: Columns
    broken: int  # lines that could not be read
    named: dict[str, Columns]  # returns by module or agent; {}: the run's returns only
    # Columns by full key, by requested metric name.
    metrics: dict[str, Columns] = field(default_factory=dict)
    group: str = ""  # runs of a group are drawn as one curve; "": this run has its own curve


def read_run(
    path: Path, name: str, by: By = "run", metrics: Sequence[str] = (), smooth: int = 1
) -> Run:
    """Read a run's metrics; repeated steps count once.

    Args:
        metrics: further metrics to read, by names as in `columns_of`.

    Raises:
        PlotError: the run has no metrics, or no metrics by module or agent although `by` needs
            them.
    """
    file = path / METRICS_FILE
    if not file.exists():
        what = f"has no {METRICS_FILE}" if path.is_dir() else "is not a directory"
        raise PlotError(f"{path} {what}; give the directory of a run")
    found = read_metrics(path)
    if not found.lines:
        what = f"none of its {found.broken} lines has metrics" if found.broken else "it is empty"
        raise PlotError(f"{file}: {what}; the first line is written a second after the start")
    lines = list(map(flat, found.lines))
    names, table = _names(found.lines, by)
    if by in ("module", "agent") and not names:
        raise PlotError(
            f"{file}: it has no metrics by {by}, not having several {by}s: leave out --by"
        )
    columns = {key: _column(lines, key) for key in _KEYS}
    named = {
        each: {key: _column(lines, f"{table}/{each}/{key}") for key in _OF_EACH} for each in names
    }
    own = {metric: columns_of(lines, metric) for metric in metrics}
    for of in (columns, *named.values(), *own.values()):
        for key in of.keys() - {STEPS, TIME, "evaluation_return_mean"}:
            of[key] = smoothed(of[key], smooth)
    return Run(name, columns, found.broken, named, own)


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> Column:
    return np.array([number(line.get(key)) for line in lines], dtype=np.float64)  # [lines]


def columns_of(lines: Sequence[Mapping[str, Any]], name: str) -> Columns:
    """Return the columns of a metric, by full key.

    Args:
        name: a full key, or the end of several keys. For example, "modules/default/policy_loss"
            ends in "policy_loss".
    """
    whole = dict.fromkeys(key for line in lines for key in line)
    keys = [name] if name in whole else [key for key in whole if key.endswith(f"/{name}")]
    found = {key: _column(lines, key) for key in keys}
    known = {key: column for key, column in found.items() if np.isfinite(column).any()}
    return dict(list(known.items())[:_MOST_NAMES])


def smoothed(column: Column, lines: int) -> Column:
    """Average a column over a number of lines; NaN stays NaN."""
    known = np.isfinite(column)  # [lines]
    sums = np.cumsum(np.where(known, column, 0.0))  # [lines]
    counts = np.cumsum(known).astype(np.float64)  # [lines]
    if lines == 1 or not known.any():
        return column
    for total in (sums, counts):
        total[lines:] -= total[:-lines].copy()
    return np.where(known, sums / np.maximum(counts, 1), np.nan)


def _names(lines: list[dict[str, Any]], by: By) -> tuple[list[str], str]:
    """Return modules or agents to draw, and their table."""
    for kind in ("module", "agent") if by == "auto" else (by,):
        table = f"by_{kind}"
        names = list(dict.fromkeys(name for values in lines for name in values.get(table) or {}))
        if len(names) > 1 or (names and by != "auto"):
            return names[:_MOST_NAMES], table
    return [], ""


_RETURN = "episode_return_mean"
_STYLES = ("-", "--", ":", "-.")
_TIME_UNITS = (
    ("training time (h)", 3600.0),
    ("training time (min)", 60.0),
    ("training time (s)", 1.0),
)


def save(run_dirs: Sequence[Path], output: Path | None = None, by: By = "auto", **how: Any) -> Path:
    """Draw runs into a file.

    Args:
        output: file of the picture. Its suffix is the format; without one, PNG. None: plot.png in
            the directory of one run, comparison.png in the working directory for several.

    Raises:
        PlotError: as for `draw`; or the picture cannot be written.
    """
    figure = draw(run_dirs, by, **how)
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
    """Draw runs into one figure; report skipped lines on stderr.

    Args:
        run_dirs: directories of runs. A directory of runs with several seeds is drawn as the
            interquartile mean of their returns with its 95 % interval.
        by: returns to draw. "auto": for one run, per module if there are several, otherwise per
            agent if there are several; otherwise per run.
        together: draw all runs that way.
        metrics: metrics to draw instead. Each is a key of a flat line, or the end of a key.
        smooth: number of lines to average over: each line and the lines before it.
        log: draw on logarithmic axes.

    Raises:
        PlotError: a directory has no metrics, or none by module or agent although `by` needs them.
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
        raise PlotError(f"the mean of several runs needs returns per run: leave out --by {by}")
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
    """Set the range of the axis with numbers."""
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
    """Return a curve for each run."""
    names = dict.fromkeys(run.group or run.name for run in runs)
    colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))
    return [_Curve(run, run.name, run.columns, colours[run.group or run.name], "-") for run in runs]


def _curves(runs: list[Run]) -> list[_Curve]:
    """Return a curve for each module or agent, or run or group."""
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
    # Each line repeats the last evaluation until the next one.
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
    """Make a panel for each metric."""
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
                f"no run has numbers of the metric {metric!r}: give a key of the lines of "
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
