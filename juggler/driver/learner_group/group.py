"""LearnerGroup: many modules, each trained by its own algorithm, over shards of devices."""

from __future__ import annotations

import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, Unpack, cast, overload

import gymnasium
import numpy as np
from google.protobuf import any_pb2
from google.protobuf.message import Message

from juggler.driver.checkpoint.restoring import restores
from juggler.driver.checkpoint.snapshots import state_reader
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.learner_group.shards import LearnerGroupError, ShardLost, Shards
from juggler.driver.workers.module_setups import add_module
from juggler.driver.workers.module_spaces import Spaces
from juggler.learner.config import Passes, given_passes
from juggler.learner.process.devices import AUTO, CPU, parse_devices
from juggler.runtime.actors.seeds import worker_seed
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.columns import COLUMNS, batch_of_columns
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import episodes_pb2, training_pb2

T = TypeVar("T")
Episodes = Mapping[str, Sequence[EpisodeBatch]]  # by module id
Columns = Mapping[str, Mapping[str, Any]]  # by name, by module id


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """A module and its training, in names instead of objects: see `juggler.RunConfig`."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    learner: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the algorithm: `algorithm`, `lr`, …"""
    module: str | None = None
    """The RLModule, or the Catalog that builds it, as "package.module:Class"."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the module."""
    distribution: str | None = None
    """The function that makes the distribution of actions, as "package.module:function"."""
    connectors: Mapping[str, Any] = field(default_factory=dict)
    """The table `connectors` of a run, of which the part `learner` is used."""
    seed: int | None = None
    """Seed of the first parameters; None: one from the group's seed and the module's id."""

    def command(self, module_id: str, seed: int) -> training_pb2.AddModule:
        """The command that adds this module to a learner process.

        Raises:
            ConfigError: a value is wrong.
        """
        try:
            if not isinstance(self.learner, Mapping):
                raise ConfigError(f"learner = {self.learner!r}: expected a table of keys")
            keys: dict[str, Any] = dict(self.learner)
            if isinstance(burn_in := keys.get("burn_in"), int):
                keys["fragment_steps"] = max(burn_in, 0) + 1  # nothing is sampled here
            for name in ("module", "model", "distribution", "connectors"):
                keys[name] = getattr(self, name)
            config = RunConfig.from_flat(keys, "learner")
            known = [each.name for each in fields(config.learner)]
            for key in self.learner:
                if key not in known:
                    raise ConfigError(f"learner has no key {key!r}{nearest(key, known)}")
            spaces = space_to_message(self.observation_space), space_to_message(self.action_space)
            seed = seed if self.seed is None else self.seed
            return add_module(config, module_id, Spaces(*spaces), seed)
        except (TypeError, ValueError) as error:  # also what JSON, or a message, cannot hold
            raise ConfigError(f"module {module_id!r}: {error}") from error


Spec = LearnerSpec | Mapping[str, Any]


class ModuleUpdate(NamedTuple):
    """Result of an update of a module, whose updates so far it counts."""

    metrics: dict[str, float]
    live_steps: int
    updates: int


class ModuleState(NamedTuple):
    """State of a module, as `Learner.save` returns it: arrays, and values for JSON."""

    tree: Mapping[str, Tree]
    extra: Mapping[str, Any]


class Place(NamedTuple):
    """Place of a module: its shard, which computes on the first of these devices."""

    shard: int
    devices: tuple[str, ...]
    share: float
    """Number of GPUs for each module."""


class UpdateFailed(LearnerGroupError):
    """Modules could not update: `failures` by module id, and `results` of the others."""

    def __init__(
        self, failures: Mapping[str, BaseException], results: Mapping[str, ModuleUpdate]
    ) -> None:
        super().__init__("\n".join(dict.fromkeys(map(str, failures.values()))))
        self.failures, self.results = dict(failures), dict(results)


