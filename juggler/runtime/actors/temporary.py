"""Temporary directories that their processes hold, so that those of killed processes can go."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing.process
import multiprocessing.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LONGEST_PLACE = 50  # characters; a Unix socket's path has 107 bytes at most

_locks: set[int] = set()  # open files of this process


class HeldDirectory:
    """A new temporary directory, short enough for Unix sockets, for as long as its process lives.

    The process holds a lock (flock) on the directory: a process id would say nothing in another
    container that shares the place. It keeps systemd-tmpfiles away, too. A killed process lets go
    of it, and the next one that makes a directory in the same place removes what it left.

    The name says which kernel the lock is one of, and only a directory of the same kernel is
    removed: another host may use the same place over a network, where locks need not be seen. A
    directory gets that name once it is locked; those of no such name, young ones among them, stay.

    Attributes:
        path: of the directory.
    """

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        if len(str(place)) > _LONGEST_PLACE:
            place = Path("/tmp")
        boot = _boot()
        if boot:
            _remove_abandoned(place, boot)
        self.path = Path(tempfile.mkdtemp(prefix=f"juggler-{os.getpid()}-", dir=place))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)  # no program started has it
        _locks.add(self._lock)
        if boot and _locked(self._lock):
            self.path = self.path.rename(f"{self.path}-{boot}")

    def is_there(self) -> bool:
        """Whether nobody has removed it."""
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
    """Let multiprocessing's directory, of this process and of all that it starts, be such a one.

    A worker that made its own would leave it behind when it is killed.
    """
    # multiprocessing has no public way to do this.
    process: Any = multiprocessing.process.current_process()
    if not multiprocessings_is_there():
        directory = HeldDirectory()
        process._config["tempdir"] = str(directory.path)
        # As multiprocessing does it: behind what uses the directory to its end.
        multiprocessing.util.Finalize(None, directory.remove, exitpriority=-100)


def multiprocessings_is_there() -> bool:
    """Whether multiprocessing has its directory."""
    process: Any = multiprocessing.process.current_process()
    path = process._config.get("tempdir")
    return path is not None and os.path.isdir(path)


def _boot() -> str:
    """Of the kernel since it was started: all of its containers say the same, and nobody else."""
    try:
        return _BOOT_ID.read_text()[:8]
    except OSError:
        return ""


def _remove_abandoned(place: Path, boot: str) -> None:
    for path in place.glob(f"juggler-*-*-{boot}"):
        # Another process that starts may have removed it by now, or it is another user's.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid() and _locked(descriptor):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Lock it now, if nobody else has and the file system can."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _close_in_child() -> None:
    """A process forked from this one would hold its locks after its end."""
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_in_child)
