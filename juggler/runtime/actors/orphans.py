"""Processes that must not outlive another one that is not their parent."""

from __future__ import annotations

import os
import select
import threading


def die_with(pid: int) -> None:
    """End this process, at once and without clean-up, when process `pid` ends.

    For a process whose parent is a forkserver and whose owner is `pid`: the kernel's parent-death
    signal would watch the forkserver.

    Raises:
        OSError: the kernel does not let this process watch `pid`.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(
        target=_exit_after, args=(descriptor,), name=f"die with {pid}", daemon=True
    ).start()


def _exit_after(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os._exit(1)
