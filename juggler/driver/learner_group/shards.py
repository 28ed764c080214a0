"""Shards: the learner processes of a LearnerGroup, each with its jobs in order."""

from __future__ import annotations

import atexit
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

from google.protobuf import any_pb2
from google.protobuf.message import Message

from juggler.driver.workers.local_workers import LocalWorkers
from juggler.learner.process.program import LEARNER, LearnerSetup
from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.hub import Hub, HubSettings
from juggler.runtime.actors.hub_events import HubEvent, Joined, Left, Replied, Worker
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.requests import Completed, RequestPool
from juggler.runtime.actors.setups import to_json
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.streams.permits import Permits
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

T = TypeVar("T")


class LearnerGroupError(RuntimeError):
    """Failure of a shard; `traceback` is its own, or ""."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(f"{message}\n{traceback}".rstrip())
        self.traceback = traceback


class ShardLost(LearnerGroupError):
    """Loss of a shard's process, which is started again unless the message says otherwise."""


@dataclass(eq=False, slots=True)
class Job:
    """Commands for a shard; `then` makes the result of the bodies of all replies."""

    what: str  # begins errors
    commands: Sequence[Message]
    then: Callable[[list[any_pb2.Any]], Any]
    batch_ids: set[int]  # of batches that have not arrived yet
    refused: str = ""  # why a batch was
    unanswered: int | None = None  # number of commands; None: they are not sent yet
    bodies: list[any_pb2.Any] = field(default_factory=list)
    failure: attach_pb2.Failure | None = None
    ended: Future[Any] = field(default_factory=Future)

    def fail(self, message: str, traceback: str, kind: type[LearnerGroupError]) -> None:
        self.ended.set_exception(kind(f"{self.what}: {message}", traceback))


@dataclass(eq=False, slots=True)
class Shard:
    """A learner process, the successors that take its place, and their jobs in order."""

    number: int
    device: str
    worker: Worker | None = None
    sender: EpisodeSender | None = None
    jobs: deque[Job] = field(default_factory=deque)
    asked: dict[int, Job] = field(default_factory=dict)  # by command id
    setting_up: set[int] = field(default_factory=set)  # ids of commands
    updates: list[list[Future[Any]]] = field(default_factory=list)  # that may be unfinished
    left: Left | None = None
    exited: Exited | None = None
    lost: str = ""  # how the last process was
    down: bool = False  # for good

    @property
    def set_up(self) -> bool:
        """Whether its process has all modules that it should have."""
        return self.worker is not None and self.left is None and not self.setting_up


