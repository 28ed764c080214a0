"""The EnvRunners of a run, which all modules share, and their queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from juggler.driver.core.events import WorkerKey
from juggler.driver.core.group import worker_order


@dataclass(slots=True, eq=False)
class Runner:
    """An EnvRunner, with its modules and its rounds in flight.

    Attributes:
        steps: by module id, the maximum number of live steps of one request; only for modules that
            the EnvRunner has.
        rounds: by round, number of its requests without a report; never 0.
        is_queued: it waits for its next round.
    """

    worker: WorkerKey
    steps: dict[str, int]
    rounds: dict[int, int] = field(default_factory=dict)
    is_queued: bool = False


class Runners:
    """The EnvRunners that are connected, and the queue for the next round.

    Args:
        most_rounds: maximum number of rounds of one EnvRunner that are not reported in full.
    """

    def __init__(self, most_rounds: int) -> None:
        self._most_rounds = most_rounds
        self._here: dict[str, Runner] = {}  # by worker id
        self._gone: set[WorkerKey] = set()
        self._queue: deque[Runner] = deque()

    def __len__(self) -> int:
        return len(self._here)

    def find(self, worker: WorkerKey) -> Runner | None:
        """Return this incarnation of a runner, if it is connected."""
        runner = self._here.get(worker.worker_id)
        return runner if runner is not None and runner.worker == worker else None

    def named(self, worker_id: str) -> Runner | None:
        """Return the EnvRunner with this id."""
        return self._here.get(worker_id)

    def in_order(self) -> list[Runner]:
        """Return all EnvRunners, in order of their index."""
        return [self._here[worker_id] for worker_id in sorted(self._here, key=worker_order)]

    def has_seen(self, worker: WorkerKey) -> bool:
        """Return whether this incarnation is or was connected."""
        return worker in self._gone or self.find(worker) is not None

    def join(self, worker: WorkerKey, steps: Mapping[str, int]) -> Runner:
        """Add a new EnvRunner."""
        runner = self._here[worker.worker_id] = Runner(worker, dict(steps))
        return runner

    def leave(self, worker: WorkerKey) -> Runner | None:
        """Remove an EnvRunner, whose incarnation cannot return; None: it was absent."""
        self._gone.add(worker)
        runner = self.find(worker)
        if runner is not None:
            del self._here[worker.worker_id]
        return runner

    def enqueue(self, runner: Runner) -> None:
        """Append a runner to the queue, if it may have another round."""
        if not runner.is_queued and len(runner.rounds) < self._most_rounds:
            runner.is_queued = True
            self._queue.append(runner)

    def dequeue(self) -> Runner | None:
        while self._queue:
            runner = self._queue.popleft()
            runner.is_queued = False
            if self.find(runner.worker) is runner:  # else it left the run
                return runner
        return None

    def request_ended(self, worker: WorkerKey, number: int) -> Runner | None:
        """Close a request of a round.

        Returns the runner if it was the last request of the round.
        """
        runner = self.find(worker)
        if runner is None or number not in runner.rounds:
            return None
        runner.rounds[number] -= 1
        if runner.rounds[number]:
            return None
        del runner.rounds[number]
        return runner
