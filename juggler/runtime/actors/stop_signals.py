"""Ignores stop signals: only the driver ends the processes of a run.

A program started by an environment must still react to these signals. SIG_IGN would survive fork
and exec, so a process ignores them with handlers in Python.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProcessHandler:
    """Handles a signal in this process, but not in forked processes."""

    def __init__(self, handle: Callable[[int], object]) -> None:
        self._handle = handle

    def __call__(self, number: int, _: object) -> None:
        self._handle(number)


def ignore_stop_signals(*, inherited: bool = False) -> None:
    """Ignore stop signals, so this process does not end before the driver.

    A terminal sends Ctrl-C to every process of a run. A service manager does the same with SIGTERM.

    Args:
        inherited: forked processes also ignore the signals, as children of a forkserver must.
    """
    handler = _nothing if inherited else ProcessHandler(_nothing)
    for number in STOP_SIGNALS:
        # The run was started with this signal ignored, as by nohup; child processes inherit that.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
            signal.siginterrupt(number, False)  # C code need not expect EINTR


@contextmanager
def stop_signals_held() -> Iterator[None]:
    """Block stop signals in this thread and in processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing(*_: object) -> None:
    pass


def _before_fork() -> None:
    # A signal that reaches the child before it has its own handlers would be lost.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    for number in STOP_SIGNALS:
        if isinstance(signal.getsignal(number), ProcessHandler):
            interrupts = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if interrupts else signal.SIG_DFL)
    _after_fork()


_forking = threading.local()
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
