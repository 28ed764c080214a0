"""Histories of workers: all attached ones, and the newest that left."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from juggler.runtime.actors.hub import Worker, WorkerLeft
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2

_RATE_SECONDS = 10.0
_LONG_TEXT = 300  # characters of an error
MOST_GONE = 256  # maximum number of histories of workers that left


@dataclass(slots=True, eq=False)
class WorkerHistory:
    """History of all processes that had one worker id."""

    worker_id: str
    worker: Worker | None = None  # newest process
    state: str = "starting"  # starting, ready, left, restarting, or down (not started again)
    changed: float = 0.0  # time of the last change of state, by `time.monotonic`
    restarts: int = 0
    steps: int = 0  # live steps, sampled or trained
    version: Version | None = None
    last_error: str = ""
    error_time: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # of this process, by activity
    seconds_before: dict[str, float] = field(default_factory=dict)  # of earlier processes
    counts: dict[str, float] = field(default_factory=dict)  # of this process, by name
    counts_before: dict[str, float] = field(default_factory=dict)  # of earlier processes
    simulators: training_pb2.Simulators | None = None  # of a connected gateway
    reported_failure: bool = False  # this process has reported its failure
    ended_pid: int | None = None  # of the last local process that ended

    @property
    def role(self) -> str:
        return self.worker_id.rpartition("-")[0]

    def set_error(self, error: str) -> None:
        self.last_error = error.partition("\n")[0][:_LONG_TEXT]
        self.error_time = time.monotonic()

    def set_state(self, state: str) -> None:
        self.state, self.changed = state, time.monotonic()
        if state not in ("starting", "ready"):
            self.simulators = None

    @property
    def remote_restarts(self) -> int:
        """Number of restarts that no supervisor counts."""
        return self.restarts if self.worker is not None and not self.worker.local else 0

    def total_seconds(self) -> dict[str, float]:
        """Seconds of all processes by activity; they never go down."""
        return _sum(self.seconds_before, self.seconds)

    def total_counts(self) -> dict[str, float]:
        """Counts of all processes by name; they never go down."""
        return _sum(self.counts_before, self.counts)


class WorkerHistories:
    """Keeps states, steps and times of all workers."""

    def __init__(self) -> None:
        self.by_id: dict[str, WorkerHistory] = {}
        # The worker that is or was replaced last, and why it ended; "": no restart
        self.last_restart = ""
        self._forgotten: dict[str, WorkerHistory] = {}  # totals of deleted histories, by role
        self._forgotten_restarts = 0
        # (time, steps by worker id) over the last seconds
        self._marks: deque[tuple[float, dict[str, int]]] = deque()

    def joined(self, worker: Worker) -> None:
        history = self._of(worker.worker_id)
        if history.worker is not None:
            history.restarts += 1
            if not worker.local:  # otherwise its exit was counted
                self._restarts(history)
        history.seconds_before, history.seconds = history.total_seconds(), {}
        history.counts_before, history.counts = history.total_counts(), {}
        history.worker, history.reported_failure = worker, False
        history.set_state("starting")

    def ready(self, worker: Worker) -> None:
        self._of(worker.worker_id).set_state("ready")

    def left(self, event: WorkerLeft) -> None:
        history = self._of(event.worker.worker_id)
        if history.worker is not event.worker:
            return  # its successor has already attached
        ended = history.ended_pid == event.worker.pid  # its exit may be reported first
        if event.failure is not None:
            history.reported_failure = True
            history.set_error(event.failure.message)
            if history.state == "restarting":
                self._restarts(history)
        elif not event.farewell and not ended:
            history.set_error(event.reason)
        if not ended:
            history.set_state("left")
            self._forget()

    def exited(self, event: Exited, failed: bool = True) -> None:
        """Book the end of a local process, a failure unless requested."""
        history = self._of(event.worker_id)
        history.ended_pid = event.pid
        if failed and not history.reported_failure:
            history.set_error(event.how)
        history.set_state("down" if event.restart_in is None else "restarting")
        if event.restart_in is not None:  # from now on the supervisor counts it
            self._restarts(history)

    def worked(self, worker_id: str, steps: int, version: Version) -> None:
        """Add steps that a worker sampled or trained, and note its weights."""
        history = self.by_id[worker_id]
        history.steps += steps
        history.version = version

    def spent(self, worker_id: str, seconds: Mapping[str, float]) -> None:
        """Set a process's seconds since it began."""
        if seconds:
            self._of(worker_id).seconds = dict(seconds)

    def counted(self, worker_id: str, counts: Mapping[str, float]) -> None:
        """Set a process's counts since it began."""
        if counts:
            self._of(worker_id).counts = dict(counts)

    def has_simulators(self, worker_id: str, simulators: training_pb2.Simulators) -> None:
        """Set the simulators connected to a gateway now."""
        self._of(worker_id).simulators = simulators

    def counts(self) -> dict[str, float]:
        """Return the counts of all processes by name."""
        return functools.reduce(_sum, (each.total_counts() for each in self._all()), {})

    def seconds(self) -> dict[str, dict[str, float]]:
        """Return seconds of all processes by role and activity."""
        sums: dict[str, dict[str, float]] = {}
        for history in self._all():
            sums[history.role] = _sum(sums.get(history.role, {}), history.total_seconds())
        return {role: spent for role, spent in sums.items() if spent}

    def mark(self) -> None:
        """Mark the steps so far, about every second."""
        now = time.monotonic()
        self._marks.append((now, {name: each.steps for name, each in self.by_id.items()}))
        while self._marks[0][0] < now - _RATE_SECONDS:
            self._marks.popleft()

    def rates(self) -> dict[str, float]:
        """Return steps per second by worker id."""
        if not self._marks:
            return {}
        then, before = self._marks[0]
        seconds = max(time.monotonic() - then, 1e-3)
        return {
            name: (each.steps - before.get(name, 0)) / seconds for name, each in self.by_id.items()
        }

    def remote_restarts(self) -> int:
        """Number of restarts of workers without a supervisor; it never goes down."""
        return self._forgotten_restarts + sum(each.remote_restarts for each in self.by_id.values())

    def _restarts(self, history: WorkerHistory) -> None:
        self.last_restart = f"{history.worker_id}: {history.last_error or 'it left normally'}"

    def _all(self) -> Iterator[WorkerHistory]:
        yield from self.by_id.values()
        yield from self._forgotten.values()

    def _forget(self) -> None:
        """Delete a history if too many workers have left."""
        gone = [history for history in self.by_id.values() if history.state == "left"]
        if len(gone) <= MOST_GONE:
            return
        history = min(gone, key=lambda history: (history.steps > 0, history.changed))
        del self.by_id[history.worker_id]
        total = self._forgotten.setdefault(history.role, WorkerHistory(history.worker_id))
        total.seconds_before = _sum(total.seconds_before, history.total_seconds())
        total.counts_before = _sum(total.counts_before, history.total_counts())
        self._forgotten_restarts += history.remote_restarts

    def _of(self, worker_id: str) -> WorkerHistory:
        history = self.by_id.get(worker_id)
        if history is None:
            history = self.by_id[worker_id] = WorkerHistory(worker_id)
        return history


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in (*a, *b)}
