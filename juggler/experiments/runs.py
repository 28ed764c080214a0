"""Several runs at the same time: their processes, directory and display."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from juggler.driver.callbacks import MetricsLine
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import load_config_and_keys
from juggler.driver.reporting.progress import is_capable
from juggler.driver.reporting.run_directory import (
    METRICS_FILE,
    SUMMARY_FILE,
    LineFile,
    RunDirectoryError,
    flat,
    has_checkpoint,
    lock,
    make_default,
    must_be_free,
    parse_line,
)
from juggler.driver.reporting.wording import here, plain
from juggler.driver.signals import as_exception, signals_become
from juggler.runtime.actors.resources import usable_cores
from juggler.runtime.checkpoints.checkpoint import write_synced
from juggler.runtime.importing import must_not_be_imported
from juggler.runtime.plain_files import read_json

_LOOK_SECONDS: Final = 0.25
_TABLE_SECONDS: Final = 60.0  # between tables of runs at work, without a terminal
_WIDTH: Final = 120  # of tables, without a terminal

#: `juggler ARGUMENTS`, for a parent whose process id comes first. If the parent is killed, the run
#: ends normally, like at SIGTERM.
_PROGRAM: Final = """
import os, signal, sys
from juggler.runtime.actors.processes import die_with_parent
die_with_parent(signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
from juggler.cli import main
sys.exit(main(sys.argv[2:]))
"""


@dataclass(frozen=True, slots=True)
class RunExit:
    """How the process of a run ended."""

    summary: MetricsLine  # the content of `summary.json`, flat; {}: none
    interrupted: bool  # ended by `stop`, and can be resumed
    problem: str  # the problem, for people; "": no problem


class RunProcess:
    """A process that runs `juggler train`."""

    def __init__(self, config_file: Path, run_dir: Path) -> None:
        """Start a run, or resume it; remains without a checkpoint are deleted."""
        self.run_dir = run_dir
        self.newest: MetricsLine = {}  # its newest line of metrics, flat; {} before the first one
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
            # In its own session, since a terminal sends Ctrl-C to all processes of its session.
            self._process = subprocess.Popen(
                [*command, "--progress", "plain"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether the run has not ended."""
        return self._process.poll() is None

    def new_lines(self) -> Sequence[MetricsLine]:
        """Return the lines of metrics since the last call, flat."""
        found: list[MetricsLine] = []
        with suppress(OSError):  # no lines yet
            lines = map(parse_line, self._metrics.new_lines())
            found = [flat(line) for line in lines if line]
        if found:
            self.newest = found[-1]
        return found

    def stop(self) -> None:
        """End the run normally, without waiting."""
        if not self._stopped:
            self._stopped = True
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End the run and its workers at once."""
        self._process.kill()
        self._process.wait()

    def end(self) -> RunExit:
        """Return how an ended run ended."""
        status = self._process.wait()
        summary: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # no summary: it was killed
            summary = flat(read_json(self.run_dir / SUMMARY_FILE))
        # The number of the signal that ended it: a command may report it as 128 and its number.
        number = -status if status < 0 else max(0, status - 128)
        if number == signal.SIGINT and self._stopped:
            return RunExit(summary, interrupted=True, problem="")
        if number in signal.valid_signals():
            return RunExit(summary, False, f"ended by {signal.Signals(number).name}")
        if status or not summary:
            lines = self._log.read_text(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            return RunExit(summary, False, last or f"exit status {status}")
        return RunExit(summary, False, "")


class Runs(ABC):
    """Several runs, as many at once as cores allow."""

    #: File that describes the runs of the directory; locked by a process.
    file: ClassVar[str]

    def __init__(
        self, directory: Path, config: RunConfig, jobs: int | None, resume_command: str
    ) -> None:
        self.directory = directory
        self._resume_command = resume_command
        workers = config.driver.num_env_runners + config.driver.learners
        self._jobs = jobs or max(1, int(usable_cores() // workers))
        kind = config.driver.progress
        is_live = kind == "live" or (kind == "auto" and is_capable(sys.stdout))
        width = None if is_live else _WIDTH
        self._console = Console(highlight=False, width=width, quiet=kind == "off")
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True) if is_live else None
        )
        self._table_due = 0.0

    @abstractmethod
    def next(self) -> RunProcess | None:
        """Start the next run; None: no further run."""

    def read_new(self, run: RunProcess) -> None:
        """Read new lines of a run, which may be stopped."""
        run.new_lines()

    @abstractmethod
    def over(self, run: RunProcess, end: RunExit) -> None:
        """Note how a run has ended."""

    @abstractmethod
    def table(self, running: Sequence[RunProcess], title: str) -> Table:
        """Show the runs at work."""

    def make_table(self, title: str, *columns: str) -> Table:
        """Make a table of the runs at work."""
        table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
        for each in table.columns:
            each.overflow = "fold"
        return table

    def report(self, text: str, style: str = "") -> None:
        """Show a message."""
        self.show(Text(plain(text), style=style))

    def show(self, shown: RenderableType) -> None:
        """Show text or a table, above the runs at work."""
        self._console.print(shown, soft_wrap=isinstance(shown, Text))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the directory; show how to resume after an interruption.

        Raises:
            RunDirectoryError: another process has it, or it is not a directory of these runs.
        """
        must_not_be_imported()
        with (self.directory / self.file).open("rb") as locked:
            if not lock(locked):
                raise RunDirectoryError(
                    f"another process is at work in {self.directory}; stop it before you resume "
                    "these runs"
                )
            try:
                yield
            except (KeyboardInterrupt, SystemExit) as end:
                self.report(f"interrupted; to resume: {self._resume_command}")
                end.result = None  # type: ignore[union-attr]  # it ended normally, with a message
                raise

    def run_all(self, what: str) -> None:
        """Run until there are no more runs.

        Ctrl-C and SIGTERM end all runs normally, and are raised when they have ended; a second
        signal kills them.

        Raises:
            KeyboardInterrupt: on Ctrl-C.
            SystemExit: on SIGTERM or SIGHUP.
        """
        running: list[RunProcess] = []
        stopping = threading.Event()
        at_once = f", {self._jobs} at once" if self._jobs > 1 else ""
        self.report(f"{what}{at_once}, in {here(self.directory)}")
        try:
            with self._live or nullcontext(), signals_become(lambda _: stopping.set()) as caught:
                while True:
                    while len(running) < self._jobs and not stopping.is_set():
                        if (run := self.next()) is None:
                            break
                        running.append(run)
                    if not running:
                        break
                    self._poll(running, stopping)
            # Only now: the signal has ended all runs normally, which saves them.
            if caught.number:
                raise as_exception(caught.number)
        # Runs that still live at the end are killed: nothing else would end them.
        finally:
            for run in running:
                run.kill()

    def _poll(self, running: list[RunProcess], stopping: threading.Event) -> None:
        """Read new lines of every run, and wait a little."""
        for run in [*running]:
            ended = not run.running  # checked first, so that no last line is missed
            self.read_new(run)
            if ended:
                running.remove(run)
                self.over(run, run.end())
            elif stopping.is_set():
                run.stop()
        # Without a terminal, a table each minute shows that the runs are alive.
        if self._live is not None:
            ending = ", running ones are ending (Ctrl-C again kills them)"
            self._live.update(self.table(running, ending * stopping.is_set()), refresh=True)
        elif time.monotonic() >= self._table_due:
            self._table_due = time.monotonic() + _TABLE_SECONDS
            self.show(self.table(running, ""))
        if running:
            time.sleep(_LOOK_SECONDS)


def must_be_some(what: str, number: object) -> None:
    """Check that a number of runs is at least 1."""
    if number is not None and (not isinstance(number, Integral) or number < 1):
        raise ConfigError(f"{what} = {number!r}: must be a whole number of at least 1")


def configured(
    config: str | Path | RunConfig | None, keys: Mapping[str, Any]
) -> tuple[RunConfig, RunConfig, frozenset[str]]:
    """Return a configuration, the same with a script's keys, and given keys."""
    for key in ("env", "module"):
        if callable(keys.get(key)):
            raise ConfigError(
                f"{key}: each run is a separate process, which has to import it: give its name, "
                f'such as "my_file:{getattr(keys[key], "__name__", "Mine")}"'
            )
    base, given = load_config_and_keys(config, keys.get("algorithm"))
    return base, RunConfig.from_flat({**base.flat(), **keys}), given | keys.keys()


def must_not_record(config: RunConfig) -> None:
    """Check that several runs do not record into the same directory."""
    if config.env_runner.record:
        raise ConfigError(
            f"record = {config.env_runner.record!r}: several runs would record into the same "
            "directory: leave it out here, and record a run by itself, with juggler train"
        )


def make_directory(
    path: Path | None, kind: str, env: str, file: str, content: bytes, resume_command: str
) -> Path:
    """Make a directory, with a file that describes its runs."""
    must_not_be_imported()
    must_be_free(path, resume_command=resume_command)
    try:
        path = path or make_default(f"{kind}-{env.rpartition(':')[2]}")
        path.mkdir(parents=True, exist_ok=True)
        write_synced(path / file, content)
    except OSError as error:
        raise RunDirectoryError(f"cannot make the directory {path}: {error}") from error
    return path


def must_have(directory: Path, file: str, what: str) -> Path:
    """Check that `make_directory` made this directory, and return its file."""
    if not (directory / file).is_file():
        raise RunDirectoryError(f"{directory} has no {file}: give the directory of {what}")
    return directory / file
