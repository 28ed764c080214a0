"""Logs of a process, one line each, for people or machines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]


def log_entry(text: str, level: str, ids: Mapping[str, str]) -> dict[str, object]:
    """Make a log line for a machine, as JSON data.

    Args:
        text: what happened.
        level: info, warning or error.
        ids: of the run, the worker and its incarnation, if known.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"time": now, "level": level, **ids, "pid": os.getpid(), "message": text}


class WorkerLog:
    """Writes a worker's own lines on stderr.

    Args:
        role: its name before it has a worker id.
        log_format: "text", or "json" for one object per line.

    Attributes:
        log_format: as given.
    """

    def __init__(self, role: str, log_format: LogFormat = "text") -> None:
        self.log_format: LogFormat = log_format
        self._ids = {"worker": role}

    def identify(self, run_id: str, worker_id: str, incarnation: str) -> None:
        """Set run, worker and incarnation for later lines."""
        self._ids.update(run=run_id, worker=worker_id, incarnation=incarnation)

    def info(self, text: str) -> None:
        self._write(text, "info")

    def error(self, text: str) -> None:
        self._write(text, "error")

    def _write(self, text: str, level: str) -> None:
        if self.log_format == "json":
            line = json.dumps(log_entry(text, level, self._ids))
        else:
            others = [f"{key} {value}" for key, value in self._ids.items() if key != "worker"]
            where = f" ({', '.join(others)})" if others else ""
            line = f"juggler {self._ids['worker']}{where}: {text}"
        # A process may have no stderr, or one without a reader. Its work is more important.
        with suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