class Shards:
    """Starts learner processes, and starts a lost one again with its modules."""

    def __init__(self, hang_seconds: float, updates_in_flight: int) -> None:
        self._changed = threading.Condition()  # guards everything; notified after each event
        self._over = ""  # why no job is accepted any more
        self._closed = False
        self._shards: list[Shard] = []
        self._permits = Permits.new()
        self._updates_in_flight = updates_in_flight
        self._events: Mailbox[HubEvent | Exited | tuple[int, int, str]] = Mailbox()
        self._token, self._run_id = secrets.token_hex(16), secrets.token_hex(6)
        self._local = LocalWorkers(self._events, self._run_id, self._token, b"")
        settings = HubSettings(
            run_id=self._run_id, roles=(LEARNER,), token=self._token, hang_seconds=hang_seconds
        )
        self._hub = Hub(settings, self._events)
        self._pool = RequestPool(self._hub, cap=1 << 16)
        self._thread = threading.Thread(target=self._run, name="learner group", daemon=True)
        # multiprocessing waits for processes of a script that ends without having closed them.
        atexit.register(self._close)
        try:
            self._hub.start([self._local.driver_address])
            self._thread.start()
        except BaseException:
            self._close()
            raise

    def _set_up_again(self, shard: int) -> list[Message]:
        """Return the commands that give a new process the modules of the lost one."""
        raise NotImplementedError

    def _consequences(self, shard: int) -> list[str]:
        """Return what the loss of a process means for its modules, in sentences."""
        raise NotImplementedError

    def _start(self, device: str) -> Shard:
        shard = Shard(len(self._shards), device)
        self._shards.append(shard)
        self._local.start_learner(shard.number)
        return shard

    def _put(
        self,
        number: int,
        what: str,
        commands: Sequence[Message],
        then: Callable[[list[any_pb2.Any]], T],
        batch_ids: Iterable[int] = (),
    ) -> Future[T]:
        """Append a job to a shard's; see `Job`."""
        shard, job = self._shards[number], Job(what, commands, then, set(batch_ids))
        if shard.down:
            job.fail(shard.lost, "", ShardLost)
        else:
            shard.jobs.append(job)
            self._send(shard)
        return job.ended

    def _send(self, shard: Shard) -> None:
        """Send commands in order, and none ahead of a job whose batches are on their way."""
        if shard.worker is None or shard.left is not None:
            return
        for job in shard.jobs:
            if job.batch_ids:
                return
            if job.unanswered is not None:
                continue
            update = job.commands[0]
            if job.refused and isinstance(update, training_pb2.Update):
                ids = update.batch_ids
                job.commands = [training_pb2.Discard(module_id=update.module_id, batch_ids=ids)]
            for command in job.commands:
                shard.asked[self._pool.submit(shard.worker, command)] = job
            job.unanswered = len(job.commands)

    def _settled(self, number: int, batch_id: int, reason: str, explanation: str) -> None:
        """Report what became of a batch, from any thread."""
        self._events.put((number, batch_id, explanation if reason else ""))

    def _has_room(self, number: int) -> bool:
        """Whether an update of this shard need not wait, or fails at once."""
        shard = self._shards[number]
        shard.updates = [each for each in shard.updates if not all(x.done() for x in each)]
        ready = shard.set_up and len(shard.updates) < self._updates_in_flight
        return ready or shard.down

    def _must_run(self) -> None:
        if self._over:
            raise RuntimeError(self._over)

    def close(self) -> None:
        """Wait for all jobs, and end the processes."""
        try:
            with self._changed:
                self._changed.wait_for(lambda: not any(shard.jobs for shard in self._shards))
        finally:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        (self.close if kind is None else self._close)()

    def _close(self) -> None:
        """End the processes at once. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._over = self._over or "the learner group is closed"
            for shard in self._shards:
                with suppress(KeyError):  # it has just left
                    if shard.worker is not None:
                        self._pool.submit(shard.worker, attach_pb2.Stop())
        self._events.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._local.close(grace=0.5)
        self._hub.close()
        atexit.unregister(self._close)

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over:
                events = self._events.gather(timeout=3600.0)
                with self._changed:
                    for event in events:
                        self._on(event)
                    self._changed.notify_all()
        except BaseException as error:
            self._over = f"the learner group broke: {error!r}"
            raise
        finally:
            with self._changed:
                for shard in self._shards:
                    shard.down = True
                    self._end(shard, self._over)
                self._changed.notify_all()

    def _on(self, event: HubEvent | Exited | tuple[int, int, str]) -> None:
        if isinstance(event, tuple):
            number, batch_id, why = event
            shard = self._shards[number]
            for job in shard.jobs:
                if batch_id in job.batch_ids:
                    job.batch_ids.remove(batch_id)
                    job.refused = job.refused or why
        elif isinstance(event, Exited):
            shard = self._shards[int(event.worker_id.rpartition("-")[2])]
            shard.exited = event
        else:
            shard = self._shards[event.worker.index]
            replies = self._pool.complete(event)
            if isinstance(event, Joined):
                self._joined(shard, event.worker)
            elif isinstance(event, Replied):
                for reply in replies:
                    self._replied(shard, reply)
            elif isinstance(event, Left):
                shard.left = event
                # It may hang, and its place is needed.
                after = 5.0 if event.farewell else 0.0
                self._local.kill(event.worker.worker_id, event.worker.pid, after, abort=False)
        if shard.exited is not None and (shard.worker is None or shard.left is not None):
            self._lost(shard, shard.exited)
        self._send(shard)

    def _joined(self, shard: Shard, worker: Worker) -> None:
        setup = LearnerSetup(
            device=shard.device,
            updates_in_flight=self._updates_in_flight,
            may_meet=False,
            outlives_failures=True,
        )
        commands: list[Message] = [
            training_pb2.Setup(config=to_json(setup), permits_key=self._permits.key),
            *self._set_up_again(shard.number),
        ]
        shard.worker = worker
        shard.sender = EpisodeSender(
            worker.data_addresses[0],
            call_metadata(self._token, self._run_id, worker.incarnation),
            partial(self._settled, shard.number),
        )
        shard.setting_up = {self._pool.submit(worker, each) for each in commands}

    def _replied(self, shard: Shard, reply: Completed) -> None:
        if reply.command_id in shard.setting_up:
            shard.setting_up.remove(reply.command_id)
            if reply.failure is not None:
                self._hub.dismiss(reply.worker, reply.failure.message)
            return
        job = shard.asked.get(reply.command_id)
        if job is None or job.unanswered is None:  # a reply to Stop
            return
        job.failure = job.failure or reply.failure
        if reply.body is not None:
            job.bodies.append(reply.body)
        if reply.last:
            del shard.asked[reply.command_id]
            job.unanswered -= 1
        if job.unanswered:
            return
        failure = job.failure or attach_pb2.Failure(message=job.refused)
        result = None if failure.message else job.then(job.bodies)
        shard.jobs.remove(job)
        if failure.message:
            job.fail(failure.message, failure.traceback, LearnerGroupError)
        else:
            job.ended.set_result(result)

    def _lost(self, shard: Shard, exited: Exited) -> None:
        how, traceback = exited.how, ""
        if shard.left is not None and shard.left.failure is not None:
            how, traceback = shard.left.failure.message, shard.left.failure.traceback
        elif shard.left is not None and shard.left.reason.startswith(("hung", "no heartbeat")):
            how = shard.left.reason
        shard.down = exited.restart_in is None
        words = [f"{exited.worker_id} on {shard.device} was lost: {how}."]
        words += self._consequences(shard.number)
        if shard.down:
            words.append("It has died too often, and stays down")
        self._end(shard, " ".join(words), traceback)

    def _end(self, shard: Shard, why: str, traceback: str = "") -> None:
        """Fail all jobs of a process that is gone."""
        if shard.sender is not None:
            shard.sender.close()
        shard.lost = why
        shard.worker = shard.sender = shard.left = shard.exited = None
        jobs, shard.jobs = shard.jobs, deque()
        shard.asked, shard.setting_up = {}, set()
        for job in jobs:
            job.fail(why, traceback, ShardLost)
