"""How many files a process may have open at once, sockets among them."""

from __future__ import annotations

import contextlib
import resource


def allow_many_open_files(least: int = 0) -> None:
    """Raise this process's soft limit to its hard one, as far as the system lets it.

    Most systems start processes with a soft limit of 1024, for programs that call select(2), which
    knows no higher numbers; what waits here for sockets is epoll. A driver has a socket for each
    worker, a learner one or two for each EnvRunner, and whoever has no number left takes nobody
    more and can write nothing either. Processes that are started from here inherit the limit: those
    of learners need it, and to the others it makes no difference.

    Args:
        least: that this process will need.

    Raises:
        ValueError: it cannot have so many.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it: then it stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < least:
        raise ValueError(
            f"a process may have {allowed} files open at once here, and this one needs {least}: "
            "raise the limit (`ulimit -Hn` shows it), or start fewer workers"
        )
