"""The limit on open files, sockets included."""

from __future__ import annotations

import contextlib
import resource


def allow_many_open_files(least: int = 0) -> None:
    """Raise this process's soft limit to the hard limit, as far as the system allows.

    Most systems start processes with a soft limit of 1024, for programs that use select(2), which
    supports no higher numbers; here sockets are polled with epoll. A driver has a socket for each
    worker, a learner one for each EnvRunner and, on its own host, one more for shared memory; with
    Pythons before 3.13 also one for each memory, up to sixteen. A process at its limit can neither
    accept connections nor write files. Processes started from here inherit the limit: learners need
    it, and it makes no difference to others.

    Args:
        least: how many files this process will need.

    Raises:
        ValueError: it cannot have so many.
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
