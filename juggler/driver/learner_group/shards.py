"""The shards of a LearnerGroup: what they are asked for, what they say, and when they die."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf import any_pb2

from juggler.driver.learner_group.shard_link import Job, ShardLink
from juggler.driver.learner_group.shard_processes import ShardProcesses
from juggler.driver.learner_group.update import LearnerGroupError
from juggler.runtime.actors.hub_events import HubEvent, Joined, Left, Replied
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.wire.v1 import attach_pb2

_LEAVE_SECONDS = 0.5
_FAREWELL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Settled:
    """A batch has arrived at a shard, or will not."""

    shard: int
    batch_id: int
    reason: str
    explanation: str


class Shards:
    """Shards by number. A thread hears what they say, and tells those who wait for it.

    Attributes:
        changed: to be held wherever something here is read or asked for; notified whenever a shard
            has said something.
        links: by number.
        over: why nothing is done any more; "" as long as it is.
    """

    def __init__(
        self,
        hang_seconds: float,
        set_up: Callable[[int], list[Job]],
        lost: Callable[[int], str],
    ) -> None:
        """Args:
        hang_seconds: a shard that makes no progress for so long is killed.
        set_up: what makes of a shard's new process what the one before was.
        lost: called when a process has died; says for people what that means.
        """
        self.changed = threading.Condition()
        self.links: dict[int, ShardLink] = {}
        self._set_up = set_up
        self._lost = lost
        self._events: Mailbox[HubEvent | Exited | _Settled] = Mailbox()
        self._ended: deque[tuple[Job, Any]] = deque()  # and nobody has been told
        self.over = ""
        self._closed = False
        self._processes = ShardProcesses(self._events, hang_seconds)
        self._thread = threading.Thread(target=self._run, name="learner group", daemon=True)
        self._thread.start()
        # multiprocessing waits for processes of a script that ends without having closed them.
        atexit.register(self.close, at_once=True)

    def start(self, number: int, device: str) -> ShardLink:
        """A new shard; its process is on the way."""
        link = ShardLink(
            number,
            device,
            self._processes.pool,
            self._processes.run,
            partial(self.settled, number),
            self._job_ended,
        )
        self.links[number] = link
        self._processes.start(number)
        return link

    def put(self, number: int, job: Job) -> None:
        """Have a shard do this, behind what it was asked for before."""
        self.links[number].put(job)
        self._events.wake()

    def must_run(self) -> None:
        """Raises:
        RuntimeError: all of it is over.
        """
        if self.over:
            raise RuntimeError(self.over)

    def settled(self, shard: int, batch_id: int, reason: str, explanation: str) -> None:
        """What became of a batch; from any thread."""
        self._events.put(_Settled(shard, batch_id, reason, explanation))

    def of_use(self, number: int) -> None:
        """A shard has done what it is for."""
        self._processes.of_use(self.links[number].worker_id)

    def wait_until_idle(self) -> None:
        """Until all that was asked for is done; to be called with `changed` held."""
        self.changed.wait_for(lambda: self.over or all(x.idle for x in self.links.values()))

    def close(self, *, at_once: bool) -> None:
        """End the processes; whatever they were still asked for has failed. Idempotent."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            self.over = self.over or "the learner group is closed"
            for link in self.links.values():
                if link.worker is not None:
                    with suppress(KeyError):  # it has just left
                        self._processes.pool.submit(link.worker, attach_pb2.Stop())
            self.changed.notify_all()
        self._events.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._processes.close(0.0 if at_once else _LEAVE_SECONDS)
        with self.changed:
            for link in self.links.values():
                link.end("The learner group is closed.")
        self._tell()
        atexit.unregister(self.close)

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.over:
                events = self._events.gather(timeout=3600.0)
                with self.changed:
                    for event in events:
                        self._on(event)
                    self.changed.notify_all()
                self._tell()
        except BaseException as error:
            with self.changed:
                self.over = f"the learner group broke: {error!r}"
                for link in self.links.values():
                    link.end(f"{self.over}.")
                self.changed.notify_all()
            self._tell()
            raise

    def _on(self, event: HubEvent | Exited | _Settled) -> None:
        if isinstance(event, _Settled):
            return self.links[event.shard].settled(event.batch_id, event.reason, event.explanation)
        if isinstance(event, Exited):
            link = self.links[int(event.worker_id.rpartition("-")[2])]
            if link.exited(event):
                self._end(link)
            return
        link = self.links[event.worker.index]
        answers = self._processes.pool.complete(event)
        if isinstance(event, Joined):
            if link.worker is not None:
                self._end(link)
            link.joined(event.worker, self._set_up(link.number))
        elif isinstance(event, Replied):
            for answer in answers:
                link.hear(answer)
            if link.broken:
                self._processes.hub.dismiss(event.worker, link.broken)
        elif isinstance(event, Left) and event.worker is link.worker:
            # It may hang, and must not stay at a post that a successor has to fill.
            after = _FAREWELL_SECONDS if event.farewell else 0.0
            self._processes.kill(link.worker_id, event.worker.pid, after)
            if link.left(event):
                self._end(link)

    def _end(self, link: ShardLink) -> None:
        link.end(self._lost(link.number))

    def _job_ended(self, job: Job, outcome: list[any_pb2.Any] | LearnerGroupError) -> None:
        value: Any = outcome
        if not isinstance(outcome, LearnerGroupError):
            try:
                value = job.then(outcome)
            except ValueError as error:
                value = LearnerGroupError(f"{job.what}: the shard answered with {error}")
        self._ended.append((job, value))

    def _tell(self) -> None:
        """Those who wait; without `changed`, as it is their code that may run here."""
        while self._ended:
            job, value = self._ended.popleft()
            if isinstance(value, LearnerGroupError):
                job.ended.set_exception(value)
            else:
                job.ended.set_result(value)
