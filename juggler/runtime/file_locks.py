"""Lock files with flock, if the file system has locks."""

from __future__ import annotations

import fcntl
from typing import IO


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
