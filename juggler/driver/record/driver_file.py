"""Stores the addresses of a running driver in its run directory, and finds them there."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

from juggler.driver.record.run_directory import CONFIG_FILE, SUMMARY_FILE, RunDirectoryError
from juggler.driver.record.wording import how_it_ended
from juggler.runtime.plain_files import read_json

DRIVER_FILE = "driver.json"
_LOOK_SECONDS = 0.5


def announce(run_dir: Path, run_id: str, addresses: list[str]) -> str:
    """Write the driver's addresses, its own host's first; return "" or why that failed."""
    path = run_dir / DRIVER_FILE
    try:
        told = {"run": run_id, "host": socket.gethostname(), "addresses": addresses}
        path.write_text(json.dumps(told) + "\n")
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
    return _told(run_dir)[0][0]


def driver_is_of_this_host(run_dir: Path) -> bool:
    """Whether the driver that has written its addresses there, and not deleted them, is or was a
    process of this host."""
    try:
        return _told(run_dir)[1] == socket.gethostname()
    except RunDirectoryError:
        return False


def find_driver_from_elsewhere(
    run_dir: Path, timeout: float, tell: Callable[[str], None] = lambda _: None
) -> str:
    """Return the address of a run's driver for other hosts that share its file system. Waits for a
    driver that has not begun yet.

    Args:
        run_dir: of the run.
        timeout: how many seconds to wait.
        tell: gets a line if this has to wait.

    Raises:
        RunDirectoryError: the run has no driver by then, or none that other hosts can dial.
    """
    began = time.monotonic()
    waits = False
    while True:
        try:
            addresses, host = _told(run_dir)
            break
        except RunDirectoryError:
            if time.monotonic() - began > timeout:
                raise
            if not waits:
                tell(f"no driver has written its address in {run_dir} yet: waiting {timeout:.0f} s")
            waits = True
            time.sleep(_LOOK_SECONDS)
    if len(addresses) < 2:
        raise RunDirectoryError(
            f"the driver of {run_dir} takes no workers of other hosts: start it with `juggler "
            "driver`, and give it --bind"
        )
    bound, _, port = addresses[-1].rpartition(":")
    return f"{host}:{port}" if bound in ("0.0.0.0", "[::]") else addresses[-1]


def _told(run_dir: Path) -> tuple[list[str], str]:
    """Addresses of the driver, and the name of its host."""
    if not (run_dir / CONFIG_FILE).is_file():
        raise RunDirectoryError(f"{run_dir} is neither HOST:PORT nor the directory of a run")
    try:
        told = read_json(run_dir / DRIVER_FILE)
        addresses = [str(address) for address in told["addresses"]]
        if not addresses:
            raise LookupError("it has no addresses")
        return addresses, str(told.get("host", ""))
    except FileNotFoundError:
        raise RunDirectoryError(not_running(run_dir)) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunDirectoryError(f"cannot read {run_dir / DRIVER_FILE}: {error}") from error


def not_running(run_dir: Path) -> str:
    """Say that a run has no driver now, and why."""
    file, how = run_dir / SUMMARY_FILE, "it was killed, or starts now"
    with contextlib.suppress(OSError):
        file.stat()
        how = f"{file} says how it ended"
        with contextlib.suppress(ValueError, AttributeError):
            end = read_json(file)
            how = f"it {'is ' if end.get('solved') else ''}{how_it_ended(end)}; {file} says more"
    return f"the run in {run_dir} is not running: {how}"
