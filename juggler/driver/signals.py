"""Ctrl-C, SIGTERM and SIGHUP for the time of a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_REASONS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "terminated",  # the terminal is gone
}


@contextmanager
def signals_become(stop: Callable[[str], None]) -> Iterator[None]:
    """The first signal calls `stop` with a reason; the second raises KeyboardInterrupt.

    `stop` is called in a thread of its own: a handler may interrupt the main thread while that
    holds a lock that `stop` wants. In other threads than the main one signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        threading.Thread(target=stop, args=(_REASONS[signal.Signals(number)],)).start()

    numbers = tuple(_REASONS)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
