"""A shard: a learner process as its group sees it, with what it was asked for in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import any_pb2
from google.protobuf.message import Message

from juggler.driver.learner_group.results import LearnerGroupError, ShardLost, UpdateHandle
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.hub_events import Left, Worker
from juggler.runtime.actors.requests import Completed, RequestPool
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


def _nothing(_: Sequence[any_pb2.Any]) -> None:
    """That it is done is all there is to know."""


@dataclass(eq=False, slots=True)
class Job:
    """Something that a shard is asked for.

    Attributes:
        module_id: of the module that it is about; "" where it is about all of them.
        what: for people; an error about the job begins with it.
        requests: what it consists of; it has failed if one of them has.
        then: what to make of the bodies of all replies.
        ended: gets that, or what went wrong.
        update: the update that it is a share of, if it is one.
        unsettled: batches that it needs, and that have not arrived.
        arrived: batches that have.
        refused: why a batch of it was refused; "" where none was.
        in_flight: command ids without their last answer; None: nothing has been sent.
        bodies: of the replies so far.
        failure: of the first request that failed.
    """

    module_id: str
    what: str
    requests: Sequence[Message]
    then: Callable[[Sequence[any_pb2.Any]], Any] = _nothing
    ended: Future[Any] = field(default_factory=Future)
    update: UpdateHandle | None = None
    unsettled: set[int] = field(default_factory=set)
    arrived: list[int] = field(default_factory=list)
    refused: str = ""
    in_flight: set[int] | None = None
    bodies: list[any_pb2.Any] = field(default_factory=list)
    failure: attach_pb2.Failure | None = None


class Shard:
    """The queue of one learner process, which outlives the process. Not for several threads at
    once.

    Attributes:
        worker: the process that is attached; None: there is none.
        sender: takes batches to it; None: there is no process.
        down: why there will be no process any more; "" where there will.
        lost: how the last process ended, if one has.
        broken: why the process cannot become what its predecessor was, if so.
    """

    def __init__(
        self,
        number: int,
        device: str,
        pool: RequestPool,
        ended: Callable[[Job, list[any_pb2.Any] | LearnerGroupError], None],
    ) -> None:
        """Args:
        number: of the shard.
        device: where it computes.
        pool: the commands in flight of all shards.
        ended: called once for each job.
        """
        self.number = number
        self.device = device
        self.worker: Worker | None = None
        self.sender: EpisodeSender | None = None
        self.down = ""
        self.lost = ""
        self.broken = ""
        self._pool = pool
        self._ended = ended
        self._jobs: deque[Job] = deque()
        self._setting_up: list[Job] = []
        self._left: Left | None = None
        self._exited: Exited | None = None

    @property
    def worker_id(self) -> str:
        return f"{LEARNER}-{self.number}"

    @property
    def set_up(self) -> bool:
        """Whether it has the modules that it should have."""
        return self.worker is not None and self._left is None and not self._setting_up

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def updates(self) -> int:
        """Updates in flight: those with a share that has not ended here."""
        return len({id(job.update) for job in self._jobs if job.update is not None})

    def put(self, job: Job) -> None:
        """Have it done behind what was asked for before."""
        if self.down:
            return self._ended(job, ShardLost(f"{job.what}: {self.down}"))
        self._jobs.append(job)
        self._send()

    def settled(self, batch_id: int, reason: str, explanation: str) -> None:
        """A batch has arrived, or will not; as an `EpisodeSender` says it."""
        for job in self._jobs:
            if batch_id in job.unsettled:
                job.unsettled.discard(batch_id)
                if not reason:
                    job.arrived.append(batch_id)
                elif reason == "refused":
                    job.refused = job.refused or explanation
                else:
                    job.refused = job.refused or f"its episodes did not arrive: {explanation}"
        self._send()

    def hear(self, completed: Completed) -> None:
        """Take an answer."""
        job = next((x for x in self._jobs if completed.command_id in (x.in_flight or ())), None)
        if job is None or job.in_flight is None:
            return
        if completed.failure is not None:
            job.failure = job.failure or completed.failure
        elif completed.body is not None:
            job.bodies.append(completed.body)
        if completed.last:
            job.in_flight.discard(completed.command_id)
        if not job.in_flight:
            self._finish(job)

    def joined(self, worker: Worker, sender: EpisodeSender, jobs: Iterable[Job]) -> None:
        """A process is there; these jobs give it the modules of its predecessor."""
        self.worker, self.sender = worker, sender
        self._left = self._exited = None
        self.broken = ""
        self._setting_up = list(jobs)
        self._jobs.extendleft(reversed(self._setting_up))
        self._send()

    def left(self, event: Left) -> bool:
        """Its stream is over. Returns whether all is known of how it ended."""
        if event.worker is self.worker:
            self._left = event
        return self._exited is not None

    def exited(self, event: Exited) -> bool:
        """Its process is over. Returns as `left`."""
        self._exited = event
        return self.worker is None or self._left is not None or event.pid != self.worker.pid

    def end(self, more: str) -> None:
        """The process is gone, and all it was asked for.

        Args:
            more: what that means, in sentences for people.
        """
        words, traceback = self._last_words()
        if self.sender is not None:
            self.sender.close()
        self.worker = self.sender = self._left = None
        self.lost = f"{self.worker_id} on {self.device} was lost: {words}. {more}".rstrip()
        if self._exited is not None and self._exited.restart_in is None:
            self.down = f"{self.lost} It has died too often, and stays down"
        jobs, self._jobs, self._setting_up = self._jobs, deque(), []
        for job in jobs:
            text = f"{job.what}: {self.down or self.lost}"
            self._ended(job, ShardLost(f"{text}\n{traceback}".rstrip(), traceback))

    def _last_words(self) -> tuple[str, str]:
        """(how it ended, its own traceback or "")."""
        if self._left is not None and self._left.failure is not None:
            return self._left.failure.message, self._left.failure.traceback
        how = self._exited.how if self._exited is not None else ""
        if self._left is not None and self._left.reason.startswith(("hung", "no heartbeat")):
            return self._left.reason, ""
        return how or (self._left.reason if self._left is not None else "it is gone"), ""

    def _send(self) -> None:
        """Send what may go: in order, and nothing ahead of batches that are on their way."""
        if self.worker is None or self._left is not None:
            return
        for job in self._jobs:
            if job.unsettled:
                return
            if job.in_flight is None:
                requests = job.requests
                if job.refused:
                    discard = training_pb2.Discard(module_id=job.module_id, batch_ids=job.arrived)
                    requests = [discard]
                job.in_flight = {self._pool.submit(self.worker, each) for each in requests}

    def _finish(self, job: Job) -> None:
        self._jobs.remove(job)
        if job in self._setting_up:
            self._setting_up.remove(job)
            if job.failure is not None:
                self.broken = f"{job.what}: {job.failure.message}"
        if job.refused:
            self._ended(job, LearnerGroupError(f"{job.what}: {job.refused}"))
        elif job.failure is not None:
            self._ended(job, LearnerGroupError.of(job.what, job.failure))
        else:
            self._ended(job, job.bodies)
