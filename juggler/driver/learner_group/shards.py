"""Shards: the learner processes of a LearnerGroup, each with its jobs in order."""

from __future__ import annotations

import atexit
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from juggler.runtime.actors.hub_events import HubEvent, Joined, Left, Worker
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
        self.message, self.traceback = message, traceback


class ShardLost(LearnerGroupError):
    """Loss of a shard's process, which is started again unless the message says otherwise."""


@dataclass(eq=False, slots=True)
class Shard:
    """A learner process, the successors that take its place, and their jobs."""

    number: int
    device: str
    jobs: ThreadPoolExecutor
    worker: Worker | None = None
    sender: EpisodeSender | None = None
    setting_up: set[int] = field(default_factory=set)  # ids of commands
    arrived: dict[int, str] = field(default_factory=dict)  # batch id -> why it was refused, or ""
    updates: list[list[Future[Any]]] = field(default_factory=list)  # that may be unfinished
    left: Left | None = None
    exited: Exited | None = None
    losses: int = 0
    lost: ShardLost = field(default_factory=lambda: ShardLost("it is closed"))  # the last loss
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
        self._replies: dict[int, list[Completed]] = {}  # by command id
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

    def _consequences(self, shard: int) -> str:
        """Return what the loss of a process means for its modules."""
        raise NotImplementedError

    def _start(self, device: str) -> Shard:
        number = len(self._shards)
        shard = Shard(number, device, ThreadPoolExecutor(1, f"shard {number}"))
        self._shards.append(shard)
        self._local.start_learner(number)
        return shard

    def _put(
        self,
        number: int,
        what: str,
        commands: Sequence[Message],
        then: Callable[[list[any_pb2.Any]], T],
        batch_ids: Collection[int] = (),
    ) -> Future[T]:
        """Append a job, which waits for its batches, sends its commands and awaits the replies.

        Args:
            number: of the shard.
            what: names the job in errors.
            commands: of the job; it fails if one of them does.
            then: makes the result of the bodies of all replies.
            batch_ids: batches that the commands need.
        """
        shard = self._shards[number]
        losses = shard.losses

        def job() -> T:
            with self._changed:
                try:
                    return then(self._asked(shard, losses, commands, batch_ids))
                except LearnerGroupError as error:
                    raise type(error)(f"{what}: {error.message}", error.traceback) from None

        future = shard.jobs.submit(job)
        future.add_done_callback(self._notify)
        return future

    def _asked(
        self, shard: Shard, losses: int, commands: Sequence[Message], batch_ids: Collection[int]
    ) -> list[any_pb2.Any]:
        def gone() -> bool:
            return shard.losses > losses or shard.down

        def wait_for(ready: Callable[[], bool]) -> None:
            self._changed.wait_for(lambda: gone() or ready())
            if gone():
                raise shard.lost

        wait_for(lambda: shard.set_up)
        wait_for(lambda: shard.arrived.keys() >= set(batch_ids))
        refused = [why for batch_id in batch_ids if (why := shard.arrived.pop(batch_id))]
        if refused and isinstance(update := commands[0], training_pb2.Update):
            discard = training_pb2.Discard(module_id=update.module_id, batch_ids=update.batch_ids)
            commands = [discard]
        assert shard.worker is not None
        replies: list[Completed] = []
        for command in commands:
            self._replies[self._pool.submit(shard.worker, command)] = replies
        self._changed.wait_for(lambda: sum(each.last for each in replies) == len(commands))
        failure = next((each.failure for each in replies if each.failure is not None), None)
        if failure is not None:
            if shard.left is not None:
                self._changed.wait_for(gone)
            if gone():
                raise shard.lost
            raise LearnerGroupError(failure.message, failure.traceback)
        if refused:
            raise LearnerGroupError(refused[0])
        return [each.body for each in replies if each.body is not None]

    def _settled(self, number: int, batch_id: int, reason: str, explanation: str) -> None:
        """Report what became of a batch, from any thread."""
        self._events.put((number, batch_id, explanation if reason else ""))

    def _has_room(self, number: int) -> bool:
        """Whether an update of this shard need not wait, or fails at once."""
        shard = self._shards[number]
        shard.updates = [each for each in shard.updates if not all(x.done() for x in each)]
        ready = shard.set_up and len(shard.updates) < self._updates_in_flight
        return ready or shard.down

    def _notify(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def _must_run(self) -> None:
        """
        Raises:
            RuntimeError: the group is closed, or broke.
        """
        if self._over:
            raise RuntimeError(self._over)

    def close(self) -> None:
        """Wait for all jobs, and end the processes."""
        try:
            for idle in [shard.jobs.submit(int) for shard in self._shards]:
                idle.result()
        finally:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._close()

    def _close(self) -> None:
        with self._changed:
            self._over = self._over or "the learner group is closed"
            for shard in self._shards:
                with suppress(KeyError):  # it has just left
                    if shard.worker is not None:
                        self._pool.submit(shard.worker, attach_pb2.Stop())
        self._events.wake()
        if self._thread.is_alive():
            self._thread.join()
        for shard in self._shards:
            shard.jobs.shutdown(wait=False)
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
                    shard.lost, shard.down = ShardLost(self._over), True
                self._changed.notify_all()

    def _on(self, event: HubEvent | Exited | tuple[int, int, str]) -> None:
        if isinstance(event, tuple):
            number, batch_id, why = event
            self._shards[number].arrived[batch_id] = why
            return
        if isinstance(event, Exited):
            shard = self._shards[int(event.worker_id.rpartition("-")[2])]
            shard.exited = event
        else:
            shard = self._shards[event.worker.index]
            for reply in self._pool.complete(event):
                self._replied(shard, reply)
        if isinstance(event, Joined):
            self._joined(shard, event.worker)
        elif isinstance(event, Left):
            shard.left = event
            # It may hang, and its place is needed.
            after = 5.0 if event.farewell else 0.0
            self._local.kill(event.worker.worker_id, event.worker.pid, after, abort=False)
        if shard.exited is not None and (shard.worker is None or shard.left is not None):
            self._ended(shard, shard.exited)

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
        if reply.command_id in self._replies:
            self._replies[reply.command_id].append(reply)
            if reply.last:
                del self._replies[reply.command_id]
        elif reply.command_id in shard.setting_up:
            shard.setting_up.remove(reply.command_id)
            if reply.failure is not None and reply.worker is shard.worker:
                self._hub.dismiss(reply.worker, reply.failure.message)

    def _ended(self, shard: Shard, exited: Exited) -> None:
        how, traceback = exited.how, ""
        if shard.left is not None and shard.left.failure is not None:
            how, traceback = shard.left.failure.message, shard.left.failure.traceback
        elif shard.left is not None and shard.left.reason.startswith(("hung", "no heartbeat")):
            how = shard.left.reason
        text = f"{exited.worker_id} on {shard.device} was lost: {how}."
        text = f"{text} {self._consequences(shard.number)}".rstrip()
        if shard.sender is not None:
            shard.sender.close()
        shard.down = exited.restart_in is None
        shard.lost = ShardLost(f"{text} It stays down" if shard.down else text, traceback)
        shard.losses += 1
        shard.worker = shard.sender = shard.left = shard.exited = None
        shard.setting_up, shard.arrived = set(), {}
