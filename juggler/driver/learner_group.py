"""LearnerGroup: many modules, each with its own algorithm, over shards of devices."""

from __future__ import annotations

import atexit
import itertools
import json
import secrets
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeVar, Unpack, cast, overload

import numpy as np
from google.protobuf import any_pb2
from google.protobuf.message import Message

from juggler.driver.checkpoint.snapshots import restores, state_reader
from juggler.driver.config import ConfigError
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.module_setups import LearnerSpec
from juggler.learner.config import Passes, given_passes
from juggler.learner.process.learner_program import AUTO, CPU, LEARNER, LearnerSetup, parse_devices
from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.hub import (
    Hub,
    HubEvent,
    HubSettings,
    Mailbox,
    Worker,
    WorkerJoined,
    WorkerLeft,
    WorkerReplied,
)
from juggler.runtime.actors.requests import Completed, RequestPool
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.actors.worker import to_json, worker_seed
from juggler.runtime.episodes.batch import COLUMNS, EpisodeBatch, batch_of_columns
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.near_matches import nearest
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import attach_pb2, episodes_pb2, training_pb2

T = TypeVar("T")
Episodes = Mapping[str, Sequence[EpisodeBatch]]  # by module id
Columns = Mapping[str, Mapping[str, Any]]  # by name, by module id


