"""A run in a process of its own, as one of many."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.driver.callbacks import MetricsLine
from juggler.driver.record.event_file import flat
from juggler.driver.record.line_file import LineFile
from juggler.driver.record.metrics_file import parse_line
from juggler.driver.record.run_directory import METRICS_FILE, SUMMARY_FILE, has_checkpoint
from juggler.runtime.plain_files import read_json

#: `juggler ARGUMENTS`, for a parent whose process id comes first. If the parent is killed, the run
#: ends in order, as it does at SIGTERM.
_PROGRAM = """
import os, signal, sys
from juggler.runtime.actors.orphans import die_with_parent
die_with_parent(signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
from juggler.cli import main
sys.exit(main(sys.argv[2:]))
"""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How the process of a run ended.

    Attributes:
        summary: the content of `summary.json`, flat; {}: there is none.
        interrupted: `stop` ended it, and it can go on.
        problem: what went wrong, for people; "": nothing did.
    """

    summary: MetricsLine
    interrupted: bool
    problem: str


class RunProcess:
    """`juggler train` in a process of its own.

    Attributes:
        run_dir: of the run.
        newest: its newest line of metrics, flat; {} before the first one.
    """

    def __init__(self, config_file: Path, run_dir: Path) -> None:
        """Start a run, or go on with it where it has a checkpoint. What it prints is in a file
        beside its directory, with the suffix `.log`.

        Args:
            config_file: its configuration.
            run_dir: its directory. What is left there of a run without a checkpoint is deleted.
        """
        self.run_dir = run_dir
        self.newest: MetricsLine = {}
        self._log = run_dir.with_suffix(".log")
        self._metrics = LineFile(run_dir / METRICS_FILE)
        self._stopped = False
        if has_checkpoint(run_dir):
            arguments = ["--resume", str(run_dir)]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            arguments = [str(config_file), "--run-dir", str(run_dir)]
        command = [sys.executable, "-c", _PROGRAM, str(os.getpid()), "train", *arguments]
        with self._log.open("ab") as log:
            # In a session of its own, since a terminal sends Ctrl-C to all processes of one.
            self._process = subprocess.Popen(
                [*command, "--progress", "plain"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the run's driver."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """It has not ended."""
        return self._process.poll() is None

    def new_lines(self) -> Sequence[MetricsLine]:
        """The lines of metrics that came since the last call, flat."""
        found: list[MetricsLine] = []
        with suppress(OSError):  # it has written none yet
            self._metrics.begins_anew()
            lines = map(parse_line, self._metrics.new_lines())
            found = [flat(line) for line in lines if line]
        if found:
            self.newest = found[-1]
        return found

    def stop(self) -> None:
        """End the run in order, with a last checkpoint. This does not wait."""
        if not self._stopped:
            self._stopped = True
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it at once, with its workers, and wait until it has ended."""
        self._process.kill()
        self._process.wait()

    def end(self) -> RunEnd:
        """How it ended, once it has."""
        status = self._process.wait()
        summary: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # it came to no end of its own
            summary = flat(read_json(self.run_dir / SUMMARY_FILE))
        number = -status if status < 0 else max(0, status - 128)  # of the signal that ended it
        if number == signal.SIGINT and self._stopped:
            return RunEnd(summary, interrupted=True, problem="")
        if number in signal.valid_signals():
            return RunEnd(summary, False, f"ended by {signal.Signals(number).name}")
        if status or not summary:
            return RunEnd(summary, False, self._last_words() or f"exit status {status}")
        return RunEnd(summary, False, "")

    def _last_words(self) -> str:
        """The last line that it printed."""
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