class UpdateHandle(dict[str, Future[ModuleUpdate]]):
    """Futures of an update by module id."""

    def done(self) -> bool:
        """Whether `result` returns at once."""
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
class _Module:
    shard: int
    command: training_pb2.AddModule
    is_built: bool = False
    kept: ModuleState | None = None  # its newest known state; None: there is only the seed
    updates: int = 0
    unkept: int = 0  # updates since the state was last fetched

    @property
    def kept_updates(self) -> int:
        return 0 if self.kept is None else int(self.kept.extra["updates"])


class LearnerGroup(Shards):
    """Trains many modules, each with its own algorithm, learning rate and model.

    They are spread over shards: processes, each with a device. A shard does what it is asked for in
    order, and waits for no other shard. It ends with the thread that started it.
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
        """Args:
            modules: by id, a `LearnerSpec` or its fields by name.
            devices: "auto" (all GPUs of this host, or its CPU), "cpu" (a process for each module),
                "cuda:0,cuda:1", or "fake:4", four processes on the CPU that stand for GPUs.
            seed: of modules whose specs have none.
            updates_in_flight: the most unfinished updates of a shard.
            snapshot_updates: updates of a module after which its state is fetched, for a new
                process after a loss.
            hang_seconds: a process without progress for this long is killed, and started again.

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
        if AUTO in self._devices and len(self._devices) > 1:
            raise ConfigError(f"devices = {devices!r}: auto stands alone, for all GPUs")
        self._seed, self._snapshot_updates = seed, snapshot_updates
        self._modules: dict[str, _Module] = {}
        self._batch_ids = itertools.count(1)
        commands = [self._command(module_id, spec) for module_id, spec in modules.items()]
        super().__init__(hang_seconds, updates_in_flight)
        try:
            with self._changed:
                if self._devices == [AUTO]:
                    first = self._start(AUTO)
                    self._changed.wait_for(lambda: first.worker or first.lost)
                    if first.worker is None:
                        raise ShardLost(first.lost)
                    self._devices = list(first.worker.devices)
                if self._devices == [CPU]:
                    self._devices = []
                added = [self._add(command) for command in commands]
            for job in added:
                job.result()
        except BaseException:
            self._close()
            raise

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

        Waits for room at a shard with `updates_in_flight` unfinished updates; asks others first.

        Args:
            episodes: batches by module id; copied before this returns.
            async_update: whether to return a handle as soon as all shards are asked.
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
                asked = shares.pop(shard)
                for module_id, batches in asked.items():
                    numbered = [(next(self._batch_ids), batch) for batch in batches]
                    update = training_pb2.Update(module_id=module_id, exact=True, **passes)
                    update.batch_ids.extend(batch_id for batch_id, _ in numbered)
                    then = partial(self._updated, module_id)
                    what = f"update of {module_id!r}"
                    job = self._put(shard, what, [update], then, update.batch_ids)
                    handle[module_id] = job
                    sent += [(module_id, *each) for each in numbered]
                self._shards[shard].updates.append([handle[module_id] for module_id in asked])
            for module_id, batch_id, batch in sent:
                header = episodes_pb2.BatchHeader(
                    module_id=module_id,
                    batch_id=batch_id,
                    live_steps=batch.live_steps,
                    permit=self._permits.of(batch_id, module_id),
                )
                try:
                    if sender is not None:  # else the job fails already
                        sender.send(header, {module_id: tree_map(np.copy, batch.to_tree())})
                except ValueError as error:  # what cannot be sent
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
        """As `update_from_episodes`, on columns as `juggler.Learner` takes them.

        Raises:
            ValueError: as there; or a column is missing, unknown, or does not fit the others.
        """
        if not isinstance(batch, Mapping) or not batch:
            raise ValueError("no batch: give columns by name, by module id")
        for module_id, columns in batch.items():
            for name in columns:
                if name not in COLUMNS:
                    raise ValueError(
                        f"{module_id}: unknown column {name!r}{nearest(name, COLUMNS)}"
                    )
        episodes = {key: [batch_of_columns(columns, key)] for key, columns in batch.items()}
        done: dict[str, ModuleUpdate] | UpdateHandle
        done = self.update_from_episodes(episodes, async_update=async_update, **passes)
        return done

    def _shares(self, episodes: Episodes) -> dict[int, dict[str, list[EpisodeBatch]]]:
        """Batches by shard and module id."""
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
            self._local.of_use(f"learner-{module.shard}")
            module.updates = done.version.update
            module.unkept += 1
            if module.unkept >= self._snapshot_updates and not self._over:
                module.unkept = 0
                snapshot = training_pb2.Snapshot(module_id=module_id)
                then = partial(self._keep, module_id)
                self._put(module.shard, f"state of {module_id!r}", [snapshot], then)
        live_steps = sum(batch.live_steps for batch in done.batches)
        return ModuleUpdate(dict(done.metrics[module_id].values), live_steps, done.version.update)

    # -- states -----------------------------------------------------------------------------------

    def get_weights(self, module_ids: Iterable[str] | None = None) -> dict[str, dict[str, Tree]]:
        """Weights that acting needs, name -> array by module id, behind all updates so far.

        Args:
            module_ids: None: of all modules.
        """
        of = partial(training_pb2.Snapshot, weights=True)
        states = self._each(module_ids, "weights of", lambda key: [of(module_id=key)], _state_in)
        return {key: dict(cast(Any, state.tree[DEFAULT_MODULE])) for key, state in states.items()}

    def set_weights(self, weights: Mapping[str, Mapping[str, Tree]]) -> None:
        """Replace weights, name -> array by module id, behind all updates so far.

        Missing weights stay. The optimizer starts again, kept samples are discarded, and the count
        of updates continues.
        """
        commands = {key: _restoring(key, weights=each) for key, each in weights.items()}
        self._each(weights, "weights for", commands.__getitem__, self._keep)

    def save(self, module_ids: Iterable[str] | None = None) -> dict[str, ModuleState]:
        """States by module id, as `get_weights`."""
        of = training_pb2.Snapshot
        return self._each(module_ids, "state of", lambda key: [of(module_id=key)], self._keep)

    def restore(self, states: Mapping[str, ModuleState]) -> None:
        """Continue from saved states, by module id, behind all updates so far."""
        commands = {key: _restoring(key, state=each) for key, each in states.items()}
        self._each(states, "restore of", commands.__getitem__, self._keep)

    def _each(
        self,
        module_ids: Iterable[str] | None,
        what: str,
        commands: Callable[[str], Sequence[Message]],
        then: Callable[[str, Sequence[any_pb2.Any]], T],
    ) -> dict[str, T]:
        """Carry out a job for each of these modules; None: for all. Returns results by id."""
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
            # A state's last part may arrive behind the answers to later updates.
            module.updates = max(module.updates, module.kept_updates)
        return state

    # -- modules ----------------------------------------------------------------------------------

    def add_module(
        self,
        module_id: str,
        spec: Spec,
        *,
        weights: Mapping[str, Tree] | None = None,
        state: ModuleState | None = None,
    ) -> None:
        """Add a module to an empty shard, else to a free device, else where the fewest are.

        Args:
            module_id: a new one.
            spec: as in the constructor.
            weights: to begin with; what is missing is drawn from the seed.
            state: to continue from; of the same algorithm.

        Raises:
            ConfigError: the id is taken, or something in the spec is wrong.
            LearnerGroupError: the shard could not build the module, or not begin with that.
        """
        if weights is not None and state is not None:
            raise ConfigError(f"module {module_id!r}: give weights or state, not both")
        command = self._command(module_id, spec)
        begins = _restoring(module_id, state, weights) if state or weights is not None else []
        with self._changed:
            self._must_run()
            if module_id in self._modules:
                raise ConfigError(f"module {module_id!r} is there already")
            added = self._add(command, begins)
        try:
            added.result()
        except BaseException:
            self.remove_module(module_id)  # it may have been built before that failed
            raise

    def remove_module(self, module_id: str) -> None:
        """Remove a module, behind all updates so far."""
        with self._changed:
            shard = self._module(module_id).shard
            del self._modules[module_id]
            command = training_pb2.RemoveModule(module_id=module_id)
            removed = self._put(shard, f"removal of {module_id!r}", [command], len)
        with suppress(ShardLost):  # and the module with it
            removed.result()

    @property
    def placement(self) -> dict[str, Place]:
        """Places by module id. With fewer shards than GPUs, the other GPUs are set aside for them
        until modules are added."""
        with self._changed:
            shards = {module_id: module.shard for module_id, module in self._modules.items()}
            return places(shards, self._devices, len(self._shards))

    def _module(self, module_id: str) -> _Module:
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

    def _add(self, command: training_pb2.AddModule, begins: Sequence[Message] = ()) -> Future[None]:
        loads = Counter(module.shard for module in self._modules.values())
        number = choose_shard(
            [None if shard.down else loads[shard.number] for shard in self._shards],
            len(self._devices) or None,
        )
        if number == len(self._shards):
            self._start(self._devices[number] if self._devices else CPU)
        module_id = command.module_id
        module = self._modules[module_id] = _Module(number, command)

        def built(bodies: list[any_pb2.Any]) -> None:
            module.is_built = True
            if begins:
                self._keep(module_id, bodies)

        return self._put(number, f"module {module_id!r}", [command, *begins], built)

    def _set_up_again(self, shard: int) -> list[Message]:
        commands: list[Message] = []
        for module_id, module in self._modules.items():
            if module.shard == shard and module.is_built:
                commands.append(module.command)
                if module.kept is not None:
                    commands += restores(module_id, *module.kept)
        return commands

    def _consequences(self, shard: int) -> list[str]:
        said = []
        for module_id, module in self._modules.items():
            if module.shard == shard and module.updates:
                kept = module.kept_updates
                said.append(f"Module {module_id!r} goes back to update {kept} of {module.updates}.")
                module.updates, module.unkept = kept, 0
        return said


