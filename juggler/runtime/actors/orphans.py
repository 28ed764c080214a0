"""Processes that must not outlive another process that is not their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

_SYS_PIDFD_OPEN = 434  # on every architecture but Alpha
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILLED_SECONDS = 5.0  # until killed processes are gone; the kernel may delay one
_LOOK_SECONDS = 0.005
_CLAIM_SECONDS = 0.05  # between the two looks that a child must be found unclaimed in


def die_with(pid: int) -> None:
    """End this process, at once and without clean-up, when process `pid` ends.

    For a process whose parent is a forkserver and whose owner is `pid`: the kernel's parent-death
    signal would watch the forkserver.

    Raises:
        OSError: the kernel does not let this process watch `pid`.
    """
    try:
        descriptor = process_descriptor(pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(
        target=_exit_after, args=(descriptor,), name=f"die with {pid}", daemon=True
    ).start()


def process_descriptor(pid: int) -> int:
    """A descriptor that can be read once a process has ended. Programs that this one starts do not
    inherit it.

    Raises:
        ProcessLookupError: it has ended, and nobody knows how any more.
        OSError: the kernel does not let this process watch it.
    """
    # Some Pythons were built with headers that lacked it.
    if (opened := getattr(os, "pidfd_open", None)) is not None:
        return int(opened(pid))
    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(_SYS_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor  # the kernel closes it on exec


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process `number` when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def take_in_orphans() -> None:
    """Become the parent of every process below this one that loses its own parent.

    Otherwise the first process of the system or container would become the parent, and nobody would
    know any more to whom the orphan belonged.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_children(parent: int, but: Callable[[], Collection[int]] | None = None) -> None:
    """Kill the children of a process that adopts orphans, and in the end everything below them.

    Args:
        parent: the process.
        but: tells which children are to live, with everything below them. It may learn of a child
            only some milliseconds after that was forked.
    """
    deadline = time.monotonic() + _KILLED_SECONDS
    nothing = 0  # times in a row; one look may miss a child that is just being adopted
    while nothing < 2 and time.monotonic() < deadline:
        found = children(parent) if but is None else _unclaimed(parent, but)
        for pid in found:
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user by now
                os.kill(pid, signal.SIGKILL)
        nothing = 0 if found else nothing + 1
        if found:
            time.sleep(_LOOK_SECONDS)  # then their children are the parent's


def children(parent: int) -> set[int]:
    """Child processes with at least one running thread: the last thread gives children away."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name may contain spaces and brackets; the fields after it do not.
            fields = path.read_text().rpartition(")")[2].split()
            ended = fields[0] in "ZX" and int(fields[17]) <= 1
            if int(fields[1]) == parent and not ended:
                found.add(int(path.parent.name))
    return found


def _unclaimed(parent: int, but: Callable[[], Collection[int]]) -> set[int]:
    """Children that nobody claims, even after some time."""
    # After each look, so that no child is newer than the claims.
    found = children(parent).difference(but())
    if found:
        time.sleep(_CLAIM_SECONDS)
        found &= children(parent).difference(but())
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
