"""LearnerGroup, for scripts: trains many modules in several learner processes."""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import secrets
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Self, Unpack, cast, overload

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
    Worker,
    WorkerJoined,
    WorkerLeft,
    WorkerReplied,
)
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.actors.worker import to_json, worker_seed
from juggler.runtime.episodes.batch import COLUMNS, EpisodeBatch, batch_of_columns
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.near_matches import nearest
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.wire.frames import lay_out
from juggler.runtime.wire.layouts import layout_of
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree, flatten
from juggler.runtime.wire.v1 import attach_pb2, episodes_pb2, training_pb2

Episodes = Mapping[str, Sequence[EpisodeBatch]]  # by module id
Columns = Mapping[str, Mapping[str, Any]]  # by name, by module id


class LearnerGroupError(RuntimeError):
    """Failure of a shard; the message may end with the process's traceback."""


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

    def __repr__(self) -> str:
        """Return the size instead of the arrays."""
        sizes = [array.nbytes for _, array in flatten(dict(self.tree))]
        return f"ModuleState({len(sizes)} arrays, {sum(sizes):,} bytes, extra={self.extra!r})"


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
        failures = {key: error for key, part in self.items() if (error := part.exception())}
        results = {key: part.result() for key, part in self.items() if key not in failures}
        if failures:
            raise UpdateFailed(failures, results)
        return results


#: The thread of callbacks.
_CALLBACKS = ThreadPoolExecutor(1, "callbacks")


def _call(fn: Callable[[Future[Any]], object], done: Future[Any]) -> None:
    """Call a callback, and log its exception."""
    try:
        fn(done)
    except Exception:
        logging.getLogger(__name__).exception("a callback of a learner group failed")


def _call_in_order(fn: Callable[[Future[Any]], object], done: Future[Any]) -> None:
    """Have the thread of callbacks call a function."""
    try:
        _CALLBACKS.submit(_call, fn, done)
    except RuntimeError:  # the program ends, and the thread has ended
        _call(fn, done)


