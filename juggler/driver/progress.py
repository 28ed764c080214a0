"""What people see of a run while it goes on."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TextIO

Level = Literal["info", "warning", "error"]

#: Seconds between two plain lines.
_PLAIN_SECONDS = 2.0

_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Progress(Protocol):
    """Shows a run to people. All calls come from one thread."""

    def start(self, config: Mapping[str, Any]) -> None:
        """The run begins; `config` is its flat configuration."""

    def update(self, line: Mapping[str, Any]) -> None:
        """A new metrics line."""

    def message(self, text: str, level: Level = "info") -> None:
        """Something that happened, in one line or many, such as a worker's traceback."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run is over; `summary` is what `summary.json` holds."""


def make_progress(kind: Literal["auto", "live", "plain", "none"]) -> Progress:
    """The display of that kind; "auto" is live in a terminal that can show it, else plain."""
    if kind == "none":
        return SilentProgress()
    if kind == "live" or (kind == "auto" and _is_capable(sys.stdout)):
        from juggler.driver.live_progress import LiveProgress  # rich is for those who see it

        return LiveProgress()
    return PlainProgress()


class SilentProgress:
    """Shows nothing."""

    def start(self, config: Mapping[str, Any]) -> None:
        pass

    def update(self, line: Mapping[str, Any]) -> None:
        pass

    def message(self, text: str, level: Level = "info") -> None:
        pass

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass


class PlainProgress:
    """A line of plain text about every two seconds, for log files and pipes.

    Where nobody reads any more (a closed pipe, a lost terminal), the run goes on unseen.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._due = 0.0  # in the lines' wall time

    def start(self, config: Mapping[str, Any]) -> None:
        self._print(f"training {describe(config)}")

    def update(self, line: Mapping[str, Any]) -> None:
        if line["wall_time"] >= self._due:
            self._due = line["wall_time"] + _PLAIN_SECONDS
            self._print(
                f"{clock(line['wall_time']):>7}"
                f"  return {number(line['episode_return_mean']):>7}"
                f"  steps {quantity(line['env_steps_trained']):>5}"
                f"  {quantity(line['steps_per_second']):>5} steps/s"
                f"  staleness {number(line['staleness_mean']):>4}"
                f"  updates {line['updates']}"
                f"  envrunners {line['num_env_runners']}"
            )

    def message(self, text: str, level: Level = "info") -> None:
        self._print(text if level == "info" else f"{level}: {text}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._print(conclude(summary))

    def _print(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        text = plain(text).encode(encoding, "backslashreplace").decode(encoding)
        try:
            print(text, file=self._stream, flush=True)
        except OSError:
            # What is still in the stream's buffer has to go somewhere when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def describe(config: Mapping[str, Any]) -> str:
    """What is trained, with what, until when: from a flat configuration."""
    until = [
        text.format(quantity(config[key]))
        for key, text in (
            ("stop_return", "a return of {}"),
            ("stop_steps", "{} steps"),
            ("stop_seconds", "{} seconds"),
        )
        if config.get(key) is not None
    ]
    goal = f" until {' or '.join(until)}" if until else ""
    seed = f", seed {config['seed']}" if "seed" in config else ""
    return f"{config.get('env')} with {config.get('algorithm')}{goal}{seed}"


def conclude(summary: Mapping[str, Any]) -> str:
    """How the run ended, in a few lines: from its summary."""
    how = "solved" if summary.get("solved") else f"ended ({summary.get('reason_for_stop')})"
    lines = [
        f"{how}: return {number(summary.get('episode_return_mean'))} after "
        f"{quantity(summary.get('env_steps_trained', 0))} steps "
        f"in {clock(summary.get('wall_time', 0.0))}"
    ]
    for key, name in (("run_dir", "run directory"), ("checkpoint", "checkpoint")):
        if summary.get(key):
            lines.append(f"{name}: {summary[key]}")
    return "\n".join(lines)


def plain(text: str) -> str:
    """The text without what would move the cursor or colour the terminal."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text).replace("\r\n", "\n"))


def quantity(value: float) -> str:
    """A count in at most three digits and a letter: 950, 12.3k, 1.23M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def number(value: float | None) -> str:
    """A measured number with about four digits; a dash where there is none yet."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.2f}" if size < 100 else f"{value:.1f}" if size < 10_000 else f"{value:.4g}"


def clock(seconds: float) -> str:
    """A duration: 9.4 s, 1:23 or 2:03:04."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _is_capable(stream: TextIO) -> bool:
    """A terminal that can move its cursor and show the bars' characters."""
    encoding = (stream.encoding or "").lower().replace("-", "")
    return stream.isatty() and encoding == "utf8" and os.environ.get("TERM", "dumb") != "dumb"
