"""How long processes have run, and have waited to run.

A deadline is for work that could make progress and does not. A process that waits for a processor
could not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def seconds_waited(pid: int) -> float:
    """How long the longest-waiting thread of a process has waited for a processor; 0 if unknown."""
    return max((thread_waited(pid, int(path)) for path in _threads(pid)), default=0.0)


def thread_waited(pid: int, thread: int) -> float:
    """The same for one thread, by its system-wide number."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended
        return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def seconds_used(pids: Iterable[int]) -> float:
    """Processor seconds of these processes and of their children that have ended."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name may contain spaces and brackets; the fields after it do not.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def seconds_idle() -> float:
    """Seconds in which processors of this host had nothing to do, added up; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _, *fields = Path("/proc/stat").read_text().partition("\n")[0].split()
        return sum(map(int, fields[3:5])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
