"""Stores the addresses of a running driver in its run directory, and finds them there."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from juggler.driver.record.run_directory import CONFIG_FILE, SUMMARY_FILE, RunDirectoryError

DRIVER_FILE = "driver.json"


def announce(run_dir: Path, run_id: str, addresses: list[str]) -> str:
    """Write the driver's addresses, its own host's first; return "" or why that failed."""
    path = run_dir / DRIVER_FILE
    try:
        path.write_text(json.dumps({"run": run_id, "addresses": addresses}) + "\n")
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
    if not (run_dir / CONFIG_FILE).is_file():
        raise RunDirectoryError(f"{run_dir} is neither HOST:PORT nor the directory of a run")
    try:
        address = json.loads((run_dir / DRIVER_FILE).read_text())["addresses"][0]
    except FileNotFoundError:
        raise RunDirectoryError(not_running(run_dir)) from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunDirectoryError(f"cannot read {run_dir / DRIVER_FILE}: {error}") from error
    return str(address)


def not_running(run_dir: Path) -> str:
    """Say that a run has no driver now, and why."""
    ended = (run_dir / SUMMARY_FILE).is_file()
    how = f"{run_dir / SUMMARY_FILE} says how it ended" if ended else "it was killed, or starts now"
    return f"the run in {run_dir} is not running: {how}"
