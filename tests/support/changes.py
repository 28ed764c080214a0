"""Waits for changes by other threads, without polling."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 60.0  # seconds until a test fails; nothing takes as long


class Changes:
    """Wakes a waiting test after every change by a thread."""

    def __init__(self) -> None:
        self._number = 0
        self._noted = threading.Condition()

    def note(self) -> None:
        with self._noted:
            self._number += 1
            self._noted.notify_all()

    @contextmanager
    def after(self, work: AbstractContextManager[None]) -> Iterator[None]:
        """Note a change whenever this work is done."""
        try:
            with work:
                yield
        finally:
            self.note()

    def wait_for(self, what: Callable[[], T], otherwise: str = "it never came to that") -> T:
        """Return the result of `what` as soon as it is true.

        It may take locks: it is called without one, at once and after every change.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            seen = self._number
            if result := what():
                return result
            with self._noted:
                changed = self._noted.wait_for(
                    lambda seen=seen: self._number != seen, deadline - time.monotonic()
                )
            assert changed, otherwise


def newer_threads_end(before: set[threading.Thread]) -> None:
    """Wait for the end of all threads but these."""
    deadline = time.monotonic() + PATIENCE
    while left := set(threading.enumerate()) - before:
        for each in left:
            # One that is just being started cannot be joined.
            each._started.wait(deadline - time.monotonic())  # type: ignore[attr-defined]
            each.join(max(0.0, deadline - time.monotonic()))
            assert not each.is_alive(), f"{each.name}: still running"


class SkippedTime:
    """Replaces a module's `time`: sleeping only moves the clock.

    Args:
        step: seconds by which each look at the clock moves it.
    """

    def __init__(self, step: float = 0.0) -> None:
        self._skipped, self._step = 0.0, step

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        self._skipped += self._step
        return time.monotonic() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += seconds


class HeldLoop(asyncio.SelectorEventLoop):
    """A hub's loop whose longer timers wait for a test."""

    def __init__(self) -> None:
        super().__init__()
        self._passed = 0.0
        self._held: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return super().time() + self._passed

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        if when - self.time() < 0.9:  # a grace of gRPC's
            return super().call_at(when, callback, *args, context=context)
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._held.append(timer)
        return timer

    def let_pass(self, seconds: int) -> None:
        """Let seconds pass, one by one; to be called in another thread."""

        async def let_pass() -> None:
            for _ in range(seconds):
                self._passed += 1.0
                now, held, self._held = self.time(), self._held, []
                for timer in held:
                    (self._ready if timer.when() <= now else self._held).append(timer)  # type: ignore[attr-defined]
                for _ in range(9):  # tasks that they wake, one after the other
                    await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(let_pass(), self).result(PATIENCE)
