"""Ctrl-C, SIGTERM and SIGHUP for the time of a run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

#: Some tools signal a process and then its group: the same wish, twice.
_SAME_SECONDS = 0.5

_REASONS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "terminated",  # the terminal is gone
}


@contextmanager
def signals_become(stop: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """The first signal calls `stop` with a reason; the second raises KeyboardInterrupt.

    Any more do nothing, nor does the second once the function that the block gets was called: what
    cleans up must not be cut short.

    `stop` is called in a thread of its own: a handler may interrupt the main thread while that
    holds a lock that `stop` wants. In other threads than the main one signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    seen: list[float] = []  # when the first signal came
    no_more = threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if seen and now - seen[0] > _SAME_SECONDS and not no_more.is_set():
            no_more.set()
            raise KeyboardInterrupt
        if seen:
            return
        seen.append(now)
        threading.Thread(target=stop, args=(_REASONS[signal.Signals(number)],)).start()

    numbers = tuple(_REASONS)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield no_more.set
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
