"""What a page draws of a run's metrics: few enough points for a browser, however long the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from juggler.driver.record.event_file import flat
from juggler.driver.record.line_file import LineFile
from juggler.driver.record.metrics_file import STEPS, TIME, MetricsCourse, number, parse_line
from juggler.driver.record.run_directory import METRICS_FILE
from juggler.driver.watching.presentable import text_of

#: Above that, every second point goes.
MOST_POINTS: Final = 1200
_MOST_KEYS: Final = 400  # of a line
_MOST_NAMES: Final = 32  # modules, agents, players
_MOST_NUMBERS: Final = 128  # in infos, of all agents

_ALONE: Final = (
    STEPS,
    TIME,
    "env_steps_trained",
    "episode_return_mean",
    "evaluation_return_mean",
    "staleness_mean",
    "staleness_max",
)


class Curves:
    """The curves of one run, as far as its file goes.

    Attributes:
        newest: the newest line of metrics, whole; {} before there is one.
        broken: how many lines of the file are not metrics.
    """

    def __init__(self, run_dir: Path) -> None:
        self.newest: dict[str, Any] = {}
        self.broken = 0
        self._file = LineFile(run_dir / METRICS_FILE)
        self._course = MetricsCourse()
        self._every, self._skipped = 1, 0  # lines for a point, and those since the last point
        # Raised with all that changes points which were there before.
        self._edition = 0
        self._keys: dict[str, None] = {}

    def read(self) -> None:
        """Take in what is new.

        Raises:
            OSError: the file cannot be read.
        """
        if self._file.begins_anew():
            self._begin_anew()
        for text in self._file.new_lines():
            if (line := parse_line(text)) is None:
                self.broken += bool(text.strip())
                continue
            self.newest = line
            self._skipped += 1
            if self._skipped >= self._every or line[STEPS] < self._newest_steps():
                self._add(dict(_points(line)))

    def since(self, seen: str) -> dict[str, Any]:
        """The points that somebody has not seen.

        Args:
            seen: what this said last; "": nothing.

        Returns:
            For JSON: `seen` for the next time, `keys` and `rows` of numbers by these, and whether
            these are `all` that there is, in place of what was seen before.
        """
        lines = self._course.lines
        edition, _, count = seen.partition(".")
        is_known = edition == str(self._edition) and count.isdecimal() and int(count) <= len(lines)
        first = int(count) if is_known else 0
        keys = list(self._keys)
        return {
            "seen": f"{self._edition}.{len(lines)}",
            "all": first == 0,
            "keys": [text_of(key) for key in keys],
            "rows": [[line.get(key) for key in keys] for line in lines[first:]],
        }

    def _add(self, point: dict[str, Any]) -> None:
        course, self._skipped = self._course, 0
        taken_back = course.taken_back
        course.add(point)
        for key in point:
            if key not in self._keys and len(self._keys) < _MOST_KEYS:
                self._keys[key] = None
                self._edition += len(course.lines) > 1  # rows before had no such column
        if len(course.lines) > MOST_POINTS:
            course.lines[:] = course.lines[::2]
            self._every *= 2
            self._edition += 1
        self._edition += course.taken_back > taken_back

    def _newest_steps(self) -> float:
        lines = self._course.lines
        return number(lines[-1][STEPS]) if lines else 0.0

    def _begin_anew(self) -> None:
        self.newest, self.broken = {}, 0
        self._course, self._every, self._skipped = MetricsCourse(), 1, 0
        self._keys, self._edition = {}, self._edition + 1


def _points(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What is drawn of a line."""
    for key in _ALONE:
        if (value := _finite(line.get(key))) is not None:
            yield key, value
    yield "env_steps_dropped", sum(_numbers(_table(line, "env_steps_dropped")).values())
    for table, wanted, most in (
        ("modules", None, _MOST_NAMES),
        ("by_module", "episode_return_mean", _MOST_NAMES),
        ("by_agent", "episode_return_mean", _MOST_NAMES),
        ("info", "mean", _MOST_NUMBERS),
    ):
        for name, told in list(_table(line, table).items())[:most]:
            for key, value in _numbers(told).items():
                if wanted in (None, key):
                    yield f"{table}/{name}/{key}", value
    for key, value in list(_numbers(line.get("custom")).items())[:_MOST_NUMBERS]:
        yield f"custom/{key}", value
    for name, told in list(_table(_table(line, "league"), "learning").items())[:_MOST_NAMES]:
        if (value := _numbers(told).get("elo")) is not None:
            yield f"league/{name}/elo", value


def _table(line: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = line.get(key)
    return found if isinstance(found, Mapping) else {}


def _numbers(table: Any) -> dict[str, float]:
    plain = flat(table) if isinstance(table, Mapping) else {}
    return {key: found for key, each in plain.items() if (found := _finite(each)) is not None}


def _finite(value: Any) -> float | None:
    """A number, in as many digits as are drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    found = number(value)
    if found != found:
        return None
    return int(found) if found.is_integer() and abs(found) < 1e15 else float(f"{found:.6g}")
