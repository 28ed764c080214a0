"""A run's directory: its configuration, metrics, summary, checkpoints and TensorBoard events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import tomli_w

from juggler.driver.driver_config import TENSORBOARD, TRACKERS
from juggler.driver.record.checkpoints import write_synced
from juggler.driver.record.directory_lock import is_locked, lock, must_be_writable
from juggler.driver.record.event_file import EventFile
from juggler.driver.record.wording import resuming
from juggler.runtime.checkpoints.checkpoint import DIRECTORY, newest_first

CONFIG_FILE = "config.toml"
METRICS_FILE = "metrics.jsonl"
#: Where runs are whose directory nobody names.
RUNS = "runs"
SUMMARY_FILE = "summary.json"


class RunDirectoryError(Exception):
    """A run directory cannot be created, opened or written; the message says what to do."""


def has_checkpoint(run_dir: Path) -> bool:
    """Tell whether a run has left a checkpoint, good or not."""
    checkpoints = run_dir / DIRECTORY
    return checkpoints.is_dir() and bool(newest_first(checkpoints))


def must_be_free(path: Path | None, command: str = "train", going_on: str = "") -> None:
    """
    Args:
        path: of a new run; None: it gets a new one under runs/.
        command: `train` or `driver`, for the run.
        going_on: the command that goes on with a directory of several runs; "": it is of one.

    Raises:
        RunDirectoryError: a new run cannot have this directory: something is there, or it cannot
            be read or written.
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
    if not going_on and is_locked(path / METRICS_FILE):
        raise RunDirectoryError(
            f"a run may still be writing in {path}; name another directory, or end that run first"
        )
    if not going_on and not has_checkpoint(path):
        what = ", or delete this one" if (path / CONFIG_FILE).is_file() else ""
        raise RunDirectoryError(f"{taken}, and has no checkpoint to go on from; name another{what}")
    command = f"{going_on} {path}" if going_on else resuming(path, command)
    raise RunDirectoryError(f"{taken}; name another one, or go on with what is in it: {command}")


def must_go_on(path: Path) -> None:
    """
    Raises:
        RunDirectoryError: no run can go on in this directory: it is not one of a run, or nothing
            can be written in it.
    """
    if not (path / CONFIG_FILE).is_file():
        what = f"has no {CONFIG_FILE}" if path.is_dir() else "is not a directory"
        raise RunDirectoryError(f"{path} {what}; give the directory of a run to go on with")
    try:
        must_be_writable(path)
    except OSError as error:
        why = error.strerror or error
        raise RunDirectoryError(f"cannot write in the run directory {path}: {why}") from error


