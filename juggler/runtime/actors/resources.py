"""Limits and use of memory, files and processors of a process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterable
from pathlib import Path


def seconds_waited(pid: int) -> float:
    """Return the longest wait of a thread for a processor; 0: unknown."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0.0
    return max((thread_waited(pid, int(each)) for each in threads), default=0.0)


def thread_waited(pid: int, thread: int) -> float:
    """Return one thread's wait for a processor, by its system-wide number."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended
        return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def seconds_used(pids: Iterable[int]) -> float:
    """Return processor seconds of processes and their ended children."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            ticks += sum(map(int, stat_fields(pid)[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def stat_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/<pid>/stat, without pid and name.

    Raises:
        OSError: the process is gone.
    """
    # The name before them may contain spaces and brackets.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def allow_many_open_files(least: int = 0) -> None:
    """Raise this process's soft limit to the hard limit.

    Does nothing if the system does not allow it.

    Most systems start processes with a soft limit of 1024, for programs that use select(2), which
    supports no higher numbers; here sockets are polled with epoll. A driver has a socket for each
    worker, a learner one for each EnvRunner and, on its own host, one more for shared memory; with
    Pythons before 3.13 also one for each memory, up to sixteen. A process at its limit can neither
    accept connections nor write files. Processes started from here inherit the limit: learners
    need it, and it does not affect other processes.

    Args:
        least: number of files that this process will need.

    Raises:
        ValueError: the hard limit is too low.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < least:
        raise ValueError(
            f"a process may have {allowed} files open at once here, and this one needs {least}: "
            "raise the limit (`ulimit -Hn` shows it), or start fewer workers"
        )


# Parameters of glibc's mallopt, from <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_GIB, _MIB = 1 << 30, 1 << 20


def keep_freed_memory() -> None:
    """Make this process keep freed memory for its next update or batch.

    By default, glibc returns large blocks to the system as soon as they are free, and every update
    allocates them again, with page faults. That takes 20 % of the time of a small update on the
    CPU, and nearly all of the time of serializing a batch of some megabytes. Other C libraries are
    not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _GIB)
        mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)  # the largest value that glibc accepts


def resident_bytes() -> int:
    """Return this process's memory on its host in bytes; 0: unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


_CGROUP = Path("/sys/fs/cgroup")
#: Files with limit and use of memory, for both versions of cgroups.
_LIMITS_OF_MEMORY = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def usable_cores() -> float:
    """Return the number of cores that this process may use.

    They are the cores that it is bound to, or fewer if its container has a limit.
    """
    bound = float(len(os.sched_getaffinity(0)))
    return min([bound, *(limit for group in _groups("cpu") for limit in _quota(group))])


def usable_memory() -> int | None:
    """Return free bytes of memory within the container's limit; None: unknown."""
    lines = _text(Path("/proc/meminfo")).splitlines()
    free = [int(each.split()[1]) * 1024 for each in lines if each.startswith("MemAvailable:")]
    for group in _groups("memory"):
        for limit, used in _LIMITS_OF_MEMORY:
            most, taken = _text(group / limit), _text(group / used)
            if most.isdigit() and taken.isdigit():
                free.append(max(0, int(most) - int(taken) + _cached(group)))
    return min(free, default=None)


def total_memory() -> int:
    """Return bytes of memory of this host, within the container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_text(group / name) for group in _groups("memory") for name, _ in _LIMITS_OF_MEMORY]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def oom_kills() -> int:
    """Count the processes that the kernel killed because memory ran out."""
    lines = [each.split() for each in _text(Path("/proc/vmstat")).splitlines()]
    return sum(int(count) for name, count in lines if name == "oom_kill")


def _cached(group: Path) -> int:
    """Return bytes of cached files in the memory of a cgroup.

    The kernel drops them when memory is needed.
    """
    words = _text(group / "memory.stat").split()
    counts = dict(zip(words[::2], words[1::2], strict=False))
    # The first version counts nested groups under other names.
    prefix = "total_" if "total_active_file" in counts else ""
    return sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _groups(controller: str) -> list[Path]:
    """Return the cgroups whose limits hold for this process, of both versions."""
    groups = [_CGROUP, _CGROUP / controller]
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controller in names or not controllers:
            mount = _CGROUP / controller if controllers else _CGROUP
            parts = Path(path).parts[1:]
            groups += [mount.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
    return groups


def _quota(group: Path) -> list[float]:
    """Return a cgroup's processor limit, in processors, if it has one."""
    v1 = [_text(group / f"cpu.cfs_{each}_us") for each in ("quota", "period")]
    limits = [_text(group / "cpu.max").split(), v1]
    return [int(of) / int(each) for of, each in filter(_are_numbers, limits)]


def _are_numbers(texts: list[str]) -> bool:
    return len(texts) == 2 and all(each.isdigit() for each in texts)


def _text(path: Path) -> str:
    """Return a file's content; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
