"""Locks of files (flock), and what their absence means."""

from __future__ import annotations

import fcntl
from typing import IO


def try_lock(file: IO[bytes] | IO[str] | int, *, shared: bool = False) -> bool | None:
    """Lock a file until it is closed, unless another process has locked it.

    Returns:
        False: another process has. None: this file system has no locks, so that nothing is known.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
