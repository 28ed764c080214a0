"""The display of a run in a terminal."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from juggler.driver.record.wording import Level, age, clock, conclude, number, plain, quantity

_NARROW = 60  # columns; below, there is no place for bars
_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES: dict[Level, str] = {"info": "dim", "warning": "yellow", "error": "red"}


class LiveProgress:
    """A small panel that stays at the foot of the terminal; messages scroll by above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live = Live(self, console=self._console, refresh_per_second=4)
        self._config: Mapping[str, Any] = {}
        self._line: Mapping[str, Any] = {}
        self._line_came = time.monotonic()
        self._returns = Curve()
        self._last = Text()

    def start(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._line_came = time.monotonic()
        # Whatever way the process ends, the terminal gets its cursor back.
        atexit.register(self._live.stop)
        self._live.start()

    def update(self, line: Mapping[str, Any]) -> None:
        self._line = line
        self._line_came = time.monotonic()
        self._returns.add(line["episode_return_mean"])

    def message(self, text: str, level: Level = "info") -> None:
        style = _STYLES[level]
        text = plain(text).strip("\n")
        label = "" if level == "info" else f"{level}: "
        self._console.print(Text.assemble((label, f"bold {style}"), (text, style)))
        self._last = Text(label + text.partition("\n")[0], style=style)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._last = Text()
        self._live.stop()
        atexit.unregister(self._live.stop)
        headline, *rest = plain(conclude(summary)).splitlines()
        style = "bold green" if summary.get("solved") else "bold"
        self._console.print(Text(headline, style=style))
        for line in rest:
            self._console.print(Text(line), soft_wrap=True)  # so that a path can be copied

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        env, algorithm = (plain(str(self._config.get(key))) for key in ("env", "algorithm"))
        last = self._last.copy()
        if not last and not self._line.get("env_steps_sampled"):
            last = Text("waiting for the first steps", style="dim")
        last.truncate(max(1, options.max_width - 4), overflow="ellipsis")
        rows = (self._details(), self._incidents(), last)
        yield Panel(
            Group(self._goals(options.max_width >= _NARROW), *(row for row in rows if row)),
            title=Text.assemble(("juggler", "bold"), f" {env} ", (algorithm, "dim")),
            title_align="left",
            subtitle=Text(self._time()),
            subtitle_align="right",
            border_style="cyan",
        )

    def _goals(self, wide: bool) -> Table:
        """The return and the steps, each on its way to where the run stops."""
        episode_return = self._line.get("episode_return_mean")
        steps = self._line.get("env_steps_trained", 0)
        stop_return, stop_steps = self._config.get("stop_return"), self._config.get("stop_steps")
        speed = f"{quantity(self._line.get('steps_per_second', 0.0))} steps/s"
        rows = [
            (
                ("return", number(episode_return)),
                _bar(self._returns.first, episode_return, stop_return),
                ("" if stop_return is None else number(stop_return), self._returns.drawn()),
            ),
            (
                ("steps", quantity(steps)),
                _bar(0, steps, stop_steps),
                ("" if stop_steps is None else quantity(stop_steps), speed),
            ),
        ]
        # Without a goal there is no bar, and nothing to fill the width with.
        grid = Table.grid(padding=(0, 1), expand=not wide or stop_return != stop_steps)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(justify="right", style="bold", no_wrap=True, min_width=7)
        if wide:
            grid.add_column(ratio=1)
            grid.add_column(justify="right", no_wrap=True)
            grid.add_column(no_wrap=True, min_width=Curve.points)
        for measured, bar, goal in rows:
            grid.add_row(*measured, *((bar, *goal) if wide else ()))
        return grid

    def _details(self) -> Text:
        line = self._line
        parts = (
            f"{line.get('updates', 0):,} updates",
            f"staleness {number(line.get('staleness_mean'))}"
            f" (max {_dash(line.get('staleness_max'))})",
            _counted(line.get("num_env_runners", 0), "envrunner"),
            _counted(line.get("num_learners", 0), "learner"),
        )
        return Text(" · ".join(parts))

    def _incidents(self) -> Text:
        """What not every run has."""
        line = self._line
        parts = [
            Text(f"{quantity(steps)} steps dropped ({reason})", style="yellow")
            for reason, steps in line.get("env_steps_dropped", {}).items()
            if steps
        ]
        if restarts := line.get("restarts", 0):
            parts.append(Text(_counted(restarts, "restart"), style="yellow"))
        if old := age(line):
            parts.insert(0, Text(f"no episode has ended for {old}", style="yellow"))
        if line.get("evaluation_return_mean") is not None:
            parts.insert(0, Text(f"evaluation {number(line['evaluation_return_mean'])}"))
        return Text(" · ").join(parts)

    def _time(self) -> str:
        if (limit := self._config.get("stop_seconds")) is not None:
            trained = self._line.get("training_time", 0.0)
            return f"training for {_seconds(trained)} of {clock(limit)}"
        return _seconds(self._line.get("wall_time", 0.0) + time.monotonic() - self._line_came)


class Curve:
    """The course of a number from the first value to the last, in a few block characters.

    Attributes:
        first: the first value, None before there is one.
    """

    points = 16

    def __init__(self) -> None:
        self.first: float | None = None
        self._means: list[float] = []  # of `_share` values each, but for the last
        self._share = 1
        self._left = 0  # values that the last mean still takes

    def add(self, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            return
        if self.first is None:
            self.first = value
        if self._left == 0:
            if len(self._means) == self.points:
                pairs = zip(self._means[::2], self._means[1::2], strict=True)
                self._means = [(a + b) / 2 for a, b in pairs]
                self._share *= 2
            self._means.append(value)
            self._left = self._share - 1
        else:
            count = self._share - self._left
            self._means[-1] += (value - self._means[-1]) / (count + 1)
            self._left -= 1

    def drawn(self) -> str:
        means = self._means
        if not means:
            return ""
        low, span = min(means), max(means) - min(means)
        return "".join(
            _BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1)) if span else 0]
            for mean in means
        )


def _bar(first: float | None, now: float | None, goal: float | None) -> RenderableType:
    """How much of the way from the first value to the goal is done; nothing without a goal."""
    if goal is None:
        return ""
    done = 0.0
    if first is not None and now is not None and math.isfinite(now):
        done = (now - first) / (goal - first) if goal > first else 1.0
    return ProgressBar(
        total=1.0,
        completed=min(max(done, 0.0), 1.0),
        complete_style="cyan",
        finished_style="green",
    )


def _seconds(elapsed: float) -> str:
    return clock(elapsed) if elapsed >= 60 else f"{elapsed:.0f} s"


def _dash(value: object) -> str:
    return "-" if value is None else str(value)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