class RunDirectory:
    """The directory that a run writes to. `create` is for a new run, `open` for a resumed one.

    - `config.toml`: the configuration;
    - `metrics.jsonl`: one JSON object a line, whole lines only;
    - `events.jsonl`: the messages of the run, written by the `Journal`;
    - `driver.json`: the addresses of the driver while it runs;
    - `summary.json`: how the run ended;
    - `checkpoints/`: see `juggler.runtime.checkpoints`;
    - `events.out.tfevents.*`: the scalars of the metrics lines, if `track` names TensorBoard.

    Attributes:
        path: absolute, since a script may change its working directory while a run goes on.
        taken: whether another run has the directory now, as `renew` has found. Then nothing of this
            run may be written there.
    """

    def __init__(self, path: Path, metrics: BinaryIO, config: bytes, tracks: bool) -> None:
        self.path = path.absolute()
        self.checkpoints = self.path / DIRECTORY
        self.taken = False
        self._config = config
        self._metrics = metrics
        self._end = metrics.seek(0, os.SEEK_END)  # of the last whole line
        self._tracks = tracks  # as events of TensorBoard
        self._events = EventFile(self.path)

    @classmethod
    def create(cls, path: Path | None, config: Mapping[str, Any], name: str) -> Self:
        """Create the directory of a new run.

        Args:
            path: the directory, which must be empty if it exists. None: a new one under runs/,
                named after `name` and the time.
            config: the run's flat configuration.
            name: any text.

        Raises:
            RunDirectoryError: the directory is not empty, or cannot be created.
        """
        text = to_toml(config)
        try:
            if path is None:
                path = _make_default(name)
            else:
                must_be_free(path)
            path.mkdir(parents=True, exist_ok=True)
            write_synced(path / CONFIG_FILE, text)
            (path / DIRECTORY).mkdir()
            metrics = (path / METRICS_FILE).open("xb", buffering=0)
        except OSError as error:
            why = error.strerror or error
            raise RunDirectoryError(f"cannot make the run directory {path}: {why}") from error
        _lock(path, metrics)
        return cls(path, metrics, text, TENSORBOARD in config.get("track", TRACKERS))

    @classmethod
    def open(cls, path: Path, config: Mapping[str, Any]) -> Self:
        """Open the directory of a resumed run, and cut off a half-written last metrics line.

        Args:
            path: the directory.
            config: the run's flat configuration, which replaces `config.toml`.

        Raises:
            RunDirectoryError: this is not a run directory, or it cannot be written.
        """
        must_go_on(path)
        text = to_toml(config)
        try:
            (path / DIRECTORY).mkdir(exist_ok=True)
            metrics = (path / METRICS_FILE).open("a+b", buffering=0)
            _lock(path, metrics)
            _cut_half_line(metrics)
            write_synced(path / CONFIG_FILE, text)
        except OSError as error:
            raise RunDirectoryError(f"cannot write in the run directory {path}: {error}") from error
        return cls(path, metrics, text, TENSORBOARD in config.get("track", TRACKERS))

    def discard(self) -> None:
        """Undo `create`, for a run that never began."""
        self.close()
        (self.path / CONFIG_FILE).unlink()
        (self.path / METRICS_FILE).unlink()
        self.checkpoints.rmdir()
        self.path.rmdir()

    def renew(self) -> bool:
        """Create the directory again if somebody deleted or moved it during the run.

        Returns:
            Whether this was necessary. The new directory has only the configuration.

        Raises:
            RunDirectoryError: it cannot be created, or another run has taken it.
        """
        file = self.path / METRICS_FILE
        try:
            if os.path.samestat(file.stat(), os.fstat(self._metrics.fileno())):
                return False
        except FileNotFoundError:
            pass
        except OSError as error:
            raise RunDirectoryError(
                f"cannot read the run directory {self.path}: {error}"
            ) from error
        lost = f"the run directory {self.path} was deleted or moved, and"
        others = RunDirectoryError(
            f"{lost} another run has taken it: metrics and checkpoints of this run are lost"
        )
        if self.taken and file.exists():  # even if that run has ended
            raise others
        try:
            (self.path / DIRECTORY).mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as until_it_is_ours:
                metrics = until_it_is_ours.enter_context(file.open("a+b", buffering=0))
                self.taken = not lock(metrics)
                if self.taken:
                    raise others
                write_synced(self.path / CONFIG_FILE, self._config)
                until_it_is_ours.pop_all()
        except OSError as error:
            raise RunDirectoryError(f"{lost} cannot be made again: {error}") from error
        self.close()
        self._metrics, self._end = metrics, metrics.seek(0, os.SEEK_END)
        return True

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a metrics line to `metrics.jsonl`, and its scalars to the TensorBoard events.

        Args:
            line: values for JSON; numbers that are not finite become null. The scalars' step is
                `env_steps_sampled`, and their tags are those of `tag_of`.

        Raises:
            RunDirectoryError: the disk refuses; no half line is left.
        """
        plain = to_json(line)
        content = memoryview(json.dumps(plain, allow_nan=False).encode() + b"\n")
        end = self._end + len(content)
        try:
            self._cut()
            while content:
                content = content[self._metrics.write(content) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # else the next line cuts it
                self._cut()
            raise RunDirectoryError(f"cannot write metrics in {self.path}: {error}") from error
        self._end = end
        try:
            if self._tracks:
                self._events.append(plain)
        except OSError as error:
            raise RunDirectoryError(f"cannot write events in {self.path}: {error}") from error

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, whole or not at all.

        Raises:
            RunDirectoryError: the disk refuses, or another run has the directory.
        """
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
        self._events.close()

    def _cut(self) -> None:
        """Cut off what a failed write has left after the last whole line."""
        self._metrics.seek(self._end)
        self._metrics.truncate()


def to_json(value: Any) -> Any:
    """Convert a value for JSON: NumPy's numbers to Python's, NaN and infinity to None."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_toml(config: Mapping[str, Any]) -> bytes:
    """Encode a configuration.

    Raises:
        RunDirectoryError: TOML has no form for one of its values.
    """
    # TOML has no None: the configuration's own keys take "none", and tables leave such keys out.
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


def _make_default(name: str) -> Path:
    """Create a new directory under runs/."""
    clean = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    stem = f"{clean}-{datetime.now():%Y%m%d-%H%M%S}"
    attempt = 1
    while True:
        path = Path(RUNS) / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            attempt += 1


def _lock(path: Path, metrics: BinaryIO) -> None:
    """Keep other processes out while the file is open."""
    if not lock(metrics):
        metrics.close()
        raise RunDirectoryError(
            f"another process is writing in {path}; stop that run before you go on with it"
        )


def _cut_half_line(file: BinaryIO) -> None:
    """Cut off what follows the last newline: a line that a killed run did not finish."""
    file.seek(0)
    end = file.read().rfind(b"\n") + 1
    file.truncate(end)
