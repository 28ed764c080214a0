"""The modules of a LearnerGroup: which shard has each, and what it would go on from."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf import any_pb2
from google.protobuf.message import Message

from juggler.driver.checkpoint.restoring import restores
from juggler.driver.config import ConfigError
from juggler.driver.learner_group.placement import CPU, Place, Placement
from juggler.driver.learner_group.results import (
    LearnerGroupError,
    ModuleState,
    ModuleUpdate,
    ShardLost,
)
from juggler.driver.learner_group.shard import Job
from juggler.driver.learner_group.shards import Shards
from juggler.driver.learner_group.spec import LearnerSpec
from juggler.learner.process.devices import AUTO, parse_devices
from juggler.runtime.actors.seeds import worker_seed
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

Spec = LearnerSpec | Mapping[str, Any]


@dataclass(slots=True)
class _Module:
    """A module of the group.

    Attributes:
        spec: how it is trained.
        seed: that it begins with.
        kept: the newest that is known of it, for a process that takes the place of another one;
            None: there is only the seed.
        weights: whether `kept` holds weights alone.
        updates: that it has made.
        unkept: updates since its state was last asked for.
    """

    spec: LearnerSpec
    seed: int
    kept: ModuleState | None = None
    weights: bool = False
    updates: int = 0
    unkept: int = 0

    def keep(self, state: ModuleState) -> None:
        self.kept, self.weights = state, False

    @property
    def kept_updates(self) -> int:
        return 0 if self.kept is None or self.weights else int(self.kept.extra["updates"])


class GroupModules:
    """Modules by id, and the shards that they are on.

    What a shard is told here, and what it answers, changes nothing but under `shards.changed`.
    """

    def __init__(
        self,
        modules: Mapping[str, Spec],
        devices: str,
        seed: int,
        snapshot_updates: int,
        hang_seconds: float,
        updates_in_flight: int,
    ) -> None:
        """As `LearnerGroup`."""
        if snapshot_updates < 1:
            raise ConfigError(f"snapshot_updates = {snapshot_updates}: must be at least 1")
        if seed < 0:
            raise ConfigError(f"seed = {seed}: must be at least 0")
        if not modules:
            raise ConfigError("a learner group needs at least one module")
        self._seed = seed
        self._snapshot_updates = snapshot_updates
        self._modules: dict[str, _Module] = {}  # those that their shards have
        names = _device_names(devices)
        members = {module_id: self._member(module_id, spec) for module_id, spec in modules.items()}
        self.shards = Shards(hang_seconds, updates_in_flight, self._as_before, self._lost)
        try:
            self._start(names, members)
        except BaseException:
            self.shards.close(at_once=True)
            raise

    def shard_of(self, module_id: str) -> int:
        """Raises:
        ValueError: there is no such module.
        """
        self.shards.must_run()
        if module_id not in self._modules:
            raise ValueError(f"there is no module {module_id!r}{nearest(module_id, self._modules)}")
        return self._placement.shard_of(module_id)

    def places(self) -> dict[str, Place]:
        with self.shards.changed:
            places = self._placement.places()
            return {key: place for key, place in places.items() if key in self._modules}

    def add(
        self,
        module_id: str,
        given: Spec,
        weights: Mapping[str, Tree] | None,
        state: ModuleState | None,
    ) -> None:
        """As `LearnerGroup.add_module`."""
        if weights is not None and state is not None:
            raise ConfigError(f"module {module_id!r}: give weights or state, not both")
        member = self._member(module_id, given)
        member.kept = state if weights is None else _state_of(weights)
        member.weights = weights is not None
        member.updates = member.kept_updates
        with self.shards.changed:
            self.shards.must_run()
            if module_id in self._placement:
                raise ConfigError(f"module {module_id!r} is there already")
            for number, link in self.shards.links.items():
                if link.down:
                    self._placement.close(number)
            shard = self._placement.add(module_id)
            if shard not in self.shards.links:
                self.shards.start(shard, self._placement.device_of(shard))
            added = self._put(shard, self._adding(module_id, member))
        try:
            added.result()
        except BaseException:
            with self.shards.changed:
                self._placement.remove(module_id)
                # It may have been built, and could not begin with what it was given.
                self._put(shard, _removing(module_id))
            raise

    def remove(self, module_id: str) -> None:
        """As `LearnerGroup.remove_module`."""
        with self.shards.changed:
            shard = self.shard_of(module_id)
            del self._modules[module_id]
            removed = self._put(shard, _removing(module_id))
        try:
            removed.result()
        except ShardLost:
            pass  # and the module with it: the next process will not have it
        finally:
            with self.shards.changed:
                self._placement.remove(module_id)

    def fetch(self, module_ids: Iterable[str] | None, *, weights: bool) -> dict[str, ModuleState]:
        """Of these modules, or all, as the updates asked for before make them."""
        with self.shards.changed:
            self.shards.must_run()
            wanted = list(self._modules if module_ids is None else module_ids)
            shards = [self.shard_of(module_id) for module_id in wanted]
            fetched = [
                self._put(shard, self._fetching(module_id, weights=weights))
                for module_id, shard in zip(wanted, shards, strict=True)
            ]
        return dict(zip(wanted, _results(fetched), strict=True))

    def set_weights(self, weights: Mapping[str, Mapping[str, Tree]]) -> None:
        """As `LearnerGroup.set_weights`."""
        with self.shards.changed:
            shards = [self.shard_of(module_id) for module_id in weights]
            put = []
            for shard, (module_id, arrays) in zip(shards, weights.items(), strict=True):
                commands = _restores(module_id, _state_of(arrays), weights=True)
                job = Job(module_id, f"weights for {module_id!r}", commands)
                put.append(self._put(shard, job))
                # What a process that takes this one's place is to go on from.
                put.append(self._put(shard, self._fetching(module_id, weights=False)))
        _results(put)

    def restore(self, states: Mapping[str, ModuleState]) -> None:
        """As `LearnerGroup.restore`."""
        with self.shards.changed:
            shards = [self.shard_of(module_id) for module_id in states]
            restored = [
                self._put(shard, self._restoring(module_id, state))
                for shard, (module_id, state) in zip(shards, states.items(), strict=True)
            ]
        _results(restored)

    def updated(self, module_id: str, replies: Sequence[any_pb2.Any]) -> ModuleUpdate:
        """A module has made an update."""
        done = ModuleUpdate.of(module_id, replies)
        member = self._modules.get(module_id)
        if member is not None:
            shard = self._placement.shard_of(module_id)
            self.shards.of_use(shard)
            member.updates = done.updates
            member.unkept += 1
            if member.unkept >= self._snapshot_updates:
                member.unkept = 0
                self._put(shard, self._fetching(module_id, weights=False))
        return done

    # -- at first, and again ----------------------------------------------------------------------

    def _member(self, module_id: str, given: Spec) -> _Module:
        """
        Raises:
            ConfigError: it cannot be.
        """
        where = f"module {module_id!r}"
        if not isinstance(module_id, str) or not module_id:
            raise ConfigError(f"{where}: an id is a string of at least one character")
        spec = LearnerSpec.of(given, where)
        seed = worker_seed(self._seed, "module", zlib.crc32(module_id.encode()))
        spec.command(module_id, seed)  # what cannot be is told before anything begins
        return _Module(spec, seed)

    def _start(self, names: list[str], members: Mapping[str, _Module]) -> None:
        changed, shards = self.shards.changed, self.shards
        if names == [AUTO]:
            with changed:
                first = shards.start(0, AUTO)
                changed.wait_for(lambda: first.worker is not None or first.lost or shards.over)
                if first.worker is None:
                    raise ShardLost(first.lost or shards.over)
                names = list(first.worker.devices)
        with changed:
            self._placement = Placement([] if names == [CPU] else names, members)
            for shard in range(len(self._placement)):
                device = self._placement.device_of(shard)
                if shard in shards.links:
                    shards.links[shard].device = device
                else:
                    shards.start(shard, device)
            added = [
                self._put(shard, self._adding(module_id, member))
                for module_id, member in members.items()
                for shard in [self._placement.shard_of(module_id)]
            ]
        _results(added)

    def _as_before(self, shard: int) -> list[Job]:
        """Jobs that give a new process the modules of its predecessor."""
        return [self._adding(module_id, self._modules[module_id]) for module_id in self._on(shard)]

    def _lost(self, shard: int) -> str:
        """A process is gone: what that means for its modules."""
        said = []
        for module_id in self._on(shard):
            member = self._modules[module_id]
            if member.updates:
                back = f"update {member.kept_updates} of {member.updates}"
                said.append(f"Module {module_id!r} goes back to {back}.")
            member.updates, member.unkept = member.kept_updates, 0
        return " ".join(said)

    def _on(self, shard: int) -> list[str]:
        """Modules that a shard has."""
        if not self._modules:
            return []
        return [key for key in self._placement.modules_on(shard) if key in self._modules]

    # -- jobs -------------------------------------------------------------------------------------

    def _put(self, shard: int, job: Job) -> Future[Any]:
        self.shards.put(shard, job)
        return job.ended

    def _adding(self, module_id: str, member: _Module) -> Job:
        requests: list[Message] = [member.spec.command(module_id, member.seed)]
        if member.kept is not None:
            requests += _restores(module_id, member.kept, weights=member.weights)

        def added(_: object) -> None:
            self._modules[module_id] = member

        return Job(module_id, f"module {module_id!r}", requests, added)

    def _fetching(self, module_id: str, *, weights: bool) -> Job:
        request = training_pb2.Snapshot(module_id=module_id, weights=weights)
        what = "weights" if weights else "state"
        then = ModuleState.of if weights else partial(self._saved, module_id)
        return Job(module_id, f"{what} of {module_id!r}", [request], then)

    def _saved(self, module_id: str, replies: Sequence[any_pb2.Any]) -> ModuleState:
        state = ModuleState.of(replies)
        if (member := self._modules.get(module_id)) is not None:
            member.keep(state)
        return state

    def _restoring(self, module_id: str, state: ModuleState) -> Job:
        def restored(_: object) -> None:
            if (member := self._modules.get(module_id)) is not None:
                member.keep(state)
                member.updates = member.kept_updates

        requests = _restores(module_id, state, weights=False)
        return Job(module_id, f"restore of {module_id!r}", requests, restored)


def _state_of(weights: Mapping[str, Tree]) -> ModuleState:
    """Weights alone, as what a module goes on from."""
    return ModuleState({DEFAULT_MODULE: weights}, {})


def _restores(module_id: str, state: ModuleState, *, weights: bool) -> list[training_pb2.Restore]:
    last = training_pb2.Restore(weights=weights)
    return list(restores(module_id, state.tree, state.extra, last))


def _removing(module_id: str) -> Job:
    request = training_pb2.RemoveModule(module_id=module_id)
    return Job(module_id, f"removal of {module_id!r}", [request])


def _device_names(devices: str) -> list[str]:
    """
    Raises:
        ConfigError: one of them is none.
    """
    try:
        names = parse_devices(devices)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if AUTO in names and len(names) > 1:
        raise ConfigError(f"devices = {devices!r}: auto stands alone, for all GPUs of this host")
    return names


def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    """
    Raises:
        LearnerGroupError: of the first that failed, once all of them are over.
    """
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        assert isinstance(errors[0], LearnerGroupError)
        raise errors[0]
    return [future.result() for future in futures]
