"""Where the driver of a run can be asked about it, while it runs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from juggler.driver.record.run_directory import CONFIG_FILE, SUMMARY_FILE, RunDirectoryError

DRIVER_FILE = "driver.json"


def announce(run_dir: Path, run_id: str, addresses: list[str]) -> str:
    """
    Args:
        run_dir: of the run.
        run_id: of this driver's process.
        addresses: that it listens to, the one for its own host first.

    Returns:
        "", or why it could not be written down.
    """
    path = run_dir / DRIVER_FILE
    try:
        path.write_text(json.dumps({"run": run_id, "addresses": addresses}) + "\n")
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return ""


def withdraw(run_dir: Path) -> None:
    """The driver ends."""
    with contextlib.suppress(OSError):
        (run_dir / DRIVER_FILE).unlink()


def find_driver(run_dir: Path) -> str:
    """The address, on this host, of the driver of a run.

    Raises:
        RunDirectoryError: it does not run, or this is no run's directory.
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
    """For people: nobody drives this run now."""
    ended = (run_dir / SUMMARY_FILE).is_file()
    how = f"{run_dir / SUMMARY_FILE} says how it ended" if ended else "it was killed, or begins now"
    return f"the run in {run_dir} is not running: {how}"
