"""Shows a run to people while it trains."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TextIO

from juggler.driver.reporting.wording import (
    Level,
    Progress,
    clock,
    conclude,
    describe,
    mean_return,
    missing_steps,
    number,
    plain,
    quantity,
    time_left,
)
from juggler.runtime.actors.logs import log_entry

_PLAIN_SECONDS = 2.0  # seconds between two plain lines


def make_progress(kind: Literal["auto", "live", "plain", "json", "off"]) -> Progress:
    """Make a display; "auto" suits the terminal or the notebook."""
    if kind == "off":
        return Progress()
    if kind == "json":
        return JsonProgress()
    if kind == "live" or (kind == "auto" and is_capable(sys.stdout)):
        from juggler.driver.reporting.live_progress import LiveProgress  # imports rich

        return LiveProgress()
    if kind == "auto" and _in_notebook():
        return NotebookProgress()
    return PlainProgress()


class PlainProgress(Progress):
    """Prints plain text every two seconds, for logs and pipes."""

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
        self.message(text)

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        text = plain(text).encode(encoding, "backslashreplace").decode(encoding)
        try:
            print(text, file=self._stream, flush=True)
        except OSError:  # the pipe or the terminal is closed, and the run continues
            # The rest of the stream's buffer is written when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class JsonProgress(PlainProgress):
    """Prints the same lines as JSON objects, for programs that collect logs."""

    # Keys of every line; the driver adds the run's id
    ids: Mapping[str, str] = {"worker": "driver"}

    def message(self, text: str, level: Level = "info") -> None:
        self._write(json.dumps(log_entry(plain(text), level, self.ids)))


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
    """A display that also writes messages to `events.jsonl` and keeps the newest."""

    def __init__(self, shown: Progress, run_dir: Path, run_id: str) -> None:
        # (seconds since 1970, level, first line), oldest first
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
                file.write(json.dumps(log_entry(plain(text), level, self._ids)) + "\n")
            self._broken = False
        except OSError as error:
            if not self._broken:
                self._broken = True
                self._shown.message(f"cannot write {self._path}: {error.strerror}", "error")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._shown.finish(summary)
