"""Processes that must not outlive another one that is not their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILLED_SECONDS = 5.0  # for what is killed to be gone; the kernel may hold one in a driver of its
_LOOK_SECONDS = 0.005


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


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process `number` when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def take_in_orphans() -> None:
    """Become the parent of all that is started below this process and loses its own parent.

    Without this the first process of the system or container would, and nobody would know any more
    to whom it belonged.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_children(parent: int, but: Collection[int] = ()) -> None:
    """Kill the children of a process that takes in orphans, and in the end all below them.

    Args:
        parent: who it is.
        but: its children that are to live, with all below them.
    """
    deadline = time.monotonic() + _KILLED_SECONDS
    nothing = 0  # times in a row; one look alone may miss what gets another parent meanwhile
    while nothing < 2 and time.monotonic() < deadline:
        found = _children(parent).difference(but)
        for pid in found:
            with contextlib.suppress(OSError):  # it has ended, or is another user's by now
                os.kill(pid, signal.SIGKILL)
        nothing = 0 if found else nothing + 1
        if found:
            time.sleep(_LOOK_SECONDS)  # then theirs are the parent's


def _children(parent: int) -> set[int]:
    """Those that have not ended, with all of their threads: the last one gives children away."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name may hold spaces and brackets; the fields after it do not.
            fields = path.read_text().rpartition(")")[2].split()
            ended = fields[0] in "ZX" and int(fields[17]) <= 1
            if int(fields[1]) == parent and not ended:
                found.add(int(path.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _exit_after(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os._exit(1)
