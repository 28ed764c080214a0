"""Commands that are started again when they fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from juggler.launch.following import Say
from juggler.runtime.actors.supervisor import RestartPolicy

#: A command that ran for `window_seconds` has worked: the next pause is short again.
_POLICY = RestartPolicy(first_delay=1.0)
_LAST_LINES = 1
#: What moves the cursor or colours a terminal.
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class KeptRunning:
    """A command that is started, and started again whenever it ends with another status than 0.

    Attributes:
        name: for people.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, say: Say) -> None:
        """
        Args:
            name: for people.
            command: its words.
            log: the file that takes what it prints.
            say: tells people.
        """
        self.name = name
        self._command, self._log, self._say = list(command), log, say
        self._process: subprocess.Popen[bytes] | None = None
        self._last: list[str] = []  # lines that it printed
        self._deaths, self._due, self._began = 0, 0.0, 0.0
        self._reader: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether it runs now."""
        return self._process is not None

    def look(self) -> None:
        """Start the command if it is due, and notice if it has ended. Call it often."""
        now = time.monotonic()
        if self._process is None:
            if 0 <= self._due <= now:
                self._start(now)
            return
        status = self._process.poll()
        if status is not None:
            self._ended(status, now)

    def start_no_more(self) -> None:
        """Do not start it again when it ends."""
        self._due = -1.0

    def end(self, number: int) -> None:
        """Send a signal to it, and do not start it again."""
        self.start_no_more()
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _start(self, now: float) -> None:
        self._last, self._began = [], now
        try:
            # A group of its own: Ctrl-C is the driver's, which sends all others home.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._later(now, f"cannot start it: {error}")
            return
        self._reader = threading.Thread(
            target=self._read, args=(self._process,), name=self.name, daemon=True
        )
        self._reader.start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout, self._log.open("ab", buffering=0) as log:
            for line in process.stdout:
                text = _CONTROLS.sub("", line.decode(errors="replace")).strip()
                if text:
                    log.write(f"{text}\n".encode())
                    self._last = [*self._last, text][-_LAST_LINES:]

    def _ended(self, status: int, now: float) -> None:
        if self._reader is not None:
            self._reader.join(1.0)
        self._process = None
        if self._due < 0:
            return
        if status == 0:  # it was sent home
            self._due = -1.0
            return
        if now - self._began > _POLICY.window_seconds:
            self._deaths = 0
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        said = f": {' | '.join(self._last)}" if self._last else ""
        self._later(now, f"ended with {how}{said}")

    def _later(self, now: float, why: str) -> None:
        self._deaths += 1
        pause = _POLICY.delay(self._deaths, jitter=0.0)
        self._say(f"{self.name} {why}; starting it again in {pause:.0f} s")
        self._due = now + pause
