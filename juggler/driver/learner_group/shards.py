"""The shards of a LearnerGroup: learner processes, what they say, and how they are replaced."""

from __future__ import annotations

import atexit
import secrets
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf import any_pb2

from juggler.driver.learner_group.results import LearnerGroupError
from juggler.driver.learner_group.shard import Job, Shard
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.learner.process.program import LEARNER
from juggler.learner.process.setup import LearnerSetup
from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.hub import Hub, HubSettings
from juggler.runtime.actors.hub_events import HubEvent, Joined, Left, Replied, Worker
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.requests import RequestPool
from juggler.runtime.actors.setups import to_json
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.streams.permits import Permits
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

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
        links: shards by number.
        permits: for batches.
        over: why nothing is done any more; "" as long as something is.
    """

    def __init__(
        self,
        hang_seconds: float,
        updates_in_flight: int,
        set_up: Callable[[int], list[Job]],
        lost: Callable[[int], str],
    ) -> None:
        """To be called in a thread that outlives the processes: they die with it.

        Args:
            hang_seconds: a shard that makes no progress for so long is killed.
            updates_in_flight: updates that a shard may have unfinished.
            set_up: gives the jobs that make of a shard's new process what the one before was.
            lost: called when a process has died; says for people what that means.
        """
        self.changed = threading.Condition()
        self.links: dict[int, Shard] = {}
        self.permits = Permits.new()
        self.over = ""
        self._updates_in_flight = updates_in_flight
        self._set_up = set_up
        self._lost = lost
        self._events: Mailbox[HubEvent | Exited | _Settled] = Mailbox()
        self._ended: deque[tuple[Job, Any]] = deque()  # and nobody has been told
        self._closed = False
        self._token, self._run_id = secrets.token_hex(16), secrets.token_hex(6)
        self._local = LocalWorkers(self._events, self._run_id, self._token, b"")
        settings = HubSettings(
            run_id=self._run_id, roles=(LEARNER,), token=self._token, hang_seconds=hang_seconds
        )
        self._hub = Hub(settings, self._events)
        self._pool = RequestPool(self._hub, cap=1 << 16)
        try:
            self._hub.start([self._local.driver_address])
        except BaseException:
            self._local.close(grace=0.0)
            self._hub.close()
            raise
        self._thread = threading.Thread(target=self._run, name="learner group", daemon=True)
        self._thread.start()
        # multiprocessing waits for processes of a script that ends without having closed them.
        atexit.register(self.close, at_once=True)

    def start(self, number: int, device: str) -> Shard:
        """A new shard; its process is on the way."""
        shard = self.links[number] = Shard(number, device, self._pool, self._job_ended)
        self._local.start_learner(number)
        return shard

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
        """A shard has done what it is for: its failures count from zero again."""
        self._local.of_use(self.links[number].worker_id)

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
            for shard in self.links.values():
                if shard.worker is not None:
                    with suppress(KeyError):  # it has just left
                        self._pool.submit(shard.worker, attach_pb2.Stop())
            self.changed.notify_all()
        self._events.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._local.close(0.0 if at_once else _LEAVE_SECONDS)
        self._hub.close()
        with self.changed:
            for shard in self.links.values():
                shard.end("The learner group is closed.")
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
                for shard in self.links.values():
                    shard.end(f"{self.over}.")
                self.changed.notify_all()
            self._tell()
            raise

    def _on(self, event: HubEvent | Exited | _Settled) -> None:
        if isinstance(event, _Settled):
            return self.links[event.shard].settled(event.batch_id, event.reason, event.explanation)
        if isinstance(event, Exited):
            shard = self.links[int(event.worker_id.rpartition("-")[2])]
            if shard.exited(event):
                self._end(shard)
            return
        shard = self.links[event.worker.index]
        answers = self._pool.complete(event)
        if isinstance(event, Joined):
            if shard.worker is not None:
                self._end(shard)
            self._joined(shard, event.worker)
        elif isinstance(event, Replied):
            for answer in answers:
                shard.hear(answer)
            if shard.broken:
                self._hub.dismiss(event.worker, shard.broken)
        elif isinstance(event, Left) and event.worker is shard.worker:
            # It may hang, and must not stay at a post that a successor has to fill.
            after = _FAREWELL_SECONDS if event.farewell else 0.0
            self._local.kill(shard.worker_id, event.worker.pid, after, abort=False)
            if shard.left(event):
                self._end(shard)

    def _joined(self, shard: Shard, worker: Worker) -> None:
        setup = LearnerSetup(
            device=shard.device,
            updates_in_flight=self._updates_in_flight,
            may_meet=False,
            outlives_failures=True,
        )
        command = training_pb2.Setup(config=to_json(setup), permits_key=self.permits.key)
        sender = EpisodeSender(
            worker.data_addresses[0],
            call_metadata(self._token, self._run_id, worker.incarnation),
            partial(self.settled, shard.number),
            inline=partial(warnings.warn, category=RuntimeWarning, stacklevel=2),
        )
        jobs = [Job("", f"setup of {worker.worker_id}", [command]), *self._set_up(shard.number)]
        shard.joined(worker, sender, jobs)

    def _end(self, shard: Shard) -> None:
        shard.end(self._lost(shard.number))

    def _job_ended(self, job: Job, outcome: list[any_pb2.Any] | LearnerGroupError) -> None:
        value: Any = outcome
        if not isinstance(outcome, LearnerGroupError):
            try:
                value = job.then(outcome)
            except ValueError as error:
                value = LearnerGroupError(f"{job.what}: the shard answered with {error}")
        self._ended.append((job, value))

    def _tell(self) -> None:
        """Tell those who wait; without `changed`, as it is their code that may run here."""
        while self._ended:
            job, value = self._ended.popleft()
            if isinstance(value, LearnerGroupError):
                job.ended.set_exception(value)
            else:
                job.ended.set_result(value)
