"""Shows the progress of a run, live in a terminal or as lines."""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, TextIO, TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from juggler.driver.record.wording import (
    Level,
    Progress,
    age,
    algorithms,
    clock,
    conclude,
    describe,
    each_return,
    goal_returns,
    mean_return,
    missing_steps,
    number,
    plain,
    quantity,
    time_left,
)
from juggler.runtime.actors.logs import log_record

_NARROW = 60  # columns; narrower terminals show no bars
_MOST_GOALS = 4  # modules and agents with their own row
_GOALS = ("return", "steps", "seconds")
_BLOCKS = "▁▂▃▄▅▆▇█"
#: Name, value, bar, goal and course of a number.
_Row: TypeAlias = tuple[str, str, RenderableType, str, str]
#: Name of the return of whole episodes.
EPISODE: Final = ""
_STYLES: dict[Level, str] = {"info": "dim", "warning": "yellow", "error": "red"}


class LiveProgress(Progress):
    """A panel at the bottom of the terminal, with messages above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live = Live(self, console=self._console, refresh_per_second=4)
        self._config: Mapping[str, Any] = {}
        self._line: Mapping[str, Any] = {}
        self._line_came = time.monotonic()
        # Curves of returns, of episodes and of the modules and agents that have a goal
        self._curves: dict[str, Sparkline] = {}
        self._last = Text()
        self._waits_for = "workers"  # what the run waits for; "" after the first update
        self._status = Status("", console=self._console)  # shown before the panel
        self._ended = False

    def waiting(self, text: str, wall_time: float) -> None:
        self._waits_for = plain(text)
        if self._live.is_started:
            self._line = {**self._line, "wall_time": wall_time}
            self._line_came = time.monotonic()
        else:
            self._status.update(Text(f"starting: {self._waits_for}", style="dim"))
            self._status.start()

    def stop_waiting(self) -> None:
        self._status.stop()

    def start(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._line_came = time.monotonic()
        # The terminal gets its cursor back even if the process is killed.
        atexit.register(self._live.stop)
        self._live.start()

    def update(self, line: Mapping[str, Any]) -> None:
        self._waits_for = ""
        self._line = line
        self._line_came = time.monotonic()
        for name, mean in _returns(line).items():
            self._curves.setdefault(name, Sparkline()).add(mean)

    def message(self, text: str, level: Level = "info") -> None:
        style = _STYLES[level]
        text = plain(text).strip("\n")
        label = "" if level == "info" else f"{level}: "
        self._console.print(Text.assemble((label, f"bold {style}"), (text, style)))
        self._last = Text(label + text.partition("\n")[0], style=style)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._last = Text()
        self._ended = True
        self._live.stop()
        atexit.unregister(self._live.stop)
        headline, *rest = plain(conclude(summary)).splitlines()
        style = "bold green" if summary.get("solved") else "bold"
        self._console.print(Text(headline, style=style))
        for line in rest:
            self._console.print(Text(line), soft_wrap=True)  # so that a path can be copied

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        env, algorithm = plain(str(self._config.get("env"))), plain(algorithms(self._config))
        waits, last = Text(f"starting: {self._waits_for}"), self._last.copy()
        for text in (waits, last):
            text.truncate(max(1, options.max_width - 4), overflow="ellipsis")
        shown: list[RenderableType] = [waits]  # shown instead of rows of zeros
        if not self._waits_for or self._ended:
            shown = [self._goals(options.max_width >= _NARROW), self._details(), self._incidents()]
        yield Panel(
            Group(*(row for row in (*shown, last) if row)),
            title=Text.assemble(("juggler", "bold"), f" {env} ", (algorithm, "dim")),
            title_align="left",
            subtitle=Text(self._time()),
            subtitle_align="right",
            border_style="cyan",
        )
        if not self._ended:
            # The cursor has its own line: a terminal writes "^C" at the cursor, which would break
            # the border.
            yield Text("")

    def _goals(self, wide: bool) -> Table:
        """Show returns, steps and time, each with a bar."""
        config, line = self._config, self._line
        stop_return, stop_steps = config.get("stop_return"), config.get("stop_steps")
        named = stop_return if isinstance(stop_return, Mapping) else {}
        goals = {EPISODE: None if named else stop_return, **dict(list(named.items())[:_MOST_GOALS])}
        steps, returns = line.get("env_steps_trained", 0), _returns(line)
        speed = f"{quantity(line.get('steps_per_second', 0.0))} steps/s"
        rows = [
            *(self._return_row(name, returns.get(name), goal) for name, goal in goals.items()),
            ("steps", quantity(steps), _bar(0, steps, stop_steps), _shown(stop_steps), speed),
        ]
        if (seconds := config.get("stop_seconds")) is not None:
            passed = self._trained_for()
            rows.append(("time", clock(passed), _bar(0, passed, seconds), clock(seconds), ""))
        has_goals = any(config.get(f"stop_{key}") is not None for key in _GOALS)
        # Without a goal there is no bar to fill the width.
        grid = Table.grid(padding=(0, 1), expand=not wide or has_goals)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(justify="right", style="bold", no_wrap=True, min_width=7)
        if wide:
            grid.add_column(ratio=1)
            grid.add_column(justify="right", no_wrap=True)
            grid.add_column(no_wrap=True, min_width=Sparkline.points)
        for row in rows:
            grid.add_row(*row[: len(grid.columns)])
        return grid

    def _return_row(self, name: str, now: float | None, goal: float | None) -> _Row:
        """Make the row of episodes, a module or an agent."""
        curve = self._curves.get(name, Sparkline())
        bar, shown = _bar(curve.first, now, goal), "" if goal is None else number(goal)
        return plain(name) or "return", number(now), bar, shown, curve.drawn()

    def _details(self) -> Text:
        line, most = self._line, self._line.get("staleness_max")
        parts = (
            *filter(None, [each_return(line)]),
            f"{line.get('updates', 0):,} updates",
            f"staleness {number(line.get('staleness_mean'))} (max {'-' if most is None else most})",
            _counted(line.get("num_env_runners", 0), "envrunner"),
            _counted(line.get("num_learners", 0), "learner"),
        )
        return Text(" · ".join(parts))

    def _incidents(self) -> Text:
        """Show dropped steps, restarts, old returns, evaluations and missing steps."""
        line = self._line
        parts = [
            Text(f"{quantity(steps)} steps dropped ({reason})", style="yellow")
            for reason, steps in line.get("env_steps_dropped", {}).items()
            if steps
        ]
        if restarts := line.get("restarts", 0):
            parts.append(Text(_counted(restarts, "restart"), style="yellow"))
        if missing := missing_steps(line):
            parts.insert(0, Text(missing))
        if old := age(line):
            parts.insert(0, Text(f"no episode has ended for {old}", style="yellow"))
        if line.get("evaluation_return_mean") is not None:
            parts.insert(0, Text(f"evaluation {number(line['evaluation_return_mean'])}"))
        return Text(" · ").join(parts)

    def _since_line(self) -> float:
        return time.monotonic() - self._line_came

    def _trained_for(self) -> float:
        """Seconds since the first sample request, which `stop_seconds` limits."""
        seconds: float = self._line.get("training_time", 0.0)
        return seconds + self._since_line() if seconds else 0.0

    def _time(self) -> str:
        if (limit := self._config.get("stop_seconds")) is not None:
            shown = f"training for {_seconds(self._trained_for())} of {clock(limit)}"
        else:
            shown = _seconds(self._line.get("wall_time", 0.0) + self._since_line())
        left = time_left(self._config, {**self._line, "training_time": self._trained_for()})
        return shown if left is None or self._ended else f"{shown} · {clock(left)} left"


class Sparkline:
    """The course of a number over the run, drawn with block characters."""

    points = 16

    def __init__(self) -> None:
        self._values: list[float] = []

    @property
    def first(self) -> float | None:
        """The first value; None before it."""
        return self._values[0] if self._values else None

    def add(self, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self._values.append(value)

    def drawn(self) -> str:
        values = self._values
        if not values:
            return ""
        share = -(-len(values) // self.points)
        parts = (values[begin : begin + share] for begin in range(0, len(values), share))
        means = [sum(part) / len(part) for part in parts]
        low, span = min(means), max(means) - min(means)
        return "".join(
            _BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1)) if span else 0]
            for mean in means
        )


def _bar(first: float | None, now: float | None, goal: float | None) -> RenderableType:
    """Show progress from a first value to a goal, if any."""
    if goal is None:
        return ""
    done = 0.0
    if first is not None and now is not None and math.isfinite(now):
        done = (now - first) / (goal - first) if goal > first else 1.0
    return ProgressBar(
        total=1.0, completed=min(max(done, 0.0), 1.0), complete_style="cyan", finished_style="green"
    )


def _returns(line: Mapping[str, Any]) -> dict[str, float | None]:
    """Return mean returns of episodes, modules and agents by name."""
    return {EPISODE: line.get("episode_return_mean"), **goal_returns(line)}


def _shown(count: float | None) -> str:
    return "" if count is None else quantity(count)


def _seconds(elapsed: float) -> str:
    return clock(elapsed) if elapsed >= 60 else f"{elapsed:.0f} s"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


#: Seconds between two plain lines.
_PLAIN_SECONDS = 2.0


def make_progress(kind: Literal["auto", "live", "plain", "json", "off"]) -> Progress:
    """Make a display.

    "auto" is live in a terminal that can show it, a changing line in a notebook, and plain lines
    elsewhere.
    """
    if kind == "off":
        return Progress()
    if kind == "json":
        return JsonProgress()
    if kind == "live" or (kind == "auto" and is_capable(sys.stdout)):
        from juggler.driver.record.progress import LiveProgress  # imports rich

        return LiveProgress()
    if kind == "auto" and _in_notebook():
        return NotebookProgress()
    return PlainProgress()


class PlainProgress(Progress):
    """Prints plain text every two seconds, for logs and pipes.

    The run continues after the pipe or the terminal is closed.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._due = 0.0  # in the lines' wall time
        self._config: Mapping[str, Any] = {}

    def waiting(self, text: str, wall_time: float) -> None:
        if self._is_due(wall_time):
            self._print(f"{clock(wall_time):>7}  starting: {text}")

    def start(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._print(f"training {describe(config)}")

    def update(self, line: Mapping[str, Any]) -> None:
        if self._is_due(line["wall_time"]):
            left, missing = time_left(self._config, line), missing_steps(line)
            self._print(
                f"{clock(line['wall_time']):>7}"
                f"  return {mean_return(line, width=7)}"
                f"  steps {quantity(line['env_steps_trained']):>5}"
                f"  {quantity(line['steps_per_second']):>5} steps/s"
                f"  staleness {number(line['staleness_mean']):>4}"
                f"  updates {line['updates']}"
                f"  envrunners {line['num_env_runners']}"
                + (f"  restarts {line['restarts']}" if line.get("restarts") else "")
                + ("" if left is None else f"  {clock(left)} left")
                + (f"  {missing}" if missing else "")
            )

    def message(self, text: str, level: Level = "info") -> None:
        self._write(text if level == "info" else f"{level}: {text}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._print(conclude(summary))

    def _is_due(self, wall_time: float) -> bool:
        due = wall_time >= self._due
        if due:
            self._due = wall_time + _PLAIN_SECONDS
        return due

    def _print(self, text: str) -> None:
        self._write(text)

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        text = plain(text).encode(encoding, "backslashreplace").decode(encoding)
        try:
            print(text, file=self._stream, flush=True)
        except OSError:
            # The rest of the stream's buffer is written when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class JsonProgress(PlainProgress):
    """Prints the same lines as JSON objects, for programs that collect logs."""

    # Keys of every line; the driver adds the run's id
    ids: Mapping[str, str] = {"worker": "driver"}

    def message(self, text: str, level: Level = "info") -> None:
        self._write(json.dumps(log_record(plain(text), level, self.ids)))

    def _print(self, text: str) -> None:
        self.message(text)


class NotebookProgress(PlainProgress):
    """Plain progress in a notebook: lines replace each other, messages stay."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._what = ""

    def start(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._what = f"{describe(config)}\n"

    def finish(self, summary: Mapping[str, Any]) -> None:
        # The notebook shows the result as a table, which has the directory.
        self._print(conclude(summary).partition("\n")[0])

    def _print(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": plain(self._what + text.strip())}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def _in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def is_capable(stream: TextIO) -> bool:
    """Return whether a stream is a Unicode terminal with a movable cursor."""
    encoding = (stream.encoding or "").lower().replace("-", "")
    return stream.isatty() and encoding == "utf8" and os.environ.get("TERM", "dumb") != "dumb"


EVENTS_FILE = "events.jsonl"

_KEPT = 20
_LONG_LINE = 500  # characters


class Journal(Progress):
    """A display that also writes messages to `events.jsonl` and keeps the newest.

    Attributes:
        newest: (seconds since 1970, level, first line), oldest first.
    """

    def __init__(self, shown: Progress, run_dir: Path, run_id: str) -> None:
        self.newest: deque[tuple[float, Level, str]] = deque(maxlen=_KEPT)
        self._shown = shown
        self._path = run_dir / EVENTS_FILE
        self._ids = {"run": run_id, "worker": "driver"}
        self._broken = False
        if isinstance(shown, JsonProgress):
            shown.ids = self._ids

    def waiting(self, text: str, wall_time: float) -> None:
        self._shown.waiting(text, wall_time)

    def stop_waiting(self) -> None:
        self._shown.stop_waiting()

    def start(self, config: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the first message reports the problem
            self._path.touch()  # a run without messages has an empty file
        self._shown.start(config)

    def update(self, line: Mapping[str, Any]) -> None:
        self._shown.update(line)

    def message(self, text: str, level: Level = "info") -> None:
        first = plain(text).strip().partition("\n")[0][:_LONG_LINE]
        self.newest.append((time.time(), level, first))
        self._shown.message(text, level)
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(log_record(plain(text), level, self._ids)) + "\n")
            self._broken = False
        except OSError as error:
            if not self._broken:
                self._broken = True
                self._shown.message(f"cannot write {self._path}: {error.strerror}", "error")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._shown.finish(summary)
