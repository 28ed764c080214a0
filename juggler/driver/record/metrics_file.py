"""Reads the record of a run: its `metrics.jsonl` and `events.jsonl`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from juggler.driver.record.run_directory import METRICS_FILE, RunDirectoryError, flat
from juggler.runtime.plain_files import open_plain

STEPS: Final = "env_steps_sampled"
#: Start-up times differ between runs, so curves over time begin with training.
TIME: Final = "training_time"
_WALL: Final = "wall_time"
_PART = 1 << 23  # bytes that are read at once: no run writes a line as long


class LineFile:
    """What comes in a file of lines, each whole line once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place: tuple[int, int] | None = None  # (device, inode)
        self._offset = 0

    def begins_anew(self) -> bool:
        """Whether the file was cut or replaced; lines then start again.

        Raises:
            OSError: it cannot be read. FileNotFoundError: it is not there.
        """
        found = os.lstat(self.path)
        place = (found.st_dev, found.st_ino)
        if place == self._place and found.st_size >= self._offset:
            return False
        had_lines = self._offset > 0
        self._place, self._offset = place, 0
        return had_lines

    def new_lines(self) -> Iterator[bytes]:
        """The whole lines since the last call. Ask `begins_anew` first."""
        with open_plain(self.path) as file:
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) != self._place:
                return  # it was replaced at this moment
            while part := os.pread(file.fileno(), _PART, self._offset):
                end = part.rfind(b"\n") + 1 or (len(part) if len(part) == _PART else 0)
                if not end:
                    return  # half a line
                self._offset += end
                yield from part[:end].splitlines()


class MetricsCourse:
    """Orders lines of a run, without those of repeated steps.

    Attributes:
        taken_back: how many lines have gone.
        broken: number of complete lines in the file that are not metrics.
    """

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.taken_back = self.broken = 0
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


def read_metrics(run_dir: Path) -> MetricsCourse:
    """Read all metrics of a run."""
    file = LineFile(run_dir / METRICS_FILE)
    course = MetricsCourse()
    try:
        file.begins_anew()
        for text in file.new_lines():
            if (line := parse_line(text)) is None:
                course.broken += 1
            else:
                course.add(line)
    except OSError as error:
        raise RunDirectoryError(f"cannot read {file.path}: {error.strerror}") from error
    return course


def metrics_table(run_dir: Path) -> list[dict[str, Any]]:
    """The same lines as rows of a table, flat."""
    return [flat(line) for line in read_metrics(run_dir).lines]


def number(value: object) -> float:
    """A number of a line; NaN where it has none."""
    try:
        found = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Parse a line of the file; None: it has no metrics."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    line.setdefault(TIME, line.get(_WALL))  # older runs have one clock
    known = (number(line.get(key)) for key in (STEPS, TIME, _WALL))
    return None if any(map(math.isnan, known)) else line