def places(shards: Mapping[str, int], gpus: Sequence[str], count: int) -> dict[str, Place]:
    """Places by module id.

    Args:
        shards: by module id.
        gpus: of the group; (): it is on the CPU.
        count: of shards, which computes on the first `count` GPUs.
    """
    share = len(gpus) / len(shards) if shards else 0.0
    return {key: Place(n, tuple(gpus[n::count]) or (CPU,), share) for key, n in shards.items()}


def choose_shard(loads: Sequence[int | None], most: int | None) -> int:
    """The shard for another module; the number after the last is a new one.

    Args:
        loads: numbers of modules by shard; None: it is down.
        most: the most shards; None: any number.

    Raises:
        ConfigError: all shards are down, and there can be no more.
    """
    open_ = [shard for shard, load in enumerate(loads) if load is not None]
    fewest = min(open_, key=lambda shard: loads[shard] or 0, default=None)
    if (fewest is None or loads[fewest]) and (most is None or len(loads) < most):
        return len(loads)
    if fewest is None:
        raise ConfigError("no shard is left that takes a module, and no device for another")
    return fewest


def _restoring(
    module_id: str, state: ModuleState | None = None, weights: Mapping[str, Tree] | None = None
) -> list[Message]:
    """Commands that restore a state, or replace weights, and return the state that follows."""
    tree, extra = state or ({DEFAULT_MODULE: weights or {}}, {})
    parts = restores(module_id, tree, extra, training_pb2.Restore(weights=state is None))
    return [*parts, training_pb2.Snapshot(module_id=module_id)]


def _state_in(_: str, bodies: Sequence[any_pb2.Any]) -> ModuleState:
    """The state in the replies to commands of which the last is a Snapshot."""
    reader, frame = state_reader(), None
    for body in bodies:
        if body.TypeName() == training_pb2.StateChunk.DESCRIPTOR.full_name:
            frame = reader.feed(body.value)
    assert frame is not None
    return ModuleState(cast(dict[str, Tree], frame.tree), json.loads(frame.header.extra))
