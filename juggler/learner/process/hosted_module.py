"""One module of a learner process: its learner, batches, versions and counters."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final

from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.core.state import StateMismatch
from juggler.learner.data.batch_store import BatchStore, HeldBatch
from juggler.learner.data.clipped_actions import CLIPPED, ClippedActions
from juggler.learner.group.membership import Membership
from juggler.learner.group.peers import PeerLost
from juggler.learner.learner import Learner
from juggler.learner.process.overlap import (
    InTurn,
    Overlapped,
    PendingMetrics,
    Share,
    works_by_itself,
)
from juggler.learner.process.program import critic_space_of
from juggler.learner.process.state_handover import StateHandover
from juggler.runtime.checkpoints.weights import weights_in
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.streams.weights_publisher import WeightsPublisher
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

#: What helps a run that cannot continue from its checkpoint.
REMEDY: Final = (
    "Restore the files and the settings that it was made with, or begin a new run with the "
    "parameters that still fit: --from and --from-parameters"
)


class HostedModule:
    """A module of a learner process, with a method for each command of the driver.

    Attributes:
        module_id: of the module.
        learner: trains it.
        membership: its group of learners.
        store: batches that wait for an update.
        updating: does the work around updates.
        handover: passes the module's state to the next program if this one loses its driver.
    """

    def __init__(
        self,
        command: training_pb2.AddModule,
        learner: Learner,
        membership: Membership,
        publisher: WeightsPublisher,
        handover: StateHandover,
        arrived: Callable[[HeldBatch], None],
        warn: Callable[[str], None],
        next_update: Callable[[], training_pb2.Update | None],
        updates_in_flight: int,
    ) -> None:
        """Args:
        command: the command that added the module.
        arrived: called for each batch that was taken, in the server's thread.
        warn: called with each warning for people.
        next_update: returns the next update command, if it has arrived already.
        updates_in_flight: the most unanswered updates.
        """
        self.module_id = command.module_id
        self.learner = learner
        self.membership = membership
        self.handover = handover
        self._publisher = publisher
        self._next_update = next_update
        self._updates_in_flight = updates_in_flight
        spaces = (
            space_from_message(command.observation_space),
            space_from_message(command.action_space),
        )
        states = {self.module_id: learner.example_states()}
        critic = critic_space_of(command)
        self.store = BatchStore(
            {self.module_id: spaces},
            arrived,
            states=states,
            critic_spaces={} if critic is None else {self.module_id: critic},
        )
        learner.check_serves("episodes")
        self.updating = InTurn(learner, self._give_out)
        if works_by_itself(learner.device):
            self.updating = Overlapped(learner, self._give_out, self._coming)
        self._generation = 0
        self._joined = False  # a group has formed
        self._published = Version(0, 0)
        self._restoring: FrameReader[training_pb2.StateHeader] | None = None
        self._has_newer = False  # than the state that the driver may restore before the group forms
        self._template: list[EpisodeBatch] = []  # one batch of an earlier update
        self._steps_trained = 0  # also of steps that a replay keeps to learn from
        self._steps_dropped = 0
        self._metrics = PendingMetrics(self.module_id)
        self._clipped, self._warn = ClippedActions(self.module_id, spaces[1]), warn

    @property
    def version(self) -> Version:
        """Of the learner's weights."""
        return Version(self._generation, self.learner.updates)

    def take_over(
        self, run_id: str, command: training_pb2.AddModule, ready: training_pb2.ModuleReady
    ) -> None:
        """Continue from the previous program's state, if the driver has a use for it."""
        version = self.handover.take_over(self.learner, run_id, command, ready)
        if version is not None:
            self._generation, self._has_newer = version.generation, True

    def close(self) -> None:
        """End the threads of updates, leave the group, and withdraw the weights."""
        self.updating.close()
        self.learner.leave()
        self._publisher.withdraw(self.module_id)

    # -- its state --------------------------------------------------------------------------------

    def restore(self, part: training_pb2.Restore) -> None:
        """Take a part of a state to continue from.

        Raises:
            ValueError: this is not a state for this learner, which stays as it was.
        """
        if self._has_newer:
            self._has_newer = not part.last
            return
        if self._restoring is None:
            limits = Limits(payload_bytes=part.state_bytes)
            self._restoring = FrameReader(training_pb2.StateHeader, limits, digests=True)
        frame = self._restoring.feed(part.chunk)
        if not part.last:
            return
        self._restoring = None
        if frame is None or not isinstance(frame.tree, dict):
            raise ValueError("the state to continue from is not complete")
        if not part.weights:
            extras = json.loads(frame.header.extra)
            return go_on_with(self.learner, frame.tree, extras, self.module_id)
        weights = frame.tree[DEFAULT_MODULE]
        if part.source:
            begin_with(
                self.learner,
                weights,
                part.source,
                whole=part.whole,
                selectable=part.selectable,
            )
        else:
            self.learner.set_weights(weights, whole=part.whole)

    def snapshot(self, command: training_pb2.Snapshot) -> Iterator[bytes]:
        """Its state, or only its weights, as a frame that later updates do not change."""
        tree: dict[str, Tree]
        if command.weights:
            tree, extra = {DEFAULT_MODULE: self.learner.get_weights()}, "{}"
        elif command.whole:
            tree, extra = {**weights_in(self.learner.save()[0], acting=True)}, "{}"
        else:
            tree, saved = self.learner.save()
            extra = json.dumps(saved)
            self.publish_news()  # at any time: they may be the run's last
        header = training_pb2.StateHeader(
            module_id=self.module_id, version=self.version.message(), extra=extra
        )
        return encode_frame(header, tree, digest=True)

    def publish_news(self) -> None:
        """Publish its weights, if their version is a new one and EnvRunners may act with them."""
        if self._joined and self.version != self._published and not self.membership.lost:
            self._publish()

    # -- its group --------------------------------------------------------------------------------

    def join(
        self, group: training_pb2.Group, superseded: Callable[[], bool]
    ) -> training_pb2.GroupFormed:
        """Join a group, which begins with the state of the member with the most updates."""
        self.updating.forget()
        self._has_newer = False  # what comes from here on is of a reset
        if not self._joined:
            self._joined = True
            self.store.serve(joined=group.generation)
        formed = self.membership.form(group, self.learner, superseded)
        self._generation = group.generation
        self.handover.weights_known = True
        if not formed.peer_lost:
            self._publish()
        return formed

    @property
    def serves(self) -> bool:
        """Whether EnvRunners should send it batches."""
        return self._joined and not self.membership.lost

    # -- updates ----------------------------------------------------------------------------------

    def update(
        self,
        update: training_pb2.Update,
        seconds: MutableMapping[str, float],
        *,
        publishes: bool = True,
    ) -> training_pb2.UpdateDone:
        """Make an update.

        Args:
            update: names the batches.
            seconds: how the process spent its time; this update's time is added.
            publishes: whether to publish the weights that it makes.

        Raises:
            ValueError: an exact update is impossible, or the core has no schedule that it sets.
        """
        self.learner.use_values(update.values)
        started, collated = time.perf_counter(), self.learner.collate_seconds
        batches, missing = self.store.pop(update.batch_ids)
        done = training_pb2.UpdateDone(module_id=self.module_id, update_id=update.update_id)
        if update.exact:
            metrics = self._make_exactly(update, batches, missing, done)
            updated = time.perf_counter()
        else:
            before, taken_in = self.learner.updates, self.learner.taken_in()
            share = self._due(batches)
            if share is not None:
                try:
                    sample = self.updating.sample(share)
                    # A replay that is still filling up gives nothing to learn from.
                    if found := self.learner.step(sample):
                        self._metrics.add(found)
                    self.updating.made()
                except PeerLost as error:
                    self.membership.lose(self.learner, str(error))
            done.peer_lost = self.membership.lost
            is_kept = self.learner.taken_in() > taken_in
            self._book(done, batches, missing, before, is_kept=is_kept)
            updated = time.perf_counter()
            has_learned = share is not None and not done.peer_lost
            if (
                publishes
                and has_learned
                and self.learner.updates % self.learner.config.weights_interval == 0
            ):
                self._publish()
            # Twice a second is enough, so this is measured only when other metrics are sent.
            if metrics := self._metrics.take(self.learner.updates):
                metrics |= self._clipped_in(batches)
        self._complete(done, metrics, seconds)
        collated = self.learner.collate_seconds - collated
        seconds["collate"] += collated
        seconds["update"] += updated - started - collated
        seconds["publish"] += time.perf_counter() - updated
        return done

    def _complete(
        self,
        done: training_pb2.UpdateDone,
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
    ) -> None:
        """Complete an answer with what every answer has, and keep it in case the driver misses
        it."""
        # Also while a replay fills, and there is nothing to learn from.
        done.replay.update(self.learner.books_of_samples())
        if metrics:
            done.metrics[self.module_id].values.update(metrics)
        if metrics or done.replay:
            done.seconds.update(seconds)
        done.hopeless = self._metrics.hopeless
        done.version.CopyFrom(self.version.message())
        self.handover.updated(done, self._updates_in_flight)
        done.steps_trained = self._steps_trained
        done.steps_dropped = self._steps_dropped

    def discard(self, batch_ids: Iterable[int]) -> None:
        """Discard these batches."""
        dropped, _missing = self.store.pop(batch_ids)
        self._steps_dropped += sum(batch.live_steps for batch in dropped)

    def _make_exactly(
        self,
        update: training_pb2.Update,
        batches: list[HeldBatch],
        missing: list[int],
        done: training_pb2.UpdateDone,
    ) -> dict[str, float]:
        """Update on all of these batches, or fail; returns the metrics of this update."""
        if missing:
            raise ValueError(f"batches {missing} are not here")
        updated = self.learner.update_from_episodes(
            [batch.modules[self.module_id] for batch in batches],
            minibatch_size=update.minibatch_size or None,
            num_epochs=update.num_epochs or None,
        )
        metrics = fetch_metrics(updated)
        if metrics.get("skipped") == 1.0:
            self.learner.forget()  # or samples that are not saved would be used again
            raise ValueError(
                "the loss or its gradients were not finite, so this update changed nothing. "
                "Lower lr, or check the episodes"
            )
        for batch in batches:
            done.batches.add(batch_id=batch.batch_id, live_steps=batch.live_steps)
            self._steps_trained += batch.live_steps
        return metrics

    def _book(
        self,
        done: training_pb2.UpdateDone,
        batches: Iterable[HeldBatch],
        missing: Iterable[int],
        update: int,
        *,
        is_kept: bool,
    ) -> None:
        """Book the batches of an update in its answer.

        Args:
            done: the answer, which gets an entry for each batch.
            batches: found in the store.
            missing: ids of the others.
            update: the number of the weights that the update started from.
            is_kept: whether a replay has them, to learn from even if this update has failed.
        """
        for batch in batches:
            staleness = batch.staleness(update)
            used = done.batches.add(
                batch_id=batch.batch_id, live_steps=batch.live_steps, staleness=staleness
            )
            if staleness > self.learner.config.max_staleness:
                used.dropped = "stale"
            elif done.peer_lost and not is_kept:
                used.dropped = "learner_lost"
            if used.dropped:
                self._steps_dropped += batch.live_steps
            else:
                self._steps_trained += batch.live_steps
        for batch_id in missing:
            done.batches.add(batch_id=batch_id, dropped="restart")

    def _due(self, batches: list[HeldBatch]) -> Share | None:
        """The share of the update that is made now; None: no batch is fresh enough, or the group is
        lost, so that the update makes no weights."""
        share = self._share(batches, self.learner.updates)
        episodes = share.episodes
        if self.learner.in_group:
            # The others cannot continue without this learner, even if it has no fresh batch: it
            # takes part with a batch without a live step.
            others = [batch.modules[self.module_id] for batch in batches[:1]] or self._template
            episodes = episodes or [each.silenced() for each in others]
            self._template = list(episodes[:1])
        if not episodes or self.membership.lost:
            return None
        return share._replace(episodes=episodes)

    def _share(self, batches: list[HeldBatch], update: int) -> Share:
        """The batches that are fresh enough for an update that starts from these weights."""
        most = self.learner.config.max_staleness
        fresh = [batch for batch in batches if batch.staleness(update) <= most]
        episodes = [batch.modules[self.module_id] for batch in fresh]
        return Share([batch.batch_id for batch in fresh], episodes)

    def _clipped_in(self, batches: list[HeldBatch]) -> dict[str, float]:
        """Measure the share of clipped actions; {}: the actions have no bounds."""
        share = self._clipped.share(batch.modules[self.module_id] for batch in batches)
        if share is None:
            return {}
        if note := self._clipped.note(share):
            self._warn(note)
        return {CLIPPED: share}

    def _coming(self) -> Share | None:
        """The share of the next update, if this one makes new weights; None if no update has been
        asked for yet, or none of its batches will be fresh."""
        update = self._next_update()
        if update is None or update.exact or update.module_id != self.module_id:
            return None
        share = self._share(self.store.peek(update.batch_ids), self.learner.updates + 1)
        return share if share.batch_ids else None

    def _publish(self) -> None:
        self.updating.publish(self.version)
        self._published = self.version

    def _give_out(self, version: Version, weights: dict[str, Tree]) -> None:
        self._publisher.publish(version, {self.module_id: weights}, self.module_id)


def go_on_with(learner: Learner, tree: Tree, extras: Mapping[str, Any], module_id: str) -> None:
    """Have a learner continue from a state that its run has saved.

    Raises:
        StateMismatch: it is of another network, optimizer, algorithm or pipeline.
    """
    try:
        learner.restore(tree, extras)
    except StateMismatch as error:
        raise StateMismatch(
            f"module {module_id!r}: the run cannot go on from its checkpoint: {error}. {REMEDY}"
        ) from error


def begin_with(
    learner: Learner, weights: Mapping[str, Tree], source: str, *, whole: bool, selectable: bool
) -> None:
    """Have a learner begin with weights from elsewhere.

    Args:
        weights: name -> array.
        source: where they are from, for errors: a key with its value, or words.
        whole: whether missing weights are an error.
        selectable: the key `from_parameters` can have only some of them taken.

    Raises:
        ValueError: they do not fit the module.
    """
    try:
        learner.set_weights(weights, whole=whole)
    except ValueError as error:
        hint = ". They are of another network, or of other observations or actions" if whole else ""
        if whole and selectable:
            hint += ". To take only some, name them in from_parameters"
        raise ValueError(f"{source}: {error}{hint}") from error