class Request(Future[Any]):
    """Result of commands that a process carries out in order.

    Attributes:
        rebuilds: the process must end if this fails.
    """

    def __init__(self, what: str, read: Callable[[any_pb2.Any], Any]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # a cancelled future accepts no result
        self._what = what  # prefix of error messages
        self._read = read  # called with each reply to the last command; the last returns the result
        self.rebuilds = False

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Have a function called once this is done.

        One thread calls all of them, in order. The program ends after the last one.
        """
        # A reply resolves this in the hub's thread, under the group's lock. There, a call of the
        # group would wait forever for the next reply.
        super().add_done_callback(partial(_call_in_order, fn))

    def answer(self, reply: attach_pb2.Reply) -> None:
        """Take a reply."""
        if reply.HasField("failure"):
            return self.fail(LearnerGroupError, text_of(reply.failure))
        try:
            result = self._read(reply.body)
        except ValueError as error:  # the reply cannot be read
            return self.fail(LearnerGroupError, str(error))
        if reply.last and not self.done():
            self.set_result(result)

    def fail(self, kind: type[LearnerGroupError], why: str) -> None:
        if not self.done():
            self.set_exception(kind(f"{self._what}: {why}"))


@dataclass(eq=False, slots=True)
class Shard:
    """A learner process, and its successors."""

    index: int
    device: str
    worker: Worker | None = None  # None: the process is gone, or not there yet
    sender: EpisodeSender | None = None
    requests: dict[int, Request] = field(default_factory=dict)  # by id of the last command
    last_words: str = ""  # of a process that has left, but not ended yet
    lost: str = ""  # how the last process was lost
    down: bool = False  # permanently


@dataclass(eq=False, slots=True)
class Module:
    """A module of a shard, which each of its processes builds."""

    module_id: str
    shard: Shard
    command: training_pb2.AddModule
    in_flight: deque[Future[ModuleUpdate]]  # the newest updates, as many as may be unfinished
    worker: Worker | None = None  # the last process that has built it
    kept: ModuleState | None = None  # its newest known state; None: only the seed
    updates: int = 0
    removed: bool = False

    def settled(self) -> bool:
        """Return whether the process has it, or no process will."""
        is_there = self.worker is not None and self.worker is self.shard.worker
        return is_there or self.removed or self.shard.down

    def has_room(self) -> bool:
        """Return whether an update starts, or fails, without waiting."""
        is_full = len(self.in_flight) == self.in_flight.maxlen
        # Updates of a module end in order.
        return self.settled() and not (is_full and not self.in_flight[0].done())


class LearnerGroup:
    """Trains many modules, each with its own algorithm, learning rate and model.

    Modules are distributed over shards: processes, each with a device. A shard works in the order
    of calls, and does not wait for other shards. It ends with the thread that started it.
    """

    def __init__(
        self,
        modules: Mapping[str, Spec],
        *,
        devices: str = AUTO,
        seed: int = 0,
        updates_in_flight: int = 2,
        snapshot_updates: int = 100,
    ) -> None:
        """Start the processes of a group.

        Args:
            modules: by id, a `LearnerSpec` or its fields by name.
            devices: "auto" (all GPUs of this host, or its CPU), "cpu" (a process for each module),
                "cuda:0,cuda:1", or "fake:4", four processes on the CPU in the role of GPUs.
            seed: seed of modules whose specs have none.
            updates_in_flight: maximum number of unfinished updates of a module.
            snapshot_updates: updates of a module after which its state is fetched. If the process
                is lost, a new one continues from this state.

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
        self._updates_in_flight = updates_in_flight
        # Specs are checked before any process starts.
        commands = [self._command(module_id, spec) for module_id, spec in modules.items()]
        self._modules: dict[str, Module] = {}
        self._shards: list[Shard] = []
        self._ids = itertools.count(1)  # of commands and batches
        self._changed = threading.Condition()  # guards everything; notified after each event
        self._over = ""  # why nothing more is accepted
        self._open = ExitStack()  # ends everything
        try:
            self._start()
            placed = [self._place(command) for command in commands]  # all processes start
            for built in [self._build(module) for module in placed]:
                built.result()
        except BaseException:
            self._open.close()
            raise

    def _start(self) -> None:
        """Start the hub, and with "auto" a first process."""
        # Other programs of this host do not know the token, and cannot attach.
        self._token, self._run_id = secrets.token_hex(16), secrets.token_hex(6)
        events: Any = SimpleNamespace(put=self._handle)  # not a mailbox, which a thread would read
        self._local = LocalWorkers(events, self._run_id, self._token, b"")
        self._hub = Hub(HubSettings(self._run_id, (LEARNER,), self._token), events)
        # Without this, multiprocessing waits at exit for processes that the script did not close.
        atexit.register(self._open.close)
        self._open.callback(atexit.unregister, self._open.close)
        self._open.callback(self._hub.close)
        self._open.callback(self._local.close, grace=0.5)
        self._open.callback(self._end_all)  # the last one is called first
        self._hub.start([self._local.driver_address])
        # Only a learner process imports torch, which knows the devices of this host.
        if self._devices == [AUTO]:
            first = self._add_shard(AUTO)
            with self._changed:
                self._wait(lambda: bool(first.worker or first.lost))
                if first.worker is None:
                    raise ShardLost(first.lost)
            self._devices = list(first.worker.devices)
            first.device = self._devices[0]
        if self._devices == [CPU]:
            self._devices = []  # no limit

    # -- updates ----------------------------------------------------------------------------------

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

        Waits while a module has `updates_in_flight` unfinished updates; others come first.

        Args:
            episodes: batches by module id; copied before this returns.
            async_update: whether to return a handle as soon as all updates are queued.
            passes: `minibatch_size` and `num_epochs`, as for `Learner.update_from_batch`.

        Raises:
            ValueError: there is no such module, or there are no episodes.
            UpdateFailed: a module could not update.
        """
        if not isinstance(episodes, Mapping) or not episodes:
            raise ValueError("no episodes: give lists of EpisodeBatch by module id")
        waiting = {self._module(key): _checked(key, each) for key, each in episodes.items()}
        passes, handle = given_passes(passes), UpdateHandle()
        while waiting:
            with self._changed:
                self._wait(lambda: any(each.has_room() for each in waiting))
                module = next(each for each in waiting if each.has_room())
                update = self._sent(module, waiting.pop(module))
                update.MergeFrom(training_pb2.Update(exact=True, **passes))
                done = self._request(module, "update", [update], partial(self._updated, module))
                module.in_flight.append(done)
                handle[module.module_id] = done
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

    def _sent(self, module: Module, batches: Iterable[EpisodeBatch]) -> training_pb2.Update:
        """Send batches to a module's process; return the command that names them."""
        module_id, sender = module.module_id, module.shard.sender
        update = training_pb2.Update(module_id=module_id)
        if sender is None or module.removed:
            return update  # its request fails
        for batch in batches:
            header = episodes_pb2.BatchHeader(
                module_id=module_id, batch_id=next(self._ids), live_steps=batch.live_steps
            )
            update.batch_ids.append(header.batch_id)
            sender.send(header, {module_id: tree_map(np.copy, batch.to_tree())})
        return update

    def _updated(self, module: Module, body: any_pb2.Any) -> ModuleUpdate:
        """Read the reply to an update, and fetch some states."""
        done = training_pb2.UpdateDone()
        body.Unpack(done)
        module.updates = done.version.update
        self._local.supervisor.of_use(f"{LEARNER}-{module.shard.index}")
        if module.updates % self._snapshot_updates == 0:
            self._snapshot(module)
        metrics = dict(done.metrics[module.module_id].values)
        live_steps = sum(batch.live_steps for batch in done.batches)
        return ModuleUpdate(metrics, live_steps, module.updates)

    # -- states -----------------------------------------------------------------------------------

    def get_weights(self, module_ids: Iterable[str] | None = None) -> dict[str, dict[str, Tree]]:
        """Return weights for acting, after all updates so far.

        Keys are module ids, then array names.
        """
        states = self._each(module_ids, partial(self._snapshot, weights=True))
        return {key: dict(state.tree[DEFAULT_MODULE]) for key, state in states.items()}

    def set_weights(self, weights: Mapping[str, Mapping[str, Tree]]) -> None:
        """Replace weights, after all updates so far.

        Keys are module ids, then array names. Missing weights stay. The optimizer is reset, kept
        samples are discarded, and the count of updates continues.
        """
        states = {key: ModuleState({DEFAULT_MODULE: each}, {}) for key, each in weights.items()}
        self._continue_from(states, weights=True)

    def save(self, module_ids: Iterable[str] | None = None) -> dict[str, ModuleState]:
        """Return states by module id, after all updates so far."""
        return self._each(module_ids, self._snapshot)

    def restore(self, states: Mapping[str, ModuleState]) -> None:
        """Continue from saved states, by module id, after all updates so far."""
        self._continue_from(states)

    def _continue_from(self, states: Mapping[str, ModuleState], *, weights: bool = False) -> None:
        # A snapshot is for the next process, which may be needed before other modules have
        # restored. It holds not the caller's arrays, which may change.
        self._each(
            states,
            lambda each: self._restore(each, states[each.module_id], weights),
            self._snapshot,
        )

    def _each(
        self, module_ids: Iterable[str] | None, *asks: Callable[[Module], Future[Any]]
    ) -> dict[str, Any]:
        """Ask modules (None: all); return the last answers by module id."""
        with self._changed:
            wanted = [*self._modules] if module_ids is None else module_ids
            parts: list[tuple[str, Future[Any]]] = []
            for module in [self._module(key) for key in wanted]:
                self._wait(module.settled)
                parts += [(module.module_id, ask(module)) for ask in asks]
        wait([part for _, part in parts])  # even if one fails: the others' states hold
        return {key: part.result() for key, part in parts}

    def _snapshot(self, module: Module, *, weights: bool = False) -> Future[ModuleState]:
        """Fetch a module's state, and keep it; or fetch only weights."""
        reader = state_reader()

        def read(body: any_pb2.Any) -> ModuleState | None:
            if (frame := reader.feed(body.value)) is None:
                return None  # more chunks follow
            state = ModuleState(cast(Any, frame.tree), json.loads(frame.header.extra))
            if not weights:
                module.kept = state
                # The last chunk may arrive after the replies to later updates.
                module.updates = max(module.updates, int(state.extra["updates"]))
            return state

        command = training_pb2.Snapshot(module_id=module.module_id, weights=weights)
        return self._request(module, "state", [command], read)

    def _restore(self, module: Module, state: ModuleState, weights: bool = False) -> Request:
        """Have a module continue from a state, or from these weights."""
        parts = restores(module.module_id, *state, training_pb2.Restore(weights=weights))
        return self._request(module, "restore", parts, bool)

    # -- modules ----------------------------------------------------------------------------------

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
        module = self._place(self._command(module_id, spec))
        try:
            self._build(module).result()
            if state is not None:
                self.restore({module_id: state})
            elif weights is not None:
                self.set_weights({module_id: weights})
        except BaseException:
            self.remove_module(module_id)  # it may have been built before the failure
            raise

    def remove_module(self, module_id: str) -> None:
        """Remove a module, after all updates so far."""
        with self._changed:
            module = self._module(module_id)
            command = training_pb2.RemoveModule(module_id=module_id)
            removed = self._request(module, "removal", [command], bool)
            module.removed = True
            del self._modules[module_id]
        wait([removed])  # it fails if the module was lost with its process

    @property
    def placement(self) -> dict[str, ShardPlacement]:
        """Shard and devices of each module.

        With fewer shards than GPUs, a shard holds several GPUs until modules are added.
        """
        with self._changed:
            gpus, count = self._devices, len(self._shards)
            share = len(gpus) / len(self._modules) if self._modules else 0.0
            indices = {key: module.shard.index for key, module in self._modules.items()}
        return {
            key: ShardPlacement(index, tuple(gpus[index::count]) or (CPU,), share)
            for key, index in indices.items()
        }

    def _module(self, module_id: str) -> Module:
        self._must_run()
        if module_id not in self._modules:
            raise ValueError(f"there is no module {module_id!r}{nearest(module_id, self._modules)}")
        return self._modules[module_id]

    def _command(self, module_id: str, given: Spec) -> training_pb2.AddModule:
        """Check a spec, and make its command."""
        if not isinstance(module_id, str) or not module_id:
            raise ConfigError(f"module {module_id!r}: an id is a string, and not empty")
        if not isinstance(given, LearnerSpec):
            try:
                given = LearnerSpec(**given)
            except TypeError as error:  # a key is missing or unknown
                raise ConfigError(f"module {module_id!r}: {error}") from None
        seed = worker_seed(self._seed, "module", zlib.crc32(module_id.encode()))
        return given.command(module_id, seed)

    def _place(self, command: training_pb2.AddModule) -> Module:
        """Give a module a shard, which may be a new one."""
        in_flight: deque[Future[ModuleUpdate]] = deque(maxlen=self._updates_in_flight)
        with self._changed:
            self._must_run()
            if command.module_id in self._modules:
                raise ConfigError(f"module {command.module_id!r} is there already")
            loads = Counter(module.shard.index for module in self._modules.values())
            there = [shard for shard in self._shards if not shard.down]
            shard = min(there, key=lambda each: loads[each.index], default=None)
            is_free = not self._devices or len(self._shards) < len(self._devices)
            if is_free and (shard is None or loads[shard.index]):
                device = self._devices[len(self._shards)] if self._devices else CPU
                shard = self._add_shard(device)
            # Without a free device, only shards that are down are left.
            if shard is None:
                raise ConfigError("no shard is left that takes a module, and no device for another")
            module = Module(command.module_id, shard, command, in_flight)
            self._modules[command.module_id] = module
            return module

    def _build(self, module: Module) -> Request:
        """Have a module built, once there is a process."""
        shard, before = module.shard, module.shard.lost
        with self._changed:
            self._wait(lambda: bool(shard.worker) or shard.down or shard.lost != before)
            worker = shard.worker

            def built(_: object) -> None:
                module.worker = worker

            return self._request(module, "module", [module.command], built)

    # -- processes --------------------------------------------------------------------------------

    def _add_shard(self, device: str) -> Shard:
        shard = Shard(len(self._shards), device)
        self._shards.append(shard)
        self._local.start_learner(shard.index)
        return shard

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait, under the lock, until a condition holds.

        Raises:
            RuntimeError: the group accepts nothing more.
        """
        self._changed.wait_for(lambda: self._over or until())
        self._must_run()

    def _must_run(self) -> None:
        if self._over:
            raise RuntimeError(self._over)

    def _request(
        self,
        module: Module,
        what: str,
        commands: Iterable[Message],
        read: Callable[[any_pb2.Any], Any],
    ) -> Request:
        """Send commands to a module's process, under the lock; see `Request`."""
        request, shard = Request(f"{what} of {module.module_id!r}", read), module.shard
        if module.removed:  # another thread may have added another one with this id
            request.fail(LearnerGroupError, "it was removed")
            return request
        if shard.worker is None:
            request.fail(ShardLost, shard.lost)
            return request
        for command in commands:
            number = next(self._ids)
            self._hub.send(shard.worker, number, command)
        shard.requests[number] = request
        return request

    def _handle(self, event: HubEvent | Exited) -> None:
        """Handle an event, in the hub's or the supervisor's thread."""
        with self._changed:
            if self._over:
                return
            try:
                self._happened(event)
            except BaseException as error:
                self._end_all(f"the learner group broke: {error!r}")
                raise
            finally:
                self._changed.notify_all()

    def _happened(self, event: HubEvent | Exited) -> None:
        worker_id = event.worker_id if isinstance(event, Exited) else event.worker.worker_id
        shard = self._shards[int(worker_id.rpartition("-")[2])]
        if isinstance(event, Exited):
            self._exited(shard, event)
        elif isinstance(event, WorkerJoined):
            if not shard.down:  # else it attached just before its end, which was told first
                self._joined(shard, event.worker)
        # Of a process that has left, nothing more counts.
        elif event.worker is not shard.worker:
            return
        elif isinstance(event, WorkerReplied):
            if (request := shard.requests.get(event.reply.id)) is not None:
                request.answer(event.reply)
                if event.reply.last:
                    del shard.requests[event.reply.id]
                    if request.rebuilds and (error := request.exception()):
                        self._left(shard, WorkerLeft(event.worker, str(error)))
        elif isinstance(event, WorkerLeft):
            self._left(shard, event)

    def _joined(self, shard: Shard, worker: Worker) -> None:
        """Set up a process, and rebuild the modules of its predecessor."""

        def settled(_: int, reason: str, explanation: str) -> None:
            # The process would wait for this batch forever.
            if reason == "learner_lost":
                self._handle(WorkerLeft(worker, explanation))

        # Its predecessor may have attached after its end was told.
        self._end(shard, shard.lost)
        shard.worker = worker
        # The address belongs to this process, not to its predecessor.
        metadata = call_metadata(self._token, self._run_id, worker.incarnation)
        shard.sender = EpisodeSender(worker.data_addresses[0], metadata, settled)
        limit = self._updates_in_flight
        setup = LearnerSetup(
            device=shard.device, updates_in_flight=limit, may_meet=False, outlives_failures=True
        )
        # If this fails, the process ends.
        self._hub.send(worker, 0, training_pb2.Setup(config=to_json(setup)))
        for module in self._modules.values():
            if module.shard is shard and module.worker is not None:
                self._build(module).rebuilds = True
                if module.kept is not None:
                    self._restore(module, module.kept).rebuilds = True

    def _left(self, shard: Shard, left: WorkerLeft) -> None:
        """Kill a process that has left, or cannot be used."""
        shard.worker = None
        shard.last_words = text_of(left.failure) if left.failure else left.reason
        # It may hang, and its successor needs the place.
        after = 5.0 if left.farewell else 0.0
        self._local.supervisor.kill(left.worker.worker_id, left.worker.pid, after)

    def _exited(self, shard: Shard, exited: Exited) -> None:
        """Describe what is lost with a process."""
        words = [f"{exited.worker_id} on {shard.device} was lost: {exited.how}."]
        for module_id, module in self._modules.items():
            if module.shard is shard and (made := module.updates):
                module.updates = int(module.kept.extra["updates"]) if module.kept else 0
                back_to = f"update {module.updates} of {made}"
                words.append(f"Module {module_id!r} goes back to {back_to}.")
        shard.down = exited.restart_in is None
        if shard.down:
            words.append("It has died too often, and stays down")
        self._end(shard, f"{' '.join(words)}\n{shard.last_words}".rstrip())

    def _end(self, shard: Shard, why: str) -> None:
        """Fail all that a lost process has not answered."""
        if shard.sender is not None:
            shard.sender.close()
        shard.worker, shard.sender, shard.lost, shard.last_words = None, None, why, ""
        requests, shard.requests = shard.requests, {}
        for request in requests.values():
            request.fail(ShardLost, why)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for all requests, and end the processes.

        Ctrl-C ends the wait; a second one kills the processes at once.
        """
        try:
            with self._changed:
                self._changed.wait_for(lambda: not any(each.requests for each in self._shards))
        finally:
            self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        (self.close if kind is None else self._open.close)()

    def _end_all(self, why: str = "the learner group is closed") -> None:
        """Ask all processes to end, and accept nothing more."""
        with self._changed:
            self._over = self._over or why
            for shard in self._shards:
                if shard.worker is not None:
                    self._hub.send(shard.worker, 0, attach_pb2.Stop())
                shard.down = True
                self._end(shard, self._over)
            self._changed.notify_all()


def _checked(module_id: str, batches: object) -> list[EpisodeBatch]:
    """Return a module's batches; raise ValueError if they cannot be sent."""
    given = list(batches) if isinstance(batches, Sequence) else []
    if not given or not all(isinstance(each, EpisodeBatch) for each in given):
        raise ValueError(
            f"module {module_id!r} needs a list of EpisodeBatch, with at least one in it"
        )
    for batch in given:
        form, _ = lay_out({module_id: batch.to_tree()})
        layout_of(form.tree)  # as the learner reads it: beyond its limits, a stream ends
    return given


def text_of(failure: attach_pb2.Failure) -> str:
    """Return a failure's message, with the traceback below."""
    return f"{failure.message}\n{failure.traceback}".rstrip()
