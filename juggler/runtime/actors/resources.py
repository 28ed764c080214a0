"""How much of its host a process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
#: Of both versions of cgroups: the files with the limit, and with what is used of it.
_LIMITS_OF_MEMORY = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def usable_cores() -> float:
    """The cores that this process may use: those it is bound to, or fewer where its container has a
    limit."""
    bound = float(len(os.sched_getaffinity(0)))
    limits = [limit for limit in (_limit_of_v2(), _limit_of_v1()) if limit is not None]
    return min([bound, *limits])


def usable_memory() -> int | None:
    """Bytes of memory that are free for this process, or fewer where its container has a limit;
    None: the system does not say."""
    lines = _text(Path("/proc/meminfo")).splitlines()
    free = [int(each.split()[1]) * 1024 for each in lines if each.startswith("MemAvailable:")]
    for group in _memory_groups():
        for limit, used in _LIMITS_OF_MEMORY:
            most, taken = _text(group / limit), _text(group / used)
            if most.isdigit() and taken.isdigit():
                free.append(max(0, int(most) - int(taken) + _cached(group)))
    return min(free, default=None)


def total_memory() -> int:
    """Bytes of memory of this host, or fewer where this process's container has a limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_text(group / name) for group in _memory_groups() for name, _ in _LIMITS_OF_MEMORY]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def _cached(group: Path) -> int:
    """Bytes of files in the memory of a cgroup, which the kernel drops where somebody needs it."""
    words = _text(group / "memory.stat").split()
    counts = dict(zip(words[::2], words[1::2], strict=False))
    # The first version counts groups below under names of their own.
    prefix = "total_" if "total_active_file" in counts else ""
    return sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _memory_groups() -> list[Path]:
    """The cgroups whose limits hold for this process, of both versions: its own and those above."""
    groups = [_CGROUP, _CGROUP / "memory"]
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            parts = Path(path).parts[1:]
            groups += [_CGROUP.joinpath(controllers, *parts[:n]) for n in range(1, len(parts) + 1)]
    return groups


def _limit_of_v2() -> float | None:
    """Of the second version of cgroups, which containers have today."""
    quota, _, period = _text(_CGROUP / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _limit_of_v1() -> float | None:
    quota = _text(_CGROUP / "cpu" / "cpu.cfs_quota_us")
    period = _text(_CGROUP / "cpu" / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _text(path: Path) -> str:
    """What a file says; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
