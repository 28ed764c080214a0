"""Handles Ctrl-C, SIGTERM and SIGHUP during a run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from juggler.runtime.actors.stop_signals import ProcessHandler

_SAME_SECONDS = 0.5  # some tools signal a process and then its group: the same request, twice

#: Reasons for a run's end, by signal.
REASONS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "terminated",  # the terminal was closed
}


class SecondSignal(BaseException):
    """A second stop signal, as opposed to an exception of a callback."""


class _Interrupted(KeyboardInterrupt, SecondSignal):
    pass


class _Terminated(SystemExit, SecondSignal):
    pass


@dataclass(slots=True)
class CaughtSignal:
    """The first signal during a run."""

    number: int = 0  # number of the first signal; 0: no signal
    _no_more: bool = False

    def no_more(self) -> None:
        """Ignore further signals, so that cleaning up is not cut short."""
        self._no_more = True


def as_exception(number: int) -> BaseException:
    """Return the exception with which a signal ends a Python program."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def takes_signals() -> bool:
    """Return whether signals reach this thread, which must be the main one."""
    return threading.current_thread() is threading.main_thread()


def stop_hint(words: str) -> str:
    """Return a hint for ending a wait, if signals reach this thread."""
    return f"; {words}" if takes_signals() else ""


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return signals that end a run; under nohup, SIGHUP does not."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(each for each in REASONS if each != signal.SIGHUP or not ignored)


@contextmanager
def signals_become(stop: Callable[[str], None]) -> Iterator[CaughtSignal]:
    """Call `stop` at the first signal, raise `SecondSignal` at the second.

    `stop` is called in its own thread: a handler may interrupt the main thread while that holds a
    lock that `stop` needs. Outside the main thread, signals are not handled.
    """
    if not takes_signals():
        yield CaughtSignal()
        return
    seen: list[float] = []  # time of the first signal
    caught = CaughtSignal()

    def handle(number: int) -> None:
        now = time.monotonic()
        if seen and now - seen[0] > _SAME_SECONDS and not caught._no_more:
            caught.no_more()
            raise _Interrupted if number == signal.SIGINT else _Terminated(128 + number)
        if seen:
            return
        seen.append(now)
        caught.number = number
        threading.Thread(target=stop, args=(REASONS[signal.Signals(number)],)).start()

    # The program's own handlers come back at the end.
    numbers = ending_signals()
    before = [signal.signal(number, ProcessHandler(handle)) for number in numbers]
    try:
        yield caught
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
