"""Temporary directories that say whose they are, so that those of killed processes can go."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import multiprocessing.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any


def make_directory() -> str:
    """A new one, short enough for Unix sockets. Those of processes that were killed go."""
    place = Path(tempfile.gettempdir())
    if len(str(place)) > 60:
        place = Path("/tmp")  # a Unix socket's path has 107 bytes at most
    for path in place.glob("juggler-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            # Another process that starts may have removed it by now.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"juggler-{os.getpid()}-", dir=place)


def claim_multiprocessings() -> None:
    """Let multiprocessing's directory, of this process and of all that it starts, be such a one.

    A worker that made its own would leave it behind when it is killed.
    """
    # multiprocessing has no public way to do this.
    process: Any = multiprocessing.process.current_process()
    if process._config.get("tempdir") is None:
        process._config["tempdir"] = path = make_directory()
        # As multiprocessing does it: behind what uses the directory to its end.
        multiprocessing.util.Finalize(
            None, shutil.rmtree, args=(path,), kwargs={"ignore_errors": True}, exitpriority=-100
        )
