"""Reads the `metrics.jsonl` and `events.jsonl` of a run."""

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
_PART = 1 << 23  # bytes read at once; longer than any line of a run


class LineFile:
    """Reads new lines of a growing file, each whole line once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place: tuple[int, int] | None = None  # (device, inode)
        self._offset = 0

    def was_replaced(self) -> bool:
        """Return whether the file was cut or replaced; lines then start again.

        Raises:
            OSError: it cannot be read. FileNotFoundError: it does not exist.
        """
        found = os.lstat(self.path)
        place = (found.st_dev, found.st_ino)
        if place == self._place and found.st_size >= self._offset:
            return False
        had_lines = self._offset > 0
        self._place, self._offset = place, 0
        return had_lines

    def new_lines(self) -> Iterator[bytes]:
        """Yield the whole lines since the last call; call `was_replaced` first."""
        with open_plain(self.path) as file:
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) != self._place:
                return  # it was just replaced
            while part := os.pread(file.fileno(), _PART, self._offset):
                end = part.rfind(b"\n") + 1 or (len(part) if len(part) == _PART else 0)
                if not end:
                    return  # no whole line
                self._offset += end
                yield from part[:end].splitlines()


class MetricsCourse:
    """Orders the lines of a run, and removes repeated steps.

    Attributes:
        taken_back: number of removed lines.
        broken: number of complete lines in the file that are not metrics.
    """

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.taken_back = self.broken = 0
        self._offsets = dict.fromkeys((TIME, _WALL), 0.0)

    def add(self, line: dict[str, Any]) -> None:
        while self.lines and self.lines[-1][STEPS] > line[STEPS]:
            self.lines.pop()  # repeated from an earlier checkpoint
            self.taken_back += 1
        clocks = {key: line[key] + each for key, each in self._offsets.items() if key in line}
        for key in clocks:
            before = self.lines[-1].get(key, 0.0) if self.lines else 0.0
            if clocks[key] < before:  # the clock restarted
                self._offsets[key], clocks[key] = before, line[key] + before
        self.lines.append({**line, **clocks})


def read_metrics(run_dir: Path) -> MetricsCourse:
    """Read all metrics of a run."""
    file = LineFile(run_dir / METRICS_FILE)
    course = MetricsCourse()
    try:
        file.was_replaced()
        for text in file.new_lines():
            if (line := parse_line(text)) is None:
                course.broken += 1
            else:
                course.add(line)
    except OSError as error:
        raise RunDirectoryError(f"cannot read {file.path}: {error.strerror}") from error
    return course


def metrics_table(run_dir: Path) -> list[dict[str, Any]]:
    """Return the same lines as rows of a flat table."""
    return [flat(line) for line in read_metrics(run_dir).lines]


def number(value: object) -> float:
    """Convert a line's value to a number, or NaN."""
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
