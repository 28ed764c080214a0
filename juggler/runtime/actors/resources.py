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
    return min([bound, *(limit for group in _groups("cpu") for limit in _quota(group))])


def usable_memory() -> int | None:
    """Bytes of memory that are free for this process, or fewer where its container has a limit;
    None: the system does not say."""
    lines = _text(Path("/proc/meminfo")).splitlines()
    free = [int(each.split()[1]) * 1024 for each in lines if each.startswith("MemAvailable:")]
    for group in _groups("memory"):
        for limit, used in _LIMITS_OF_MEMORY:
            most, taken = _text(group / limit), _text(group / used)
            if most.isdigit() and taken.isdigit():
                free.append(max(0, int(most) - int(taken) + _cached(group)))
    return min(free, default=None)


def total_memory() -> int:
    """Bytes of memory of this host, or fewer where this process's container has a limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_text(group / name) for group in _groups("memory") for name, _ in _LIMITS_OF_MEMORY]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def oom_kills() -> int:
    """Count the processes that the kernel killed because memory ran out."""
    lines = [each.split() for each in _text(Path("/proc/vmstat")).splitlines()]
    return sum(int(count) for name, count in lines if name == "oom_kill")


def _cached(group: Path) -> int:
    """Bytes of files in the memory of a cgroup, which the kernel drops where somebody needs it."""
    words = _text(group / "memory.stat").split()
    counts = dict(zip(words[::2], words[1::2], strict=False))
    # The first version counts groups below under names of their own.
    prefix = "total_" if "total_active_file" in counts else ""
    return sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _groups(controller: str) -> list[Path]:
    """The cgroups whose limits hold for this process, of both versions: its own and those above."""
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
    """What a file says; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
