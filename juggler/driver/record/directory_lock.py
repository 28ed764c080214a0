"""Directories that can be written, and locks by which one process at a time does."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Final

from juggler.runtime.file_locks import try_lock
from juggler.runtime.plain_files import open_plain

_ATTEMPTS: Final = 5
_PAUSE_SECONDS: Final = 0.05
_SOME_BYTES: Final = 1 << 14  # more than a configuration takes


def lock(file: BinaryIO) -> bool:
    """Lock a file until it is closed. `is_locked` of another process, which holds the lock for a
    moment, is waited for.

    Returns:
        Whether nobody else has it; also on a file system without locks.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        if try_lock(file) is not False:
            return True
    return False


def is_locked(path: Path) -> bool | None:
    """Whether a process has locked a file; None: unknown."""
    try:
        with open_plain(path) as file:
            free = try_lock(file, shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return None if free is None else not free


def must_be_writable(path: Path) -> None:
    """
    Args:
        path: of a directory, which need not be there yet.

    Raises:
        OSError: it cannot be made, or nothing can be written in it.
    """
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    with TemporaryDirectory(prefix=".juggler-", dir=there) as made:
        # A full disk still takes directories, and files of nothing.
        (Path(made) / "some").write_bytes(bytes(_SOME_BYTES))
