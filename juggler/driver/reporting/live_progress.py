"""Shows a run in a terminal."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from juggler.driver.reporting.wording import (
    EPISODE,
    Level,
    Progress,
    age,
    algorithms,
    clock,
    conclude,
    each_return,
    missing_steps,
    number,
    plain,
    quantity,
    time_left,
)

_MOST_GOALS = 4  # modules and agents with their own row
_GOALS = ("return", "steps", "seconds")
_BLOCKS = "▁▂▃▄▅▆▇█"
_POINTS = 16  # of the course of a return
#: Name, value, bar, goal and course of a number.
_Row: TypeAlias = tuple[str, str, RenderableType, str, str]
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
        self._curves: dict[str, list[float]] = {}
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
            if mean is not None and math.isfinite(mean):
                self._curves.setdefault(name, []).append(mean)

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
            shown = [self._goals(), self._details(), self._incidents()]
        # Drawn four times a second: nothing here may take long.
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

    def _goals(self) -> Table:
        """Show returns, steps and time, each with a bar."""
        config, line = self._config, self._line
        stop_return, stop_steps = config.get("stop_return"), config.get("stop_steps")
        named = stop_return if isinstance(stop_return, Mapping) else {}
        goals = {EPISODE: None if named else stop_return, **dict(list(named.items())[:_MOST_GOALS])}
        steps, returns = line.get("env_steps_trained", 0), _returns(line)
        speed = f"{quantity(line.get('steps_per_second', 0.0))} steps/s"
        most = "" if stop_steps is None else quantity(stop_steps)
        rows = [
            *(self._return_row(name, returns.get(name), goal) for name, goal in goals.items()),
            ("steps", quantity(steps), _bar(0, steps, stop_steps), most, speed),
        ]
        if (seconds := config.get("stop_seconds")) is not None:
            passed = self._trained_for()
            rows.append(("time", clock(passed), _bar(0, passed, seconds), clock(seconds), ""))
        has_goals = any(config.get(f"stop_{key}") is not None for key in _GOALS)
        # Without a goal there is no bar to fill the width.
        grid = Table.grid(padding=(0, 1), expand=has_goals)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(justify="right", style="bold", no_wrap=True, min_width=7)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(no_wrap=True, min_width=_POINTS)
        for row in rows:
            grid.add_row(*row)
        return grid

    def _return_row(self, name: str, now: float | None, goal: float | None) -> _Row:
        """Make the row of episodes, a module or an agent."""
        curve = self._curves.get(name, [])
        bar = _bar(curve[0] if curve else None, now, goal)
        shown = "" if goal is None else number(goal)
        return plain(name) or "return", number(now), bar, shown, _sparkline(curve)

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


def _sparkline(values: Sequence[float]) -> str:
    """Draw the course of a number over the run with block characters."""
    if not values:
        return ""
    share = -(-len(values) // _POINTS)
    parts = (values[begin : begin + share] for begin in range(0, len(values), share))
    means = [sum(part) / len(part) for part in parts]
    low, span = min(means), max(means) - min(means)
    return "".join(
        _BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1)) if span else 0] for mean in means
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
    return {EPISODE: line.get("episode_return_mean"), **(line.get("stop_returns") or {})}


def _seconds(elapsed: float) -> str:
    return clock(elapsed) if elapsed >= 60 else f"{elapsed:.0f} s"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
