"""A disk of its own for a run, which gets full and takes no more when it is told to; and one
without locks."""

from __future__ import annotations

import errno
import resource
import subprocess
from pathlib import Path

_LITTLE = 4096  # bytes


def without_locks(*_: object) -> None:
    """Refuse a lock, as a file system does that has none: in place of `fcntl.flock`."""
    raise OSError(errno.ENOLCK, "No locks available")


class Disk:
    """A file system of 8 MB where this process may mount one. Elsewhere, what stands for it: a
    limit on the size of files for a process, and permissions of directories.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self._mounted = _done("mount", "-t", "tmpfs", "-o", "size=8m", "juggler-test", path)
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, pid: int) -> None:
        """For the process, at least."""
        if not self._mounted:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_LITTLE, self._limits[1]))
            return
        with (self.path / "filling").open("wb", buffering=0) as file:
            for size in (1 << 16, 1):  # to the last byte
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    pass

    def empty(self, pid: int) -> None:
        if self._mounted:
            (self.path / "filling").unlink()
        else:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, self._limits)

    def protect(self, directory: Path) -> None:
        """No file can be opened there for writing any more."""
        if self._mounted:
            subprocess.run(["mount", "--bind", directory, directory], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
            return
        for each in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
            each.chmod(0o555)

    def unprotect(self, directory: Path) -> None:
        if self._mounted:
            subprocess.run(["umount", "--lazy", directory], check=True)
            return
        for each in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
            each.chmod(0o755)

    def close(self) -> None:
        """Whatever is mounted goes."""
        while self._mounted and _done("umount", "--lazy", "--recursive", self.path):
            pass


def _done(*command: object) -> bool:
    try:
        done = subprocess.run([str(each) for each in command], check=False, capture_output=True)
    except OSError:
        return False
    return done.returncode == 0
