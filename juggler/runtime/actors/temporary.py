"""Temporary directories that their processes lock.

Directories of killed processes are found and removed.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import multiprocessing.util
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from juggler.runtime.plain_files import try_lock


def is_ours_alone(found: os.stat_result) -> bool:
    """Return whether only this user or root may write to a path."""
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid in (0, os.geteuid()) and not others


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Directories for sockets. A socket's path has at most 107 bytes, and gRPC uses it in a URI.
_FIT_PLACE = re.compile(r"[A-Za-z0-9._~@=+/-]{1,50}")

_locks: set[int] = set()  # open files of this process


class HeldDirectory:
    """A new temporary directory for the life of its process.

    The process holds a lock (flock) on the directory. A process id would mean nothing in another
    container that shares the parent directory. The lock also keeps systemd-tmpfiles away. A killed
    process loses its lock, and the next process that makes a directory in the same place removes
    the remains.

    The name contains the kernel of the lock, and only directories of the same kernel are removed:
    another host may use the same place over a network, which may hide locks. A directory gets that
    name once it is locked; directories with other names stay.

    Attributes:
        path: of the directory.
    """

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        if not _FIT_PLACE.fullmatch(str(place)):
            place = Path("/tmp")
        kernel = boot_id()
        if kernel:
            _remove_abandoned(place, kernel)
        self.path = Path(tempfile.mkdtemp(prefix=f"juggler-{os.getpid()}-", dir=place))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)  # not inherited by programs
        _locks.add(self._lock)
        if kernel and try_lock(self._lock):
            self.path = self.path.rename(f"{self.path}-{kernel}")

    def is_there(self) -> bool:
        """Return whether the directory still exists."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._lock))
        except OSError:
            return False

    def remove(self) -> None:
        if self._lock in _locks:
            shutil.rmtree(self.path, ignore_errors=True)
            _locks.remove(self._lock)
            os.close(self._lock)


def claim_multiprocessings() -> None:
    """Make multiprocessing's temporary directory a HeldDirectory.

    A killed worker would otherwise leave its directory behind.
    """
    # multiprocessing has no public way to do this.
    process: Any = multiprocessing.process.current_process()
    if not multiprocessings_is_there():
        directory = HeldDirectory()
        process._config["tempdir"] = str(directory.path)
        # Like multiprocessing: after all other users of the directory.
        multiprocessing.util.Finalize(None, directory.remove, exitpriority=-100)


def multiprocessings_is_there() -> bool:
    """Return whether multiprocessing still has its directory."""
    process: Any = multiprocessing.process.current_process()
    path = process._config.get("tempdir")
    return path is not None and os.path.isdir(path)


def boot_id() -> str:
    """Return an id of the kernel since its start.

    It is the same in all of the kernel's containers and nowhere else.
    """
    try:
        return _BOOT_ID.read_text()[:8]
    except OSError:
        return ""


def _remove_abandoned(place: Path, kernel: str) -> None:
    for path in place.glob(f"juggler-*-*-{kernel}"):
        # Another starting process may have removed it, or it belongs to another user.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid() and try_lock(descriptor):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _close_in_child() -> None:
    """Release the locks in a forked process."""
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_in_child)
