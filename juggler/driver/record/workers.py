"""What became of the workers of this run, by worker id: of all who are here, and of those who left
lately."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from juggler.runtime.actors.hub_events import Left, Worker
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.episodes.version import Version

_RATE_SECONDS = 10.0
_LONG_TEXT = 300  # characters of an error
#: Records that are kept of workers that left.
MOST_GONE = 256


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """All processes that had one worker id.

    Attributes:
        state: starting, ready, left, restarting, or down: it will not be started again.
        changed: when it last came or went, of `time.monotonic`.
        steps: live ones, sampled or trained on.
    """

    worker_id: str
    worker: Worker | None = None  # the newest
    state: str = "starting"
    changed: float = 0.0
    restarts: int = 0
    steps: int = 0
    version: Version | None = None
    last_error: str = ""
    error_time: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # where this process's time went
    seconds_before: dict[str, float] = field(default_factory=dict)  # where that of others went
    counts: dict[str, float] = field(default_factory=dict)  # what this process has counted
    counts_before: dict[str, float] = field(default_factory=dict)  # what others did
    said_why: bool = False  # this process
    ended_pid: int | None = None  # of the local process that ended last

    @property
    def role(self) -> str:
        return self.worker_id.rpartition("-")[0]

    def failed(self, error: str) -> None:
        self.last_error = error.partition("\n")[0][:_LONG_TEXT]
        self.error_time = time.monotonic()

    def turns(self, state: str) -> None:
        self.state, self.changed = state, time.monotonic()

    @property
    def remote_restarts(self) -> int:
        """Those that no supervisor counts."""
        return self.restarts if self.worker is not None and not self.worker.local else 0

    def total_seconds(self) -> dict[str, float]:
        """Of all processes; never goes down."""
        return _sum(self.seconds_before, self.seconds)

    def total_counts(self) -> dict[str, float]:
        """Of all processes; never goes down."""
        return _sum(self.counts_before, self.counts)


class WorkerRecords:
    """Told of whatever happens to workers; costs next to nothing for each batch.

    Attributes:
        updates: that made new weights, in this process.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, WorkerRecord] = {}
        self.updates = 0
        self._gone: dict[str, WorkerRecord] = {}  # of those in `by_id` who left, oldest first
        self._forgotten: dict[str, WorkerRecord] = {}  # by role, the totals of those before
        self._forgotten_restarts = 0
        self._newest = Version(0, 0)
        # Steps by worker id, and those of the run under "", at some moments of the last seconds.
        self._marks: deque[tuple[float, dict[str, int]]] = deque()

    def joined(self, worker: Worker) -> None:
        record = self._of(worker.worker_id)
        self._gone.pop(worker.worker_id, None)
        if record.worker is not None:
            record.restarts += 1
        record.seconds_before, record.seconds = record.total_seconds(), {}
        record.counts_before, record.counts = record.total_counts(), {}
        record.worker, record.said_why = worker, False
        record.turns("starting")

    def ready(self, worker: Worker) -> None:
        self._of(worker.worker_id).turns("ready")

    def left(self, event: Left) -> None:
        record = self._of(event.worker.worker_id)
        if record.worker is not event.worker:
            return  # another one is here already
        ended = record.ended_pid == event.worker.pid  # which may be told before
        if event.failure is not None:
            record.said_why = True
            record.failed(event.failure.message)
        elif not event.farewell and not ended:
            record.failed(event.reason)
        if not ended:
            record.turns("left")
            self._gone[record.worker_id] = record
            self._forget()

    def exited(self, event: Exited) -> None:
        """A local process has ended."""
        record = self._of(event.worker_id)
        self._gone.pop(event.worker_id, None)
        record.ended_pid = event.pid
        if not record.said_why:
            record.failed(event.how)
        record.turns("down" if event.restart_in is None else "restarting")

    def sampled(self, worker_id: str, steps: int, version: Version) -> None:
        record = self.by_id[worker_id]
        record.steps += steps
        record.version = version

    def trained(self, worker_id: str, steps: int, version: Version) -> None:
        self.sampled(worker_id, steps, version)
        if version > self._newest:
            self._newest = version
            self.updates += 1

    def spent(self, worker_id: str, seconds: Mapping[str, float]) -> None:
        """A process's own totals since it began."""
        if seconds:
            self._of(worker_id).seconds = dict(seconds)

    def counted(self, worker_id: str, counts: Mapping[str, float]) -> None:
        """A process's own totals since it began."""
        if counts:
            self._of(worker_id).counts = dict(counts)

    def counts(self) -> dict[str, float]:
        """What all processes have counted, by name."""
        sums: dict[str, float] = {}
        for record in self._all():
            sums = _sum(sums, record.total_counts())
        return sums

    def seconds(self) -> dict[str, dict[str, float]]:
        """By role, where the time of all processes went; never goes down."""
        sums: dict[str, dict[str, float]] = {}
        for record in self._all():
            for name, spent in record.total_seconds().items():
                of_role = sums.setdefault(record.role, {})
                of_role[name] = of_role.get(name, 0.0) + spent
        return sums

    def mark(self, steps_trained: int) -> None:
        """To be called every second or so: rates are over what came since a mark."""
        now = time.monotonic()
        steps = {name: record.steps for name, record in self.by_id.items()}
        self._marks.append((now, {"": steps_trained, **steps}))
        while self._marks[0][0] < now - _RATE_SECONDS:
            self._marks.popleft()

    def rates(self, steps_trained: int) -> dict[str, float]:
        """Steps per second, by worker id; under "" those of the run that were trained on."""
        if not self._marks:
            return {}
        then, before = self._marks[0]
        seconds = max(time.monotonic() - then, 1e-3)
        now = {"": steps_trained, **{name: record.steps for name, record in self.by_id.items()}}
        return {name: (now[name] - before.get(name, 0)) / seconds for name in now}

    def remote_restarts(self) -> int:
        """Of workers that no supervisor has started; never goes down."""
        return self._forgotten_restarts + sum(each.remote_restarts for each in self.by_id.values())

    def _all(self) -> Iterator[WorkerRecord]:
        yield from self.by_id.values()
        yield from self._forgotten.values()

    def _forget(self) -> None:
        """One of those who left, if they are too many: first those who never did anything."""
        if len(self._gone) <= MOST_GONE:
            return
        useless = (record for record in self._gone.values() if not record.steps)
        record = next(useless, None) or next(iter(self._gone.values()))
        del self._gone[record.worker_id], self.by_id[record.worker_id]
        total = self._forgotten.setdefault(record.role, WorkerRecord(record.worker_id))
        total.seconds_before = _sum(total.seconds_before, record.total_seconds())
        total.counts_before = _sum(total.counts_before, record.total_counts())
        self._forgotten_restarts += record.remote_restarts

    def _of(self, worker_id: str) -> WorkerRecord:
        record = self.by_id.get(worker_id)
        if record is None:
            record = self.by_id[worker_id] = WorkerRecord(worker_id)
        return record


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in (*a, *b)}
