"""Starts and restarts local processes.

Gives up on processes that keep dying.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Protocol

from juggler.runtime.actors.resources import oom_kills

_ABORT_SECONDS = 0.5
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # no fault of the process
_UNKNOWN = 255  # multiprocessing's exit code if the forkserver is gone
_MEANINGS = {
    _UNKNOWN: " (its forkserver was killed, unless it exited with this code itself)",
    -signal.SIGABRT: " (C or C++ code gave up, or it hung and was aborted)",
}

_oom_kills = oom_kills()  # kills seen so far


class Process(Protocol):
    """A process, with the methods of multiprocessing's."""

    @property
    def pid(self) -> int | None: ...

    @property
    def sentinel(self) -> int: ...

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


class Program(Protocol):
    """What a supervisor starts."""

    def start(self, title: str) -> Process:
        """Start a process that dies with this one."""

    def ended(self, process: Any, /) -> str:
        """Kill what an ended process has started; return its last words."""


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker's process has ended; `restart_in` is None if it stays down."""

    worker_id: str
    pid: int  # 0: no process, for example because none could be started
    how: str  # "exit code 1", "killed by SIGKILL"; and its error message, if any
    restart_in: float | None


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Doubles the pause before a restart with each death within `window_seconds`.

    It grows from `first_delay` to `longest_delay`, with 25 % jitter.

    A worker stays down if it dies `most_in_window` times within the window, or `quarantine_after`
    times in a row without enough use in between. Enough means `enough_uses` uses in one life, or a
    life of `window_seconds` after its first use. For a worker that was killed from outside, one
    use is enough. With `until_success`, it also stays down if it exits with 0.
    """

    first_delay: float = 0.25
    longest_delay: float = 30.0
    quarantine_after: int = 5
    window_seconds: float = 60.0
    most_in_window: int = 8
    enough_uses: int = 1
    until_success: bool = False

    def delay(self, deaths: int, jitter: float) -> float:
        """Return the seconds until the next start.

        Args:
            deaths: number of deaths within the window, or in a row.
            jitter: between 0 and 1.
        """
        doubled = self.first_delay * 2.0 ** min(deaths - 1, 64)
        return min(doubled, self.longest_delay) * (1 + jitter / 4)


@dataclass(slots=True)
class _WorkerSlot:
    """A worker id, with at most one process at a time."""

    worker_id: str
    program: Program
    policy: RestartPolicy
    process: Process | None = None
    starting: bool = False  # its process is starting
    failures: int = 0  # deaths since a life with enough use
    uses: int = 0  # in this life
    first_use: float = math.inf
    deaths: deque[float] = field(default_factory=deque)  # times within the window
    due: float = 0.0  # time to start, without a process
    kill_at: float = math.inf  # time to kill, with a process
    down: bool = False
    last_life: bool = False  # it stays down when its process ends
    restarts: int = 0

    def has_run_long_enough(self, now: float) -> bool:
        """Return whether this life has had enough use."""
        policy = self.policy
        return self.uses >= policy.enough_uses or now - self.first_use >= policy.window_seconds

    def gives_up(self, exitcode: int | None) -> bool:
        """Note a death; return whether the worker stays down."""
        now = time.monotonic()
        if self.has_run_long_enough(now) or (exitcode in _KILLED and self.uses):
            self.failures = 0
        self.failures += 1
        self.uses, self.first_use = 0, math.inf
        self.deaths.append(now)
        while self.deaths[0] < now - self.policy.window_seconds:
            self.deaths.popleft()
        return (
            self.last_life
            or (self.policy.until_success and exitcode == 0)
            or self.failures >= self.policy.quarantine_after
            or len(self.deaths) >= self.policy.most_in_window
        )


class Supervisor:
    """Starts and watches local processes in its own thread.

    Args:
        ended: called with the end of each process, mostly in the supervisor's thread.
    """

    def __init__(self, ended: Callable[[Exited], object]) -> None:
        self._tell = ended
        self._jitter = random.Random(0)
        self._slots: dict[str, _WorkerSlot] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._restarts = True
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def add(self, worker_id: str, program: Program, policy: RestartPolicy) -> None:
        """Start a worker and keep it alive according to the policy."""
        with self._lock:
            self._slots[worker_id] = _WorkerSlot(worker_id, program, policy)
        self._wake()
        if not self._thread.is_alive():
            self._thread.start()

    def of_use(self, worker_id: str) -> None:
        """Note that the worker was useful.

        After enough use its failures count from zero.
        """
        slot = self._slots.get(worker_id)
        if slot is not None:
            with self._lock:
                slot.uses += 1
                slot.first_use = min(slot.first_use, time.monotonic())

    def keeps_failing(self, worker_id: str) -> bool:
        """Return whether a worker died repeatedly without enough use in between."""
        slot = self._slots[worker_id]
        with self._lock:
            return slot.failures > 1 and not slot.has_run_long_enough(time.monotonic())

    def give_up(self, worker_id: str, pid: int) -> None:
        """Keep a worker down that failed again in the same way.

        Does nothing if it had enough use in between.

        Args:
            worker_id: of the worker.
            pid: of the process that has failed, which may have ended.
        """
        with self._lock:
            slot = self._slots.get(worker_id)
            if slot is None or slot.down:
                return
            runs = slot.process is not None and slot.process.pid == pid
            if slot.has_run_long_enough(time.monotonic()) if runs else slot.failures < 2:
                return
            slot.last_life = True
            if slot.process is not None:
                return
            slot.down = True
        self._tell(Exited(worker_id, pid, "it failed again as before", None))

    def dismiss(self, worker_id: str, seconds: float) -> None:
        """Let a worker stay down once its process has ended.

        A process that takes longer than this many seconds is killed.
        """
        with self._lock:
            slot = self._slots[worker_id]
            was_down = slot.down
            slot.last_life = True
            slot.down = slot.process is None
            slot.kill_at = time.monotonic() + seconds
            has_none = slot.down and not was_down and not slot.starting
        if has_none:  # no process that could end
            self._tell(Exited(worker_id, 0, "it was not running", None))
        self._wake()

    def kill(self, worker_id: str, pid: int, after: float = 0.0, abort: bool = False) -> None:
        """Kill a worker's process in `after` seconds, if still current.

        With `abort`, it first gets SIGABRT and a moment to print its stack, which works even if it
        hangs.
        """
        with self._lock:
            slot = self._slots.get(worker_id)
            if slot is not None and slot.process is not None and slot.process.pid == pid:
                if abort:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGABRT)
                    after += _ABORT_SECONDS
                slot.kill_at = time.monotonic() + after
        self._wake()

    @property
    def restarts(self) -> int:
        return sum(slot.restarts for slot in self._slots.values())

    def pids(self) -> dict[str, int]:
        """Return ids of the running processes, by worker id."""
        # Another thread may take a process out of its slot meanwhile.
        running = [(worker_id, slot.process) for worker_id, slot in self._slots.copy().items()]
        return {
            worker_id: process.pid
            for worker_id, process in running
            if process is not None and process.pid is not None
        }

    def stop_restarting(self) -> None:
        """Let processes that end from now on stay down."""
        with self._lock:
            self._restarts = False
            for slot in self._slots.values():
                slot.down = slot.down or slot.process is None

    def close(self, grace: float) -> None:
        """Stop restarting, and end the processes.

        Waits up to `grace` seconds, then kills the rest; after Ctrl-C at once.
        """
        with self._lock:
            self._closing.set()
            processes = [(x.process, x.program) for x in self._slots.values() if x.process]
        self._wake()
        deadline = time.monotonic() + grace
        try:
            for process, _ in processes:
                process.join(timeout=max(0.0, deadline - time.monotonic()))
        finally:
            # Also after Ctrl-C: at exit, multiprocessing would wait for a process that still runs.
            for process, _ in processes:
                if process.is_alive():
                    process.kill()
                    process.join(timeout=5)
            for process, program in processes:
                program.ended(process)
            if self._thread.is_alive():
                # A short wait: the thread may be starting a process, until the forkserver answers
                # or is gone.
                self._thread.join(timeout=0.5)
            if not self._thread.is_alive():
                os.close(self._wake_read)
                os.close(self._wake_write)

    def _wake(self) -> None:
        os.write(self._wake_write, b"w")

    def _watch(self) -> None:
        while not self._closing.is_set():
            next_due = self._do_what_is_due(time.monotonic())
            with self._lock:
                running = {
                    slot.process.sentinel: slot
                    for slot in self._slots.values()
                    if slot.process is not None
                }
            if self._closing.is_set():
                return
            # Without a due time, only the end of a process or a wake-up changes anything.
            timeout = None if next_due == math.inf else max(0.0, next_due - time.monotonic())
            for ready in wait([*running, self._wake_read], timeout):
                if ready == self._wake_read:
                    os.read(self._wake_read, 4096)
                else:
                    self._ended(running[int(ready)])  # type: ignore[arg-type]

    def _do_what_is_due(self, now: float) -> float:
        """Start and kill due processes; return when the next is due."""
        with self._lock:
            slots = [slot for slot in self._slots.values() if not slot.down]
            for slot in slots:
                if slot.process is not None and slot.kill_at <= now:
                    slot.kill_at = math.inf
                    slot.process.kill()
            # Marked under the lock: `dismiss` must wait for the end of a process that is starting.
            due = [slot for slot in slots if slot.process is None and slot.due <= now]
            for slot in due:
                slot.starting = True
        for slot in due:
            self._start(slot)
        with self._lock:
            return min(
                (
                    slot.due if slot.process is None else slot.kill_at
                    for slot in self._slots.values()
                    if not slot.down
                ),
                default=math.inf,
            )

    def _start(self, slot: _WorkerSlot) -> None:
        """Start a process, without the lock."""
        try:
            process = slot.program.start(slot.worker_id.replace("-", " "))
        except Exception as error:  # the forkserver died, or the host has no more resources
            how = f"it could not be started ({type(error).__name__}: {error})"
            return self._failed(slot, 0, how, None)
        with self._lock:
            slot.kill_at = math.inf
            slot.process, slot.starting = process, False
            if self._closing.is_set() or slot.down:
                process.kill()  # `close` or `dismiss` has not seen this process

    def _ended(self, slot: _WorkerSlot) -> None:
        process = slot.process
        assert process is not None
        process.join(timeout=5)
        words = slot.program.ended(process)
        how = how_it_ended(process.exitcode)
        how = f"{how}, {words}" if words else how
        self._failed(slot, process.pid or 0, how, process.exitcode)

    def _failed(self, slot: _WorkerSlot, pid: int, how: str, exitcode: int | None) -> None:
        with self._lock:
            slot.process, slot.starting = None, False
            gives_up = slot.gives_up(exitcode)
            if self._closing.is_set() or gives_up or not self._restarts:
                slot.down, delay = True, None
            else:
                delay = slot.policy.delay(len(slot.deaths), self._jitter.random())
                slot.due = time.monotonic() + delay
                slot.restarts += 1
        self._tell(Exited(slot.worker_id, pid, how, delay))


def how_it_ended(exitcode: int | None) -> str:
    """Describe how a process of the forkserver ended."""
    global _oom_kills
    before, _oom_kills = _oom_kills, oom_kills()
    how = f"exit code {exitcode}"
    if exitcode is not None and exitcode < 0:
        known = -exitcode in {*signal.Signals}
        how = f"killed by {signal.Signals(-exitcode).name if known else f'signal {-exitcode}'}"
    if exitcode in (-signal.SIGKILL, _UNKNOWN) and _oom_kills > before:
        return f"{how} (out of memory: the kernel has killed a process for it)"
    return how + _MEANINGS.get(exitcode or 0, "")
