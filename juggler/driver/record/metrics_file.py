"""Reads a run's `metrics.jsonl`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from juggler.driver.record.event_file import flat
from juggler.driver.record.line_file import LineFile
from juggler.driver.record.run_directory import METRICS_FILE, RunDirectoryError

STEPS: Final = "env_steps_sampled"
#: Start-up times differ between runs, so curves over time begin with training.
TIME: Final = "training_time"
_WALL: Final = "wall_time"


@dataclass(frozen=True, slots=True)
class MetricsLines:
    """The lines of metrics of a run, oldest first. Steps that a resumed run made again count once,
    and its clock goes on.

    Attributes:
        lines: as they were written, but for the time.
        broken: number of complete lines in the file that are not metrics.
    """

    lines: list[dict[str, Any]]
    broken: int


class MetricsCourse:
    """Puts the lines of a run in order, as they come: those of steps that are made again go, and
    the clock goes on.

    Attributes:
        lines: oldest first.
        taken_back: how many lines have gone.
    """

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.taken_back = 0
        self._offsets = dict.fromkeys((TIME, _WALL), 0.0)

    def add(self, line: dict[str, Any]) -> None:
        while self.lines and self.lines[-1][STEPS] > line[STEPS]:
            self.lines.pop()  # made again from a checkpoint before
            self.taken_back += 1
        clocks = {key: line[key] + each for key, each in self._offsets.items() if key in line}
        for key in clocks:
            before = self.lines[-1].get(key, 0.0) if self.lines else 0.0
            if clocks[key] < before:  # the clock started again
                self._offsets[key], clocks[key] = before, line[key] + before
        self.lines.append({**line, **clocks})


def read_metrics(run_dir: Path) -> MetricsLines:
    """Read all metrics of a run.

    Raises:
        RunDirectoryError: the file cannot be read.
    """
    file = LineFile(run_dir / METRICS_FILE)
    course, broken = MetricsCourse(), 0
    try:
        file.begins_anew()
        for text in file.new_lines():
            if (line := parse_line(text)) is None:
                broken += 1
            else:
                course.add(line)
    except OSError as error:
        raise RunDirectoryError(f"cannot read {file.path}: {error.strerror}") from error
    return MetricsLines(course.lines, broken)


def metrics_table(run_dir: Path) -> list[dict[str, Any]]:
    """The same lines as rows of a table, flat.

    Raises:
        RunDirectoryError: the file cannot be read.
    """
    return [flat(line) for line in read_metrics(run_dir).lines]


def number(value: object) -> float:
    """A number of a line; NaN where it has none."""
    try:
        found = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def parse_line(text: bytes) -> dict[str, Any] | None:
    """What a line of the file says; None: it is none of metrics."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    line.setdefault(TIME, line.get(_WALL))  # older runs have one clock
    known = (number(line.get(key)) for key in (STEPS, TIME, _WALL))
    return None if any(map(math.isnan, known)) else line
