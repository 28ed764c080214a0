"""What happened in a run, kept beside what people are shown of it."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from juggler.driver.record.progress import JsonProgress, Progress
from juggler.driver.record.wording import Level, plain
from juggler.runtime.actors.logs import log_record

EVENTS_FILE = "events.jsonl"

_KEPT = 20
_LONG_LINE = 500  # characters


class Journal:
    """A display that writes each message to `events.jsonl` too, and keeps the newest.

    Attributes:
        newest: (seconds since 1970, level, first line), oldest first.
    """

    def __init__(self, shown: Progress, run_dir: Path, run_id: str) -> None:
        """
        Args:
            shown: the display.
            run_dir: where the file is; it is made with the first message.
            run_id: stands in every line.
        """
        self.newest: deque[tuple[float, Level, str]] = deque(maxlen=_KEPT)
        self._shown = shown
        self._path = run_dir / EVENTS_FILE
        self._ids = {"run": run_id, "worker": "driver"}
        self._broken = False
        if isinstance(shown, JsonProgress):
            shown.ids = self._ids

    def waiting(self, text: str, wall_time: float) -> None:
        self._shown.waiting(text, wall_time)

    def waits_no_more(self) -> None:
        self._shown.waits_no_more()

    def start(self, config: Mapping[str, Any]) -> None:
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
