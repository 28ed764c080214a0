"""LearnerGroup: many modules, each trained by an algorithm of its own, over shards of devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import numpy as np

from juggler.driver.config import ConfigError
from juggler.driver.learner_group.modules import GroupModules, Spec
from juggler.driver.learner_group.placement import Place
from juggler.driver.learner_group.results import ModuleState, ModuleUpdate, UpdateHandle
from juggler.driver.learner_group.shard import Job
from juggler.learner.config import Passes, given_passes
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.columns import COLUMNS, batch_of_columns
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.nearest import nearest
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import episodes_pb2, training_pb2

#: Batches of episodes by module id.
Episodes = Mapping[str, Sequence[EpisodeBatch]]
#: Columns by name, by module id.
Columns = Mapping[str, Mapping[str, Any]]


class LearnerGroup:
    """Trains many modules at once, each with its own algorithm, learning rate and model.

    They are spread over shards: processes, with a device each. A shard updates its modules one
    after the other, in the order in which that was asked for, and waits for no other shard.
    Modules come and go while the others go on.

    To be made in a thread that lives as long as the group, as the processes die with it, and closed
    in the end, which `with` does. Its methods may be called in any thread, but not in a callback of
    a handle.
    """

    def __init__(
        self,
        modules: Mapping[str, Spec],
        *,
        devices: str = "auto",
        seed: int = 0,
        updates_in_flight: int = 2,
        snapshot_updates: int = 100,
        hang_seconds: float = 120.0,
    ) -> None:
        """Args:
            modules: by id, a `LearnerSpec` or its fields by name.
            devices: as a run's: "auto" (all GPUs of this host, or its CPU), "cpu" (a process for
                each module), or several with commas, such as "cuda:0,cuda:1"; "fake:4" are four
                processes on the CPU that stand for GPUs.
            seed: of what specs have no seed for.
            updates_in_flight: updates that a shard may have unfinished.
            snapshot_updates: after so many updates of a module its state is fetched, for a process
                that takes the place of one that died.
            hang_seconds: a shard that makes no progress for so long is killed and replaced.

        Raises:
            ConfigError: something of that cannot be; names it, and the nearest that can.
            LearnerGroupError: a shard could not build a module, or could not start.
        """
        if updates_in_flight < 1:
            raise ConfigError(f"updates_in_flight = {updates_in_flight}: must be at least 1")
        self._updates_in_flight = updates_in_flight
        self._batch_ids = itertools.count(1)
        self._modules = GroupModules(
            modules, devices, seed, snapshot_updates, hang_seconds, updates_in_flight
        )
        self._shards = self._modules.shards
        self._changed = self._shards.changed

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
        """One update of each of these modules, on episodes of its own.

        Where a shard has `updates_in_flight` unfinished, or is being started again, this waits
        until it has room; the other shards get their share first.

        Args:
            episodes: batches by module id; copied before this returns.
            async_update: return as soon as all shards have been asked.
            passes: `minibatch_size` and `num_epochs`, as for `Learner.update_from_batch`.

        Returns:
            By module id, metrics and counts; with `async_update` a handle, whose `result(timeout)`
            waits for them, and whose `done()` says whether it would.

        Raises:
            ValueError: there is no such module, or there are no episodes.
            UpdateFailed: a module could not update; has what became of the others. Of a handle, its
                `result` raises it.
        """
        passes = given_passes(passes)
        shares = self._shares(episodes)
        handle = UpdateHandle(episodes)
        like = training_pb2.Update(exact=True, **passes)
        while shares:
            with self._changed:
                self._changed.wait_for(lambda: any(map(self._has_room, shares)))
                self._shards.must_run()
                shard = next(filter(self._has_room, shares))
                sender = self._shards.links[shard].sender
                asked = [
                    (module_id, batches, self._ask(shard, module_id, len(batches), like, handle))
                    for module_id, batches in shares.pop(shard).items()
                ]
            for module_id, batches, batch_ids in asked:
                for batch_id, batch in zip(batch_ids, batches, strict=True):
                    self._send(shard, sender, module_id, batch_id, batch)
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
        """The same on columns that are put together already.

        Args:
            batch: by module id, arrays by column, as `juggler.Learner` takes them: docs/learners.md
                lists them.
            async_update: as for `update_from_episodes`.
            passes: the same.

        Raises:
            ValueError: as `update_from_episodes`; or a column is missing, unknown, or does not fit
                the others. What does not fit the module is told in an UpdateFailed.
        """
        if not isinstance(batch, Mapping) or not batch:
            raise ValueError("no batch: give columns by name, by module id")
        episodes = {module_id: [_episodes(module_id, each)] for module_id, each in batch.items()}
        done: dict[str, ModuleUpdate] | UpdateHandle
        done = self.update_from_episodes(episodes, async_update=async_update, **passes)
        return done

    def _shares(self, episodes: Episodes) -> dict[int, dict[str, list[EpisodeBatch]]]:
        """By shard, its modules' batches."""
        if not isinstance(episodes, Mapping) or not episodes:
            raise ValueError("no episodes: give lists of EpisodeBatch by module id")
        shares: dict[int, dict[str, list[EpisodeBatch]]] = {}
        for module_id, batches in episodes.items():
            with self._changed:
                share = shares.setdefault(self._modules.shard_of(module_id), {})
            given = list(batches) if isinstance(batches, Sequence) else []
            if not given or not all(isinstance(each, EpisodeBatch) for each in given):
                raise ValueError(
                    f"module {module_id!r} needs a list of EpisodeBatch, with at least one in it"
                )
            share[module_id] = given
        return shares

    def _has_room(self, shard: int) -> bool:
        """Whether to go on with an update of this shard, be it to hear that it cannot be."""
        link = self._shards.links[shard]
        there = link.set_up and link.updates < self._updates_in_flight
        return there or bool(link.down or self._shards.over)

    def _ask(
        self,
        shard: int,
        module_id: str,
        batches: int,
        like: training_pb2.Update,
        handle: UpdateHandle,
    ) -> list[int]:
        """Have an update like this one made of so many batches; their ids."""
        batch_ids = [next(self._batch_ids) for _ in range(batches)]
        update = training_pb2.Update(module_id=module_id, batch_ids=batch_ids)
        update.MergeFrom(like)
        job = Job(
            module_id,
            f"update of {module_id!r}",
            [update],
            partial(self._modules.updated, module_id),
            update=handle,
            unsettled=set(batch_ids),
        )
        job.ended.add_done_callback(partial(handle.end, module_id))
        self._shards.put(shard, job)
        return batch_ids

    def _send(
        self,
        shard: int,
        sender: EpisodeSender | None,
        module_id: str,
        batch_id: int,
        batch: EpisodeBatch,
    ) -> None:
        header = episodes_pb2.BatchHeader(
            module_id=module_id,
            batch_id=batch_id,
            live_steps=batch.live_steps,
            permit=self._shards.permits.of(batch_id, module_id),
        )
        try:
            if sender is not None:  # else the shard is down, and the job over
                sender.send(header, {module_id: tree_map(np.copy, batch.to_tree())})
        except ValueError as error:  # what cannot be sent, or a process that is gone by now
            self._shards.settled(shard, batch_id, "refused", str(error))

    # -- what modules have come to ----------------------------------------------------------------

    def get_weights(self, module_ids: Iterable[str] | None = None) -> dict[str, dict[str, Tree]]:
        """What acting needs, name -> array by module id, as all updates asked for before make it.

        Args:
            module_ids: none: of all.

        Raises:
            ValueError: there is no such module.
            ShardLost: its process died meanwhile.
        """
        states: Any = self._modules.fetch(module_ids, weights=True)
        return {key: dict(state.tree[DEFAULT_MODULE]) for key, state in states.items()}

    def set_weights(self, weights: Mapping[str, Mapping[str, Tree]]) -> None:
        """Modules go on with weights from elsewhere, such as `juggler.read_weights` gives, behind
        the updates that were asked for before. What these lack stays as it is; the optimizer begins
        anew, kept samples are discarded, and the count of updates goes on.

        Args:
            weights: name -> array by module id.

        Raises:
            ValueError: there is no such module.
            LearnerGroupError: a module has no such weights; it is as it was.
            ShardLost: its process died meanwhile.
        """
        self._modules.set_weights(weights)

    def save(self, module_ids: Iterable[str] | None = None) -> dict[str, ModuleState]:
        """All that `restore` needs, by module id, as all updates asked for before make it.

        Args, Raises: as `get_weights`.
        """
        return self._modules.fetch(module_ids, weights=False)

    def restore(self, states: Mapping[str, ModuleState]) -> None:
        """Modules go on from where they were saved, or others with the same spec were.

        Raises:
            ValueError: there is no such module.
            LearnerGroupError: a state is another algorithm's or module's; that module is as it was.
            ShardLost: its process died meanwhile.
        """
        self._modules.restore(states)

    # -- who is there -----------------------------------------------------------------------------

    def add_module(
        self,
        module_id: str,
        spec: Spec,
        *,
        weights: Mapping[str, Tree] | None = None,
        state: ModuleState | None = None,
    ) -> None:
        """A further module: on a device that is free, else where there are fewest.

        Args:
            module_id: that no module has.
            spec: as at first.
            weights: to begin with, such as another module's `get_weights` gives. What they lack is
                drawn from the seed; the optimizer begins anew.
            state: to go on from, such as `save` gives; of the same algorithm.

        Raises:
            ConfigError: the id is taken, or something in the spec cannot be.
            LearnerGroupError: the shard could not build it, or it cannot begin with that.
        """
        self._modules.add(module_id, spec, weights, state)

    def remove_module(self, module_id: str) -> None:
        """Let go of a module, behind the updates that were asked for before.

        Raises:
            ValueError: there is no such module.
        """
        self._modules.remove(module_id)

    @property
    def placement(self) -> dict[str, Place]:
        """By module id: the number of its shard, the shard's devices, of which it computes on the
        first, and the module's share of them."""
        return self._modules.places()

    def close(self) -> None:
        """Wait for what is in flight, and end the processes."""
        try:
            with self._changed:
                self._shards.wait_until_idle()
        finally:
            self._shards.close(at_once=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:  # nobody waits for what is in flight
            self._shards.close(at_once=True)


def _episodes(module_id: str, columns: Mapping[str, Any]) -> EpisodeBatch:
    """
    Raises:
        ValueError: these are not the columns of a batch of episodes, or there are others.
    """
    for name in columns:
        if name not in COLUMNS:
            raise ValueError(f"{module_id}: nobody knows a column {name!r}{nearest(name, COLUMNS)}")
    return batch_of_columns(columns, module_id)
