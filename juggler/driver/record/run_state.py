"""What a run directory says of a run: whether it goes on, and else how it ended."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from juggler.driver.record.directory_lock import is_locked
from juggler.driver.record.driver_file import driver_is_of_this_host, find_driver
from juggler.driver.record.run_directory import (
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    RunDirectoryError,
)
from juggler.runtime.plain_files import read_json

#: killed: it neither goes on nor has written a summary.
RunState: TypeAlias = Literal["running", "solved", "stopped", "failed", "killed"]

_FRESH_SECONDS = 15.0  # a run writes a line each second
_UNIX: Final = "unix:"


def last_summary(run_dir: Path) -> tuple[dict[str, Any], str]:
    """The summary of a run that has ended, and what is wrong with its file; {} if there is none, or
    the run has been resumed since.

    A run writes its summary last: one that is older than the metrics is from before a resume.
    """
    file = run_dir / SUMMARY_FILE
    try:
        if file.stat().st_mtime_ns < (run_dir / METRICS_FILE).stat().st_mtime_ns:
            return {}, ""
        summary = read_json(file)
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"cannot read {SUMMARY_FILE}: {error.strerror}"
    except ValueError as error:
        return {}, f"{SUMMARY_FILE} is damaged: {error}"
    if not isinstance(summary, dict):
        return {}, f"{SUMMARY_FILE} is damaged: it is no JSON object"
    return summary, ""


def state_of(run_dir: Path, summary: dict[str, Any]) -> RunState:
    """What has become of a run.

    Args:
        run_dir: its directory.
        summary: what `last_summary` found.
    """
    if not summary:
        return "running" if is_running(run_dir) else "killed"
    if summary.get("failure"):
        return "failed"
    return "solved" if summary.get("solved") else "stopped"


def is_running(run_dir: Path) -> bool:
    """Whether a run without a summary is still running.

    A run writes to its files every second. Their age decides if the run is on another host, on a
    file system without locks, or just starting.
    """
    try:
        address = find_driver(run_dir)
    except RunDirectoryError:
        address = ""
    path = Path(address.removeprefix(_UNIX))
    if address.startswith(_UNIX) and path.exists():
        return _listens(path)
    if driver_is_of_this_host(run_dir):  # or of a container with this host's name
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


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