class LearnerGroupError(RuntimeError):
    """Failure of a shard; `traceback` is the process's, or ""."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(f"{message}\n{traceback}".rstrip())
        self.traceback = traceback


class ShardLost(LearnerGroupError):
    """A shard lost its process, which is usually restarted."""


Spec = LearnerSpec | Mapping[str, Any]


class ModuleUpdate(NamedTuple):
    """Result of an update of a module."""

    metrics: dict[str, float]
    live_steps: int
    updates: int  # of the module so far


class ModuleState(NamedTuple):
    """State of a module, as `Learner.save` returns it."""

    tree: Mapping[str, Tree]
    extra: Mapping[str, Any]


class ShardPlacement(NamedTuple):
    """Shard and devices of a module."""

    shard: int
    devices: tuple[str, ...]
    share: float
    """Number of GPUs for each module."""


class UpdateFailed(LearnerGroupError):
    """An update that failed for some modules.

    `failures` has the errors by module id, `results` the results of the other modules.
    """

    def __init__(
        self, failures: Mapping[str, BaseException], results: Mapping[str, ModuleUpdate]
    ) -> None:
        super().__init__("\n".join(dict.fromkeys(map(str, failures.values()))))
        self.failures, self.results = dict(failures), dict(results)


class UpdateHandle(dict[str, Future[ModuleUpdate]]):
    """Futures of an update by module id."""

    def done(self) -> bool:
        """Return whether `result` returns at once."""
        return all(part.done() for part in self.values())

    def result(self, timeout: float | None = None) -> dict[str, ModuleUpdate]:
        """Wait for the results by module id.

        Raises:
            TimeoutError: the update is unfinished.
            UpdateFailed: a module could not update.
        """
        if wait(self.values(), timeout).not_done:
            raise TimeoutError(f"the update is unfinished after {timeout} s")
        errors = {module_id: part.exception() for module_id, part in self.items()}
        failures = {module_id: error for module_id, error in errors.items() if error is not None}
        results = {key: part.result() for key, part in self.items() if key not in failures}
        if failures:
            raise UpdateFailed(failures, results)
        return results


@dataclass(slots=True)
class Module:
    shard: int
    command: training_pb2.AddModule
    is_built: bool = False
    kept: ModuleState | None = None  # its newest known state; None: only the seed
    updates: int = 0


@dataclass(eq=False, slots=True)
class Job:
    """Commands for a shard; `then` turns all replies into the result."""

    what: str  # prefix of error messages
    commands: Sequence[Message]
    then: Callable[[list[any_pb2.Any]], Any]
    batch_ids: set[int] = field(default_factory=set)  # of batches that have not arrived yet
    update: int = 0  # number of the update it belongs to; 0: none
    refused: str = ""  # why a batch was refused
    unanswered: set[int] | None = None  # ids of commands; None: not sent yet
    bodies: list[any_pb2.Any] = field(default_factory=list)
    failure: attach_pb2.Failure | None = None
    ended: Future[Any] = field(default_factory=Future)

    def fail(self, message: str, traceback: str, kind: type[LearnerGroupError]) -> None:
        self.ended.set_exception(kind(f"{self.what}: {message}", traceback))


@dataclass(eq=False, slots=True)
class Shard:
    """A learner process, its successors, and their jobs in order."""

    number: int
    device: str
    worker: Worker | None = None
    sender: EpisodeSender | None = None
    jobs: deque[Job] = field(default_factory=deque)
    setup: Job | None = None  # sends the modules to the process
    left: WorkerLeft | None = None
    exited: Exited | None = None
    lost: str = ""  # how the last process was lost
    down: bool = False  # permanently

    @property
    def set_up(self) -> bool:
        """Whether the process has all modules of this shard."""
        return self.setup is not None and self.setup.ended.done() and self.left is None


class LearnerGroup:
    """Trains many modules, each with its own algorithm, learning rate and model.

    Modules are distributed over shards: processes, each with a device. A shard works through its
    jobs in order, and does not wait for other shards. It ends with the thread that started it.
    """

    def __init__(
        self,
        modules: Mapping[str, Spec],
        *,
        devices: str = AUTO,
        seed: int = 0,
        updates_in_flight: int = 2,
        snapshot_updates: int = 100,
        hang_seconds: float = 120.0,
    ) -> None:
        """Start the processes of a group.

        Args:
            modules: by id, a `LearnerSpec` or its fields by name.
            devices: "auto" (all GPUs of this host, or its CPU), "cpu" (a process for each module),
                "cuda:0,cuda:1", or "fake:4", four processes on the CPU in the role of GPUs.
            seed: seed of modules whose specs have none.
            updates_in_flight: maximum number of unfinished updates of a shard.
            snapshot_updates: updates of a module after which its state is fetched. If the process
                is lost, a new one continues from this state.
            hang_seconds: a process without progress for this long is killed and restarted.

        Raises:
            ConfigError: an argument is wrong.
            LearnerGroupError: a shard could not start, or could not build a module.
        """
        for name, value, least in (
            ("updates_in_flight", updates_in_flight, 1),
            ("snapshot_updates", snapshot_updates, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} = {value}: must be at least {least}")
        if not modules:
            raise ConfigError("a learner group needs at least one module")
        try:
            self._devices = parse_devices(devices)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        # The first process replaces auto by all GPUs that it finds.
        if AUTO in self._devices and len(self._devices) > 1:
            raise ConfigError(f"devices = {devices!r}: auto stands alone, for all GPUs")
        self._seed, self._snapshot_updates = seed, snapshot_updates
        self._modules: dict[str, Module] = {}
        self._ids = itertools.count(1)
        # Specs are checked before any process starts.
        commands = [self._command(module_id, spec) for module_id, spec in modules.items()]
        self._changed = threading.Condition()  # guards everything; notified after each event
        self._ended = ""  # why no more jobs are accepted
        self._closed = False
        self._shards: list[Shard] = []
        self._updates_in_flight = updates_in_flight
        self._events: Mailbox[HubEvent | Exited | tuple[int, int, str]] = Mailbox()
        # Other programs of this host do not know the token, and cannot attach.
        self._token, self._run_id = secrets.token_hex(16), secrets.token_hex(6)
        self._local = LocalWorkers(self._events, self._run_id, self._token, b"")
        settings = HubSettings(
            run_id=self._run_id, roles=(LEARNER,), token=self._token, hang_seconds=hang_seconds
        )
        self._hub = Hub(settings, self._events)
        self._pool = RequestPool(self._hub, cap=1 << 16)
        self._thread = threading.Thread(target=self._run, name="learner group", daemon=True)
        # Without this, multiprocessing waits at exit for processes that the script did not close.
        atexit.register(self._close)
        try:
            self._hub.start([self._local.driver_address])
            self._thread.start()
            self._begin(commands)
        except BaseException:
            self._close()
            raise

    def _begin(self, commands: Sequence[training_pb2.AddModule]) -> None:
        """Start shards for these modules, and wait until they are built."""
        with self._changed:
            # Only a learner process imports torch, which knows the devices of this host.
            if self._devices == [AUTO]:
                first = self._start(AUTO)
                self._changed.wait_for(lambda: first.worker or first.lost)
                if first.worker is None:
                    raise ShardLost(first.lost)
                self._devices = list(first.worker.devices)
                first.device = self._devices[0]
            if self._devices == [CPU]:
                self._devices = []
            added = [self._add(command) for command in commands]
        for job in added:
            job.result()

    @overload
    def update_from_episodes(
        self, episodes: Episodes, *, async_update: Literal[False] = False, **passes: Unpack[Passes]
    ) -> dict[str, ModuleUpdate]: ...

    @overload
    def update_from_episodes(
        self, episodes: Episodes, *, async_update: Literal[True], **passes: Unpack[Passes]
    ) -> UpdateHandle: ...

    def update_from_episodes(
        self, episodes: Episodes, *, async_update: bool = False, **passes: Unpack[Passes]
    ) -> dict[str, ModuleUpdate] | UpdateHandle:
        """Update each of these modules, on its own episodes.

        Waits while a shard has `updates_in_flight` unfinished updates; other shards come first.

        Args:
            episodes: batches by module id; copied before this returns.
            async_update: whether to return a handle as soon as all updates are queued.
            passes: `minibatch_size` and `num_epochs`, as for `Learner.update_from_batch`.

        Raises:
            ValueError: there is no such module, or there are no episodes.
            UpdateFailed: a module could not update.
        """
        passes, handle, shares = given_passes(passes), UpdateHandle(), self._shares(episodes)
        while shares:
            with self._changed:
                self._changed.wait_for(lambda: any(map(self._has_room, shares)))
                self._must_run()
                shard = next(filter(self._has_room, shares))
                sender, sent = self._shards[shard].sender, []
                number = next(self._ids)
                # A batch may arrive before `send` returns, and must find its job.
                for module_id, batches in shares.pop(shard).items():
                    numbered = [(next(self._ids), batch) for batch in batches]
                    update = training_pb2.Update(module_id=module_id, exact=True, **passes)
                    update.batch_ids.extend(batch_id for batch_id, _ in numbered)
                    then = partial(self._updated, module_id)
                    what = f"update of {module_id!r}"
                    job = self._put(shard, what, [update], then, update.batch_ids, number)
                    handle[module_id] = job
                    sent += [(module_id, *each) for each in numbered]
            # Not under the lock, because sending may wait for the network.
            for module_id, batch_id, batch in sent:
                header = episodes_pb2.BatchHeader(
                    module_id=module_id, batch_id=batch_id, live_steps=batch.live_steps
                )
                try:
                    if sender is not None:  # else the job has already failed
                        sender.send(header, {module_id: tree_map(np.copy, batch.to_tree())})
                except ValueError as error:  # the batch cannot be sent
                    self._settled(shard, batch_id, "refused", str(error))
        return handle if async_update else handle.result()

    @overload
    def update_from_batch(
        self, batch: Columns, *, async_update: Literal[False] = False, **passes: Unpack[Passes]
    ) -> dict[str, ModuleUpdate]: ...

    @overload
    def update_from_batch(
        self, batch: Columns, *, async_update: Literal[True], **passes: Unpack[Passes]
    ) -> UpdateHandle: ...

    def update_from_batch(
        self, batch: Columns, *, async_update: Any = False, **passes: Unpack[Passes]
    ) -> dict[str, ModuleUpdate] | UpdateHandle:
        """Update as `update_from_episodes` does, from the columns of `juggler.Learner`.

        Raises:
            ValueError: as there; or a column is missing, unknown, or inconsistent with others.
        """
        if not isinstance(batch, Mapping) or not batch:
            raise ValueError("no batch: give columns by name, by module id")
        unknown = ((key, each) for key in batch for each in batch[key] if each not in COLUMNS)
        for module_id, name in unknown:
            raise ValueError(f"{module_id}: unknown column {name!r}{nearest(name, COLUMNS)}")
        episodes = {key: [batch_of_columns(columns, key)] for key, columns in batch.items()}
        done: dict[str, ModuleUpdate] | UpdateHandle
        done = self.update_from_episodes(episodes, async_update=async_update, **passes)
        return done

    def _shares(self, episodes: Episodes) -> dict[int, dict[str, list[EpisodeBatch]]]:
        """Group batches by shard and module id."""
        if not isinstance(episodes, Mapping) or not episodes:
            raise ValueError("no episodes: give lists of EpisodeBatch by module id")
        shares: dict[int, dict[str, list[EpisodeBatch]]] = {}
        for module_id, batches in episodes.items():
            given = list(batches) if isinstance(batches, Sequence) else []
            shares.setdefault(self._module(module_id).shard, {})[module_id] = given
            if not given or not all(isinstance(each, EpisodeBatch) for each in given):
                raise ValueError(
                    f"module {module_id!r} needs a list of EpisodeBatch, with at least one in it"
                )
        return shares

    def _updated(self, module_id: str, bodies: Sequence[any_pb2.Any]) -> ModuleUpdate:
        done = training_pb2.UpdateDone()
        bodies[0].Unpack(done)
        module = self._modules.get(module_id)
        if module is not None:
            self._local.supervisor.of_use(f"learner-{module.shard}")
            module.updates = done.version.update
            if module.updates % self._snapshot_updates == 0 and not self._ended:
                snapshot = training_pb2.Snapshot(module_id=module_id)
                then = partial(self._keep, module_id)
                self._put(module.shard, f"state of {module_id!r}", [snapshot], then)
        live_steps = sum(batch.live_steps for batch in done.batches)
        return ModuleUpdate(dict(done.metrics[module_id].values), live_steps, done.version.update)

    def get_weights(self, module_ids: Iterable[str] | None = None) -> dict[str, dict[str, Tree]]:
        """Return weights for acting, after all updates so far.

        Keys are module ids, then array names.
        """
        of = partial(training_pb2.Snapshot, weights=True)
        states = self._each(module_ids, "weights of", lambda key: [of(module_id=key)], _state_in)
        return {key: dict(cast(Any, state.tree[DEFAULT_MODULE])) for key, state in states.items()}

    def set_weights(self, weights: Mapping[str, Mapping[str, Tree]]) -> None:
        """Replace weights, after all updates so far.

        Keys are module ids, then array names. Missing weights stay. The optimizer is reset, kept
        samples are discarded, and the count of updates continues.
        """
        commands = {key: _restore_commands(key, weights=each) for key, each in weights.items()}
        self._each(weights, "weights for", commands.__getitem__, self._keep)

    def save(self, module_ids: Iterable[str] | None = None) -> dict[str, ModuleState]:
        """Return states by module id, after all updates so far."""
        of = training_pb2.Snapshot
        return self._each(module_ids, "state of", lambda key: [of(module_id=key)], self._keep)

    def restore(self, states: Mapping[str, ModuleState]) -> None:
        """Continue from saved states, by module id, after all updates so far."""
        commands = {key: _restore_commands(key, state=each) for key, each in states.items()}
        self._each(states, "restore of", commands.__getitem__, self._keep)

    def _each(
        self,
        module_ids: Iterable[str] | None,
        what: str,
        commands: Callable[[str], Sequence[Message]],
        then: Callable[[str, Sequence[any_pb2.Any]], T],
    ) -> dict[str, T]:
        """Carry out a job for each of these modules; None: all modules.

        Returns results by module id.
        """
        with self._changed:
            wanted = list(self._modules if module_ids is None else module_ids)
            shards = [self._module(key).shard for key in wanted]
            jobs = {
                key: self._put(shard, f"{what} {key!r}", commands(key), partial(then, key))
                for key, shard in zip(wanted, shards, strict=True)
            }
        wait(jobs.values())
        return {key: job.result() for key, job in jobs.items()}

    def _keep(self, module_id: str, bodies: Sequence[any_pb2.Any]) -> ModuleState:
        state = _state_in(module_id, bodies)
        if (module := self._modules.get(module_id)) is not None:
            module.kept = state
            # A state's last part may arrive after the replies to later updates.
            module.updates = max(module.updates, int(state.extra["updates"]))
        return state

    def add_module(
        self,
        module_id: str,
        spec: Spec,
        *,
        weights: Mapping[str, Tree] | None = None,
        state: ModuleState | None = None,
    ) -> None:
        """Add a module to the shard with the most room.

        An empty shard, else a new one on a free device, else the shard with the fewest modules.

        Args:
            module_id: an id that is not taken.
            spec: as in the constructor.
            weights: initial weights; missing ones are drawn from the seed.
            state: state to continue from, of the same algorithm.

        Raises:
            ConfigError: the id is taken, or the spec is invalid.
            LearnerGroupError: the shard could not build the module or restore its state.
        """
        if weights is not None and state is not None:
            raise ConfigError(f"module {module_id!r}: give weights or state, not both")
        command = self._command(module_id, spec)
        restore: list[Message] = []
        if state or weights is not None:
            restore = _restore_commands(module_id, state, weights)
        with self._changed:
            self._must_run()
            if module_id in self._modules:
                raise ConfigError(f"module {module_id!r} is there already")
            added = self._add(command, restore)
        # Building may take long, so the lock is free again.
        try:
            added.result()
        except BaseException:
            self.remove_module(module_id)  # it may have been built before the failure
            raise

    def remove_module(self, module_id: str) -> None:
        """Remove a module, after all updates so far."""
        with self._changed:
            shard = self._module(module_id).shard
            del self._modules[module_id]
            command = training_pb2.RemoveModule(module_id=module_id)
            removed = self._put(shard, f"removal of {module_id!r}", [command], len)
        with suppress(ShardLost):  # the module was lost with it
            removed.result()

    @property
    def placement(self) -> dict[str, ShardPlacement]:
        """Shard and devices of each module.

        With fewer shards than GPUs, a shard holds several GPUs until modules are added.
        """
        with self._changed:
            shards = {module_id: module.shard for module_id, module in self._modules.items()}
            return places(shards, self._devices, len(self._shards))

    def _module(self, module_id: str) -> Module:
        self._must_run()
        if module_id not in self._modules:
            raise ValueError(f"there is no module {module_id!r}{nearest(module_id, self._modules)}")
        return self._modules[module_id]

    def _command(self, module_id: str, given: Spec) -> training_pb2.AddModule:
        if not isinstance(module_id, str) or not module_id:
            raise ConfigError(f"module {module_id!r}: an id is a string, and not empty")
        if not isinstance(given, LearnerSpec):
            try:
                given = LearnerSpec(**given)
            except TypeError as error:  # a key is missing or unknown
                raise ConfigError(f"module {module_id!r}: {error}") from None
        seed = worker_seed(self._seed, "module", zlib.crc32(module_id.encode()))
        return given.command(module_id, seed)

    def _add(
        self, command: training_pb2.AddModule, restore: Sequence[Message] = ()
    ) -> Future[None]:
        loads = Counter(module.shard for module in self._modules.values())
        number = choose_shard(
            [None if shard.down else loads[shard.number] for shard in self._shards],
            len(self._devices) or None,
        )
        if number == len(self._shards):
            self._start(self._devices[number] if self._devices else CPU)
        module_id = command.module_id
        module = self._modules[module_id] = Module(number, command)

        def built(bodies: list[any_pb2.Any]) -> None:
            module.is_built = True
            if restore:
                self._keep(module_id, bodies)

        return self._put(number, f"module {module_id!r}", [command, *restore], built)

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
        update: int = 0,
    ) -> Future[T]:
        """Append a job to a shard; see `Job`."""
        shard, job = self._shards[number], Job(what, commands, then, set(batch_ids), update)
        job.ended.set_running_or_notify_cancel()  # a cancelled future accepts no result
        if shard.down:
            job.fail(shard.lost, "", ShardLost)
        else:
            shard.jobs.append(job)
            self._send(shard)
        return job.ended

    def _send(self, shard: Shard) -> None:
        """Send commands in order, up to the first job with unsent batches.

        If a batch of an update is refused, the learner finds it missing, and drops the rest.
        """
        if shard.worker is None or shard.left is not None:
            return
        for job in shard.jobs:
            if job.batch_ids:
                return
            if job.unanswered is None:
                job.unanswered = {self._pool.submit(shard.worker, each) for each in job.commands}

    def _settled(self, number: int, batch_id: int, reason: str, explanation: str) -> None:
        """Report whether a batch arrived, from any thread."""
        self._events.put((number, batch_id, (explanation or reason) if reason else ""))

    def _has_room(self, number: int) -> bool:
        """Return whether an update starts, or fails, without waiting."""
        shard = self._shards[number]
        unfinished = {job.update for job in shard.jobs if job.update}
        return shard.down or (shard.set_up and len(unfinished) < self._updates_in_flight)

    def _must_run(self) -> None:
        if self._ended:
            raise RuntimeError(self._ended)

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
            self._ended = self._ended or "the learner group is closed"
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

    def _run(self) -> None:
        try:
            while not self._ended:
                events = self._events.gather(timeout=3600.0)
                with self._changed:
                    for event in events:
                        self._on(event)
                    self._changed.notify_all()
        except BaseException as error:
            self._ended = f"the learner group broke: {error!r}"
            raise
        # Callers wait for these jobs, also after an error.
        finally:
            with self._changed:
                for shard in self._shards:
                    shard.down = True
                    self._end(shard, self._ended)
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
            # The pool must know each event: it fails the commands of a lost worker.
            shard = self._shards[event.worker.index]
            replies = self._pool.complete(event)
            if isinstance(event, WorkerJoined):
                self._joined(shard, event.worker)
            elif isinstance(event, WorkerReplied):
                for reply in replies:
                    self._replied(shard, reply)
            elif isinstance(event, WorkerLeft):
                shard.left = event
                # It may hang, and its successor needs the place.
                after = 5.0 if event.farewell else 0.0
                supervisor = self._local.supervisor
                supervisor.kill(event.worker.worker_id, event.worker.pid, after, abort=False)
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
        commands: list[Message] = [training_pb2.Setup(config=to_json(setup))]
        for module_id, module in self._modules.items():
            if module.shard == shard.number and module.is_built:
                commands.append(module.command)
                if module.kept is not None:
                    commands += restores(module_id, *module.kept)
        # The address belongs to this process, not to its predecessor.
        shard.worker = worker
        shard.sender = EpisodeSender(
            worker.data_addresses[0],
            call_metadata(self._token, self._run_id, worker.incarnation),
            partial(self._settled, shard.number),
        )
        shard.setup = Job("setup", commands, len)
        shard.jobs.appendleft(shard.setup)

    def _replied(self, shard: Shard, reply: Completed) -> None:
        sent = (job for job in shard.jobs if reply.command_id in (job.unanswered or ()))
        if (job := next(sent, None)) is None or job.unanswered is None:  # a reply to Stop
            return
        job.failure = job.failure or reply.failure
        if reply.body is not None:
            job.bodies.append(reply.body)
        if reply.last:
            job.unanswered.remove(reply.command_id)
        # Only now is it known whether all batches were accepted.
        if job.unanswered:
            return
        shard.jobs.remove(job)
        # The learner would only report that a refused batch is missing.
        failure = job.failure or attach_pb2.Failure()
        if job.refused:
            failure = attach_pb2.Failure(message=job.refused)
        try:
            result = None if failure.message else job.then(job.bodies)
        except ValueError as error:  # a reply that cannot be read
            failure.message = str(error)
        if failure.message:
            job.fail(failure.message, failure.traceback, LearnerGroupError)
            if job is shard.setup:
                self._hub.dismiss(reply.worker, failure.message)
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
        # Updates since the kept state are lost with the process.
        for module_id, module in self._modules.items():
            if module.shard == shard.number and (made := module.updates):
                module.updates = int(module.kept.extra["updates"]) if module.kept else 0
                words.append(
                    f"Module {module_id!r} goes back to update {module.updates} of {made}."
                )
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
        shard.setup = None
        for job in jobs:
            job.fail(why, traceback, ShardLost)


def places(shards: Mapping[str, int], gpus: Sequence[str], count: int) -> dict[str, ShardPlacement]:
    """Return places by module id, given their shards."""
    share = len(gpus) / len(shards) if shards else 0.0
    return {
        key: ShardPlacement(n, tuple(gpus[n::count]) or (CPU,), share) for key, n in shards.items()
    }


def choose_shard(loads: Sequence[int | None], most: int | None) -> int:
    """Choose a shard for another module by loads; None: shard is down.

    The number after the last means a new shard. There are at most `most` shards.
    """
    open_ = [shard for shard, load in enumerate(loads) if load is not None]
    fewest = min(open_, key=lambda shard: loads[shard] or 0, default=None)
    if (fewest is None or loads[fewest]) and (most is None or len(loads) < most):
        return len(loads)
    if fewest is None:
        raise ConfigError("no shard is left that takes a module, and no device for another")
    return fewest


def _restore_commands(
    module_id: str, state: ModuleState | None = None, weights: Mapping[str, Tree] | None = None
) -> list[Message]:
    """Make commands that restore a state or replace weights."""
    tree, extra = state or ({DEFAULT_MODULE: weights or {}}, {})
    parts = restores(module_id, tree, extra, training_pb2.Restore(weights=state is None))
    return [*parts, training_pb2.Snapshot(module_id=module_id)]


def _state_in(_: str, bodies: Sequence[any_pb2.Any]) -> ModuleState:
    """Read the state from replies; the last one answers a Snapshot."""
    reader, frame = state_reader(), None
    for body in bodies:
        if body.TypeName() == training_pb2.StateChunk.DESCRIPTOR.full_name:
            frame = reader.feed(body.value)
    assert frame is not None
    return ModuleState(cast(dict[str, Tree], frame.tree), json.loads(frame.header.extra))
