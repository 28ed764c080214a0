"""A run's directory: files, metrics, the driver's address, and the end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, Self, TypeAlias

import numpy as np
import tomli_w

from juggler.driver.reporting.wording import how_it_ended, resuming
from juggler.runtime.checkpoints.checkpoint import DIRECTORY, newest_first, write_synced
from juggler.runtime.plain_files import open_plain, read_json, try_lock

if TYPE_CHECKING:
    from juggler.driver.reporting.wording import Progress


CONFIG_FILE = "config.toml"
METRICS_FILE = "metrics.jsonl"
RUNS = "runs"  # parent of run directories that were not named
SUMMARY_FILE = "summary.json"


_ATTEMPTS: Final = 5
_PAUSE_SECONDS: Final = 0.05
_SOME_BYTES: Final = 1 << 14  # larger than any configuration


class RunDirectoryError(Exception):
    """A run directory that cannot be used; the message has a remedy."""


def has_checkpoint(run_dir: Path) -> bool:
    """Return whether a run has left a checkpoint, good or not."""
    checkpoints = run_dir / DIRECTORY
    return checkpoints.is_dir() and bool(newest_first(checkpoints))


def must_be_free(path: Path | None, command: str = "train", resume_command: str = "") -> None:
    """Check that a new run can have this directory.

    Raises:
        RunDirectoryError: it is not empty, or cannot be read or written.
    """
    try:
        if path is None:
            return must_be_writable(Path(RUNS))
        is_there = path.exists()
        is_taken = is_there and path.is_dir() and any(path.iterdir())
        if not is_taken and not path.is_file():
            must_be_writable(path)
    except OSError as error:
        why = error.strerror or error
        raise RunDirectoryError(f"cannot make the run directory {path or RUNS}: {why}") from error
    if is_there and not path.is_dir():
        raise RunDirectoryError(f"{path} is a file; name another run directory")
    if not is_taken:
        return None
    taken = f"the run directory {path} is not empty"
    # First the lock: a run that has just begun has no checkpoint yet, and is not to be deleted.
    if not resume_command and is_locked(path / METRICS_FILE):
        raise RunDirectoryError(
            f"a run may still be writing in {path}; name another directory, or end that run first"
        )
    # Directories of several runs have no metrics and checkpoints of their own.
    if not resume_command and not has_checkpoint(path):
        what = ", or delete this one" if (path / CONFIG_FILE).is_file() else ""
        raise RunDirectoryError(
            f"{taken}, and has no checkpoint to resume from; name another{what}"
        )
    command = f"{resume_command} {path}" if resume_command else resuming(path, command)
    raise RunDirectoryError(f"{taken}; name another one, or resume it: {command}")


def must_be_resumable(path: Path) -> None:
    """Check that a run can be resumed in this directory."""
    if not (path / CONFIG_FILE).is_file():
        what = f"has no {CONFIG_FILE}" if path.is_dir() else "is not a directory"
        raise RunDirectoryError(f"{path} {what}; give the directory of a run to resume")
    try:
        must_be_writable(path)
    except OSError as error:
        why = error.strerror or error
        raise RunDirectoryError(f"cannot write in the run directory {path}: {why}") from error


class RunDirectory:
    """The directory of a run: `create` for new, `open` for resumed runs.

    - `config.toml`: the configuration;
    - `metrics.jsonl`: one JSON object per line, only whole lines;
    - `events.jsonl`: the messages of the run, written by the `Journal`;
    - `driver.json`: the addresses of the driver while it runs;
    - `summary.json`: the results of the run;
    - `checkpoints/`: see `juggler.runtime.checkpoints`.
    """

    def __init__(self, path: Path, config: bytes) -> None:
        # Absolute, since a script may change its working directory during a run
        self.path = path.absolute()
        self.checkpoints = self.path / DIRECTORY
        # Another run has the directory, so this one must not write there
        self.taken = False
        self._config = config
        self._metrics = self._opened()
        self._problem = ""  # of the last line

    @classmethod
    def create(cls, path: Path | None, config: Mapping[str, Any], name: str) -> Self:
        """Create a new run's directory; by default under runs/, named after `name`.

        Raises:
            RunDirectoryError: the directory is not empty, or cannot be created.
        """
        text = to_toml(config)
        if path is not None:
            must_be_free(path)
        try:
            return cls(path or make_default(name), text)
        except OSError as error:
            why = error.strerror or error
            raise RunDirectoryError(f"cannot make the run directory {path}: {why}") from error

    @classmethod
    def open(cls, path: Path, config: Mapping[str, Any]) -> Self:
        """Open a resumed run's directory, without a half-written last line."""
        must_be_resumable(path)
        text = to_toml(config)
        try:
            return cls(path, text)
        except OSError as error:
            raise RunDirectoryError(f"cannot write in the run directory {path}: {error}") from error

    def discard(self) -> None:
        """Undo `create`, for a run that never started."""
        self.close()
        (self.path / CONFIG_FILE).unlink()
        (self.path / METRICS_FILE).unlink()
        self.checkpoints.rmdir()
        self.path.rmdir()

    def renew(self) -> bool:
        """Create the directory again if it was deleted or moved; return whether."""
        file = self.path / METRICS_FILE
        # Another file is of another run, even after the end of that run.
        try:
            self.taken = not os.path.samestat(file.stat(), os.fstat(self._metrics.fileno()))
            if not self.taken:
                return False
        except FileNotFoundError:
            self.taken = False
        except OSError as error:
            raise RunDirectoryError(
                f"cannot read the run directory {self.path}: {error}"
            ) from error
        # Files of another run stay as they are; what is missing is made again.
        lost = f"the run directory {self.path} was deleted or moved, and"
        if self.taken:
            raise RunDirectoryError(
                f"{lost} another run has taken it: metrics and checkpoints of this run are lost"
            )
        former = self._metrics
        try:
            self._metrics = self._opened()
        except OSError as error:
            raise RunDirectoryError(f"{lost} cannot be created again: {error}") from error
        former.close()
        return True

    def _opened(self) -> BinaryIO:
        """Open and lock the metrics, without a half-written last line."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        metrics = (self.path / METRICS_FILE).open("a+b", buffering=0)
        if not lock(metrics):
            metrics.close()
            raise RunDirectoryError(
                f"another process is writing in {self.path}; stop that run before you resume it"
            )
        metrics.seek(0)
        self._end = metrics.read().rfind(b"\n") + 1  # of the last whole line
        metrics.truncate(self._end)
        write_synced(self.path / CONFIG_FILE, self._config)
        return metrics

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line to `metrics.jsonl`."""
        content = memoryview(json.dumps(to_json(line), allow_nan=False).encode() + b"\n")
        end = self._end + len(content)
        try:
            self._cut()
            while content:
                content = content[self._metrics.write(content) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # otherwise the next line removes it
                self._cut()
            raise RunDirectoryError(f"cannot write metrics in {self.path}: {error}") from error
        self._end = end

    def write_line(self, line: Mapping[str, Any], progress: Progress) -> bool:
        """Append a line; return whether the directory was created again."""
        problem, renewed = "", False
        try:
            renewed = self.renew()
            self.append(line)
        except RunDirectoryError as error:
            problem = str(error)
        if renewed:
            text = f"the run directory {self.path} was deleted or moved. It is created again"
            progress.message(f"{text}, without its files", "error")
        if problem and problem != self._problem:
            progress.message(problem, "error")
        elif self._problem and not problem:
            progress.message(f"metrics are written in {self.path} again", "info")
        self._problem = problem
        return renewed

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, whole or not at all."""
        if self.taken:
            raise RunDirectoryError(f"there is no summary: another run has taken {self.path}")
        temporary = self.path / f".{SUMMARY_FILE}.tmp"
        try:
            write_synced(temporary, json.dumps(to_json(summary), indent=2).encode() + b"\n")
            temporary.rename(self.path / SUMMARY_FILE)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise RunDirectoryError(f"cannot write the summary in {self.path}: {error}") from error

    def close(self) -> None:
        self._metrics.close()

    def _cut(self) -> None:
        """Cut off the remains of a failed write."""
        self._metrics.seek(self._end)
        self._metrics.truncate()


def to_json(value: Any) -> Any:
    """Convert to JSON's types; NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a line of metrics: join nested tables' keys with "/"."""
    found: dict[str, Any] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": each for name, each in flat(value).items()}
        else:
            found[key] = value
    return found


def to_toml(config: Mapping[str, Any]) -> bytes:
    """Encode a configuration."""
    # TOML has no None: the configuration's own keys have "none" instead, and tables leave these
    # keys out.
    plain = {key: "none" if value is None else _filled(value) for key, value in config.items()}
    try:
        return tomli_w.dumps(plain).encode()
    except (TypeError, ValueError) as error:
        raise RunDirectoryError(f"the configuration cannot be written as TOML: {error}") from error


def _filled(value: Any) -> Any:
    """Remove the keys of a table that hold None."""
    if not isinstance(value, Mapping):
        return value
    return {key: _filled(each) for key, each in value.items() if each is not None}


def make_default(name: str) -> Path:
    """Create a new directory under runs/."""
    clean = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    stem = f"{clean}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in count(1):
        path = Path(RUNS) / (stem if attempt == 1 else f"{stem}-{attempt}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    return path


def lock(file: BinaryIO) -> bool:
    """Lock a file until it is closed, after any current `is_locked`.

    Returns:
        Whether no other process has it; True on a file system without locks.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        if try_lock(file) is not False:
            return True
    return False


def is_locked(path: Path) -> bool | None:
    """Return whether a process has locked a file; None: unknown."""
    try:
        with open_plain(path) as file:
            free = try_lock(file, shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return None if free is None else not free


def must_be_writable(path: Path) -> None:
    """Check that a directory, which need not exist yet, can be written."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    with TemporaryDirectory(prefix=".juggler-", dir=there) as made:
        # A full disk still accepts directories and empty files.
        (Path(made) / "some").write_bytes(bytes(_SOME_BYTES))


#: killed: it is neither running nor has it written a summary.
RunState: TypeAlias = Literal["running", "solved", "stopped", "failed", "killed"]

_FRESH_SECONDS = 15.0  # a run writes a line each second


def last_summary(run_dir: Path) -> tuple[dict[str, Any], str]:
    """Read an ended run's summary, or {}, and describe damage to it."""
    file = run_dir / SUMMARY_FILE
    with contextlib.suppress(OSError):
        if file.stat().st_mtime_ns >= (run_dir / METRICS_FILE).stat().st_mtime_ns:
            return read_or_problem(file, read_json)
    return {}, ""


def read_or_problem(file: Path, read: Callable[[Path], Any]) -> tuple[dict[str, Any], str]:
    """Read a table from a file, and describe a problem, or ""."""
    try:
        table = read(file)
        return (table, "") if isinstance(table, dict) else ({}, f"{file.name} has no table")
    except FileNotFoundError:
        return {}, f"there is no {file.name}"
    except OSError as error:
        return {}, f"cannot read {file.name}: {error.strerror}"
    except ValueError as error:
        return {}, f"{file.name} is damaged: {error}"


def state_of(run_dir: Path, summary: dict[str, Any]) -> RunState:
    """Return the state of a run."""
    if not summary:
        return "running" if is_running(run_dir) else "killed"
    if summary.get("failure"):
        return "failed"
    return "solved" if summary.get("solved") else "stopped"


def is_running(run_dir: Path) -> bool:
    """Return whether a run without a summary is still running.

    A run writes to its files every second. Their age decides if the run is on another host, on a
    file system without locks, or just starting.
    """
    host = ""
    with contextlib.suppress(RunDirectoryError):
        _, host = _announced(run_dir)
    if host == socket.gethostname():  # or of a container with this host's name
        locked = is_locked(run_dir / METRICS_FILE)
        if locked is not None:
            return locked
    now, written = time.time(), 0.0
    for name in (METRICS_FILE, CONFIG_FILE):
        try:
            written = max(written, (run_dir / name).stat().st_mtime)
        except OSError:
            continue
    return now - written < _FRESH_SECONDS


DRIVER_FILE = "driver.json"
_LOOK_SECONDS = 0.5


def announce(run_dir: Path, run_id: str, addresses: list[str]) -> str:
    """Write the driver's addresses; return "" or the reason for a failure."""
    path = run_dir / DRIVER_FILE
    try:
        announced = {"run": run_id, "host": socket.gethostname(), "addresses": addresses}
        path.write_text(json.dumps(announced) + "\n")
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return ""


def withdraw(run_dir: Path) -> None:
    """Delete the addresses, because the driver ends."""
    with contextlib.suppress(OSError):
        (run_dir / DRIVER_FILE).unlink()


def find_driver(run_dir: Path) -> str:
    """Return the address of a run's driver on this host.

    Raises:
        RunDirectoryError: the run has no driver now, or this is not a run directory.
    """
    return _announced(run_dir)[0][0]


def find_driver_from_elsewhere(
    run_dir: Path, timeout: float, report: Callable[[str], None] = lambda _: None
) -> str:
    """Return the driver's address for other hosts, waiting for it to start.

    Raises:
        RunDirectoryError: after the wait the run still has no driver that other hosts can dial.
    """
    ends = time.monotonic() + timeout
    for attempt in count():
        try:
            addresses, host = _announced(run_dir)
            break
        except RunDirectoryError:
            if time.monotonic() > ends:
                raise
            if not attempt:
                waits = f"waiting {timeout:.0f} s"
                report(f"no driver has written its address in {run_dir} yet: {waits}")
            time.sleep(_LOOK_SECONDS)
    # The first address is the driver's Unix socket, which only its host can dial.
    if len(addresses) < 2:
        raise RunDirectoryError(
            f"the driver of {run_dir} accepts no workers of other hosts: start it with `juggler "
            "driver`, and give it --bind"
        )
    bound, _, port = addresses[-1].rpartition(":")
    return f"{host}:{port}" if bound in ("0.0.0.0", "[::]") else addresses[-1]


def _announced(run_dir: Path) -> tuple[list[str], str]:
    """Read the driver's addresses, and the name of its host."""
    if not (run_dir / CONFIG_FILE).is_file():
        raise RunDirectoryError(f"{run_dir} is neither HOST:PORT nor the directory of a run")
    try:
        announced = read_json(run_dir / DRIVER_FILE)
        addresses = [str(address) for address in announced["addresses"]]
        if not addresses:
            raise LookupError("it has no addresses")
        return addresses, str(announced.get("host", ""))
    except FileNotFoundError:
        raise RunDirectoryError(not_running(run_dir)) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunDirectoryError(f"cannot read {run_dir / DRIVER_FILE}: {error}") from error


def not_running(run_dir: Path) -> str:
    """Describe why a run has no driver now."""
    file, how = run_dir / SUMMARY_FILE, "it was killed, or is starting"
    end, damage = last_summary(run_dir)
    if damage:
        how = f"see {file} for how it ended"
    elif end:
        how = f"it {'is ' if end.get('solved') else ''}{how_it_ended(end)}; {file} has more"
    return f"the run in {run_dir} is not running: {how}"


STEPS: Final = "env_steps_sampled"
#: Start-up times differ between runs, so curves over time begin with training.
TIME: Final = "training_time"
_WALL: Final = "wall_time"
_PART = 1 << 23  # bytes read at once; longer than any line of a run


class LineFile:
    """Reads new lines of a growing file, each whole line once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place: tuple[int, int] | None = None  # (device, inode)
        self._offset = 0

    def new_lines(self, restart: Callable[[], object] = lambda: None) -> Iterator[bytes]:
        """Yield whole lines since the last call; `restart` precedes a replaced file's.

        Raises:
            OSError: it cannot be read. FileNotFoundError: it does not exist.
        """
        with open_plain(self.path) as file:
            found = os.fstat(file.fileno())
            place = (found.st_dev, found.st_ino)
            if place != self._place or found.st_size < self._offset:
                if self._offset:
                    restart()
                self._place, self._offset = place, 0
            while part := os.pread(file.fileno(), _PART, self._offset):
                # Without a line break, a whole part is a line that no run has written.
                end = part.rfind(b"\n") + 1 or (len(part) if len(part) == _PART else 0)
                if not end:
                    return  # no whole line
                self._offset += end
                yield from part[:end].splitlines()


class MetricsCourse:
    """Orders the lines of a run, and removes repeated steps."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.taken_back = 0  # number of removed lines
        self.broken = 0  # number of complete lines in the file that are not metrics
        self._offsets = dict.fromkeys((TIME, _WALL), 0.0)

    def add(self, line: dict[str, Any]) -> None:
        while self.lines and self.lines[-1][STEPS] > line[STEPS]:
            self.lines.pop()  # repeated from an earlier checkpoint
            self.taken_back += 1
        clocks = {key: line[key] + each for key, each in self._offsets.items() if key in line}
        for key in clocks:
            before = self.lines[-1].get(key, 0.0) if self.lines else 0.0
            if clocks[key] < before:  # the clock restarted
                self._offsets[key], clocks[key] = before, line[key] + before
        self.lines.append({**line, **clocks})


def read_metrics(run_dir: Path) -> MetricsCourse:
    """Read all metrics of a run."""
    file = LineFile(run_dir / METRICS_FILE)
    course = MetricsCourse()
    try:
        for text in file.new_lines():
            if (line := parse_line(text)) is None:
                course.broken += 1
            else:
                course.add(line)
    except OSError as error:
        raise RunDirectoryError(f"cannot read {file.path}: {error.strerror}") from error
    return course


def metrics_table(run_dir: Path) -> list[dict[str, Any]]:
    """Return the same lines as rows of a flat table."""
    return [flat(line) for line in read_metrics(run_dir).lines]


def number(value: object) -> float:
    """Convert a line's value to a number, or NaN."""
    try:
        found = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Parse a line of the file; None: it has no metrics."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    line.setdefault(TIME, line.get(_WALL))  # older runs have one clock
    known = (number(line.get(key)) for key in (STEPS, TIME, _WALL))
    return None if any(map(math.isnan, known)) else line
