"""How a worker's process keeps memory, and how much it has."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# Parameters of glibc's mallopt, from <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_GIB, _MIB = 1 << 30, 1 << 20


def keep_freed_memory() -> None:
    """Make this process keep freed memory for its next update or batch.

    By default, glibc returns large blocks to the system as soon as they are free, and every update
    takes them again, page fault by page fault. That takes a fifth of the time of a small update on
    the CPU, and nearly all of the time of serializing a batch of some megabytes. Other C libraries
    are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _GIB)
        mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)  # the largest value that glibc accepts


def resident_bytes() -> int:
    """This process's memory on its host; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
