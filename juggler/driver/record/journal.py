"""Writes a run's messages and metrics lines to its directory, even while the disk fails."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from juggler.driver.record.progress import JsonProgress, Progress
from juggler.driver.record.run_directory import RunDirectory, RunDirectoryError
from juggler.driver.record.wording import Level, plain
from juggler.runtime.actors.logs import log_record

EVENTS_FILE = "events.jsonl"

_KEPT = 20
_LONG_LINE = 500  # characters


class Journal:
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
        with suppress(OSError):  # the first message will tell of it
            self._path.touch()  # a run of which nobody was told anything has an empty one
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


class LineWriter:
    """Appends metrics lines to a run directory.

    A run continues when the disk fails: one message tells of the problem, and one of its end.
    """

    def __init__(self, directory: RunDirectory, progress: Progress) -> None:
        self._directory = directory
        self._progress = progress
        self._problem = ""

    def append(self, line: Mapping[str, Any]) -> bool:
        """Append a line; return whether the directory was gone and has been made again."""
        problem, renewed = "", False
        try:
            renewed = self._directory.renew()
            self._directory.append(line)
        except RunDirectoryError as error:
            problem = str(error)
        path = self._directory.path
        if renewed:
            text = f"the run directory {path} was deleted or moved. It is made again, without its"
            self._progress.message(f"{text} files", "error")
        if problem and problem != self._problem:
            self._progress.message(problem, "error")
        elif self._problem and not problem:
            self._progress.message(f"metrics are written in {path} again", "info")
        self._problem = problem
        return renewed

    @property
    def taken(self) -> bool:
        """Whether another run has the directory now."""
        return self._directory.taken
