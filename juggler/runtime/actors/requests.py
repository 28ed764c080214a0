"""Commands in flight: a cap by worker, completions, and times."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf import any_pb2
from google.protobuf.message import Message

from juggler.runtime.actors.hub import (
    Hub,
    HubEvent,
    Worker,
    WorkerJoined,
    WorkerLeft,
    WorkerReplied,
)
from juggler.runtime.wire.v1 import attach_pb2

#: For durations, in seconds: from a message on the same host to a step of a slow simulator.
DURATIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Histogram:
    """Counts of values by bucket; they only grow.

    Args:
        bounds: upper bounds of the buckets, inclusive and in order; one more bucket has larger
            values.

    Attributes:
        counts: by bucket; the last is for values above all bounds.
        sum: of all values.
        most: the largest value; 0: no values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.most = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.most = max(self.most, value)


@dataclass(frozen=True, slots=True)
class Completed:
    """One reply to a command; `last` if no other follows.

    `failure` is set if the command failed or its worker left; then `body` is None.
    """

    worker: Worker
    command_id: int
    request: Message
    body: any_pb2.Any | None
    failure: attach_pb2.Failure | None
    last: bool


class CapReached(RuntimeError):
    """The worker has the maximum number of commands in flight."""


class RequestPool:
    """Tracks the commands in flight at each worker.

    If a worker leaves, all of its commands complete with a failure, so a caller that waits for a
    reply always gets one.

    Args:
        hub: carries the commands.
        cap: maximum number of commands in flight at one worker.
        latencies: by kind of command, a histogram of the seconds from a command to its last reply.
    """

    def __init__(
        self,
        hub: Hub,
        cap: int = 64,
        latencies: Mapping[type[Message], Histogram] | None = None,
    ) -> None:
        self._hub = hub
        self._cap = cap
        self._latencies = latencies or {}
        self._next_id = 1
        # By command id: the command, and when it was sent.
        self._in_flight: dict[Worker, dict[int, tuple[Message, float]]] = {}

    def submit(self, worker: Worker, request: Message) -> int:
        """Send a command; `complete` returns its completions.

        Raises:
            CapReached: this worker's cap is used up.
        """
        pending = self._in_flight.get(worker)
        if pending is None:
            # It left; its Left event is on the way, and no answer will come.
            raise KeyError(f"{worker.worker_id} is not attached")
        if len(pending) >= self._cap:
            raise CapReached(f"{worker.worker_id} has {len(pending)} commands in flight")
        command_id = self._next_id
        self._next_id += 1
        pending[command_id] = (request, time.monotonic())
        self._hub.send(worker, command_id, request)
        return command_id

    def in_flight(self, worker: Worker) -> int:
        return len(self._in_flight.get(worker, ()))

    def has_in_flight(self, kind: type[Message]) -> bool:
        """Return whether any worker has a command of this kind."""
        return self.has_matching(lambda request: isinstance(request, kind))

    def has_matching(self, holds: Callable[[Message], bool]) -> bool:
        """Return whether a condition holds for any command in flight."""
        return any(
            holds(request)
            for pending in self._in_flight.values()
            for request, _ in pending.values()
        )

    def waiting(self, kind: type[Message]) -> dict[Worker, tuple[int, float]]:
        """Return number and age of commands in flight, by worker."""
        now, found = time.monotonic(), {}
        for worker, pending in self._in_flight.items():
            sent = [when for request, when in pending.values() if isinstance(request, kind)]
            if sent:
                found[worker] = len(sent), now - min(sent)
        return found

    def asked(self, event: WorkerReplied) -> Message | None:
        """Return the command in flight that this reply answers."""
        asked = self._in_flight.get(event.worker, {}).get(event.reply.id)
        return None if asked is None else asked[0]

    def complete(self, event: HubEvent) -> list[Completed]:
        """Return the completions caused by an event of the hub."""
        if isinstance(event, WorkerJoined):
            self._in_flight[event.worker] = {}
        elif isinstance(event, WorkerReplied):
            return self._replied(event.worker, event.reply)
        elif isinstance(event, WorkerLeft):
            lost = attach_pb2.Failure(message=f"{event.worker.worker_id} left: {event.reason}")
            return [
                Completed(event.worker, command_id, request, None, event.failure or lost, True)
                for command_id, (request, _) in self._in_flight.pop(event.worker, {}).items()
            ]
        return []

    def _replied(self, worker: Worker, reply: attach_pb2.Reply) -> list[Completed]:
        pending = self._in_flight.get(worker, {})
        asked = pending.get(reply.id)
        if asked is None:
            return []  # a duplicate, or a reply to nothing
        request, since = asked
        if reply.last:
            del pending[reply.id]
            if (latency := self._latencies.get(type(request))) is not None:
                latency.observe(time.monotonic() - since)
        failure = reply.failure if reply.HasField("failure") else None
        body = None if failure else reply.body
        return [Completed(worker, reply.id, request, body, failure, reply.last)]
