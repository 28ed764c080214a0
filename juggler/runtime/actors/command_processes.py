"""Runs commands as processes of a supervisor."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from juggler.runtime.actors.processes import process_descriptor

_LAST_LINES = 5
_LAST_BYTES = 2000
#: Asks the kernel to kill the process with the thread that started it, then executes the command.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


def must_be_executable(words: Sequence[str]) -> None:
    """Check that the program of a command can be found.

    Raises:
        FileNotFoundError: it cannot be found.
    """
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(f"there is no program {words[0]!r} that can be run")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A program and its arguments, as a `Program` of a supervisor.

    Attributes:
        words: words of the command line; no shell is used.
        log: file to append its output to; None: it shares this process's output.
        environment: changed environment variables; None: a variable is removed.
    """

    words: list[str]
    log: Path | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)

    def start(self, title: str = "") -> CommandProcess:
        """Start the program in its own process group.

        It dies with the calling thread.

        Raises:
            OSError: the program is not found, or the log cannot be written.
        """
        must_be_executable(self.words)
        variables = {**os.environ, **self.environment}
        if self.log is not None:
            self.log.parent.mkdir(exist_ok=True)
        with open(self.log or os.devnull, "ab") as log:
            # Read before the program writes, because it shares this file's position.
            output, begin = None if self.log is None else log, log.tell()
            process = subprocess.Popen(
                [sys.executable, "-ISc", _TIED, str(os.getpid()), *self.words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={name: each for name, each in variables.items() if each is not None},
                start_new_session=True,
            )
            return CommandProcess(process, self.log, begin)

    def ended(self, process: CommandProcess) -> str:
        """Kill the command's process group; return its last output."""
        process.kill()
        return f"its last output: {lines}" if (lines := process.last_lines()) else ""


class CommandProcess:
    """A running command, with the methods of multiprocessing's processes.

    Args:
        process: leader of a process group.
        log: file with its output; None: no file.
        begin: position of its output in this file.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path | None, begin: int) -> None:
        self._process, self._log, self._begin = process, log, begin
        self.pid = process.pid
        self.sentinel = process_descriptor(process.pid)
        weakref.finalize(self, os.close, self.sentinel)

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def kill(self) -> None:
        """Kill its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def last_lines(self) -> str:
        """Return its last lines of output as one line, without caret marks."""
        if self._log is None:
            return ""
        with suppress(OSError), self._log.open("rb") as log:
            log.seek(max(self._begin, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
            return " | ".join([each.strip() for each in lines if each.strip(" ^~")][-_LAST_LINES:])
        return ""
