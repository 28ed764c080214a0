"""Reads plain files with limits, and locks files where possible."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

#: Maximum bytes of a JSON file, such as a summary. Runs write far smaller files.
MOST_JSON: Final = 1 << 22
_MOST_TOML: Final = 1 << 19  # maximum bytes of a configuration
_MOST_DOTS: Final = 64  # in a line of TOML: the memory for a key grows with their square


def open_plain(path: Path, *, dir_fd: int | None = None) -> BinaryIO:
    """Open a plain file for reading; never wait or follow links.

    Raises:
        OSError: the path is not a plain file, or cannot be read.
    """
    # Checked before opening it, which may have an effect on a device.
    if not stat.S_ISREG(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file")
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was replaced in the meantime
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file")
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, most: int) -> bytes:
    """Read a plain file of at most `most` bytes.

    Raises:
        OSError: the file is larger, is not a plain file, or cannot be read.
    """
    with open_plain(path) as file:
        content = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else b""
        if len(content) > most or os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes")
        return content


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: as for `read_plain`.
        ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(read_plain(path, MOST_JSON))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_toml_table(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        OSError: as for `read_plain`.
        ValueError: it is not TOML, or is nested too deeply.
    """
    content = read_plain(path, _MOST_TOML)
    if any(line.count(b".") > _MOST_DOTS for line in content.splitlines()):
        raise ValueError(f"a line has more than {_MOST_DOTS} dots")
    try:
        return tomllib.loads(content.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def try_lock(file: IO[bytes] | IO[str] | int, *, shared: bool = False) -> bool | None:
    """Lock a file until it closes, unless another process has locked it.

    Returns:
        True: the file is locked. False: another process has locked it. None: unknown, because the
        file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
