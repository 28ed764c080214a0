"""Read the metrics of runs for pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from juggler.driver.record.event_file import flat
from juggler.driver.record.metrics_file import STEPS, TIME, number, read_metrics
from juggler.driver.record.run_directory import METRICS_FILE

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
By: TypeAlias = Literal["auto", "run", "module", "agent"]


class PlotError(Exception):
    """A run cannot be drawn; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's metrics by key; NaN if a line has no number."""

    name: str
    columns: Columns
    broken: int  # lines that could not be read
    named: dict[str, Columns]  # returns by module or agent; {}: the run's returns only
    # Columns by full key, by the metric name that was asked for.
    metrics: dict[str, Columns] = field(default_factory=dict)
    group: str = ""  # runs of a group are drawn as one curve; "": this run has its own curve


def read_run(
    path: Path, name: str, by: By = "run", metrics: Sequence[str] = (), smooth: int = 1
) -> Run:
    """Read the metrics of a run. Steps that a resumed run repeats count once.

    Args:
        path: directory of the run.
        name: name of the run in the picture.
        by: as for `plot`.
        metrics: further metrics to read, by names as in `columns_of`.
        smooth: number of lines to average over: each line and the lines before it.

    Raises:
        PlotError: the run has no metrics, or no metrics by module or agent although `by` asks for
            them.
        RunDirectoryError: the metrics cannot be read.
    """
    file = path / METRICS_FILE
    if not file.exists():
        what = f"has no {METRICS_FILE}" if path.is_dir() else "is not a directory"
        raise PlotError(f"{path} {what}; give the directory of a run")
    file_lines = read_metrics(path)
    if not (found := file_lines.lines):
        count = file_lines.broken
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
    lines = list(map(flat, found)) if metrics else []
    own = {metric: columns_of(lines, metric) for metric in metrics}
    for table_of in (columns, *named.values(), *own.values()):
        for each in table_of.keys() - {STEPS, TIME, "evaluation_return_mean"}:
            table_of[each] = smoothed(table_of[each], smooth)
    return Run(name, columns, file_lines.broken, named, own)


def columns_of(lines: Sequence[Mapping[str, Any]], name: str) -> Columns:
    """Return the columns of a metric, by full key.

    Args:
        lines: flat lines of metrics.
        name: a full key, or the end of several keys. For example, "modules/default/policy_loss"
            ends in "policy_loss".
    """
    whole = dict.fromkeys(key for line in lines for key in line)
    keys = [name] if name in whole else [key for key in whole if key.endswith(f"/{name}")]
    found = {key: np.array([number(line.get(key)) for line in lines]) for key in keys}
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
    """Return the modules or agents to draw, and their metrics' key."""
    kinds: Sequence[str] = ("module", "agent") if by == "auto" else (by,)
    for kind in kinds:
        key = f"by_{kind}"
        names = list(dict.fromkeys(name for values in lines for name in _of(values, key)))
        if len(names) > 1 or (names and by != "auto"):
            return names[:_MOST_NAMES], key
    return [], ""


def _of(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table within a line; {} if there is none."""
    found = values.get(key)
    return found if isinstance(found, dict) else {}
