"""What learners say, and what it means for the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from google.protobuf.message import Message

from juggler.driver.core import events
from juggler.driver.parts import RunParts
from juggler.driver.workers.replies import used_batches
from juggler.runtime.actors.hub_events import Left, Worker
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


class LearnerEvents:
    """Books arrivals and updates, and what learners say when they come and go."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts

    def first_commands(self, worker: Worker, setup: training_pb2.Setup) -> Iterator[Message]:
        """What a learner process is told before anything else: its setup, once, and then of each
        module that it is to host."""
        yield setup
        for module_id in self._parts.registry.modules_of(worker.index):
            yield from self._parts.learners[module_id].begin(worker, setup.seed)

    def ready(self, worker: Worker, ready: training_pb2.ModuleReady) -> None:
        """It has what one of its modules begins with."""
        parts, module_id = self._parts, ready.module_id
        parts.metrics.workers.ready(worker)
        if refusal := parts.registry.why_no_member(worker, ready):
            return parts.hub.dismiss(worker, refusal)
        learners = parts.learners[module_id]
        for command in learners.reset_again(worker, ready):
            parts.commands.send(worker, command)
        for kept in learners.ready(worker, ready):
            self._made(kept, {})
        parts.registry.learner_ready(worker, ready)
        parts.trained.learner_ready()
        parts.happened(events.LearnerJoined(worker.worker_id, worker.incarnation, module_id))

    def formed(self, worker: Worker, formed: training_pb2.GroupFormed) -> None:
        """It has met the others of its group, or could not."""
        met = self._parts.learners[formed.module_id].met(worker, formed)
        if met is not None:
            self._parts.happened(met)
        if self._parts.league:
            self._parts.league.look()

    def arrived(self, worker: Worker, message: training_pb2.Arrivals) -> None:
        """Batches are with it."""
        parts, module_id = self._parts, message.module_id
        if parts.league and module_id in parts.league.retired and module_id not in parts.learners:
            return  # a player that has left: its books are closed
        key = worker.worker_id, worker.incarnation
        for arrival in message.arrivals:
            parts.registry.must_fit_a_batch(module_id, arrival.live_steps)
            parts.happened(events.Arrived(*key, arrival.batch_id, arrival.live_steps, module_id))

    def updated(self, worker: Worker, done: training_pb2.UpdateDone) -> None:
        """It has made its share of an update."""
        parts, worker_id, module_id = self._parts, worker.worker_id, done.module_id
        used = used_batches(done)
        for batch in used:
            parts.registry.must_fit_a_batch(module_id, batch.live_steps)
        version = Version.of(done.version)
        if done.peer_lost:  # weights of its own: a new member may have none of the group's updates
            version = parts.core.modules[module_id].weights_version
        for connectors in parts.connectors.values():
            connectors.merge_waiting()
        parts.stale_runners[module_id].answered(used, parts.core.modules[module_id].ledger.updating)
        key = worker_id, worker.incarnation
        metrics = {key: each.values for key, each in done.metrics.items()}
        finished = events.UpdateFinished(done.update_id, *key, version, used, module_id)
        self._made(finished, metrics)
        parts.local.of_use(worker_id)
        parts.learners[module_id].updated(worker_id, done)
        trained = [batch for batch in used if not batch.dropped]
        for batch in trained:
            parts.metrics.batch_consumed(module_id, batch.staleness)
        steps = sum(batch.live_steps for batch in trained)
        parts.metrics.workers.trained(worker_id, steps, version)
        if parts.league:
            parts.league.trained(module_id, steps)
        parts.metrics.workers.spent(worker_id, done.seconds)
        parts.metrics.updated(worker_id, module_id, metrics)
        parts.metrics.replayed(worker_id, module_id, done.replay)
        if done.hopeless:
            self._hopeless(worker, module_id, done.hopeless)

    def _hopeless(self, worker: Worker, module_id: str, why: str) -> None:
        """End the run, or have the learner fail if other modules still train.

        The state of the learner is good, so it writes the last checkpoint when the run ends.
        """
        modules = self._parts.core.modules
        others = {name for each in modules.values() for name in each.members}
        if others - set(modules[module_id].members):
            # A dismissed worker may come back with its state, in which every update fails.
            self._parts.commands.send(worker, attach_pb2.Stop(failure=why))
        else:
            self._parts.end.fail(f"{worker.worker_id} cannot improve {why}", "learner_lost")

    def _made(
        self,
        update: events.UpdateFinished | events.UnheardUpdate,
        metrics: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Book an update, and tell callbacks of it, once where several learners made it."""
        module = self._parts.core.modules[update.module_id]
        before = module.weights_version
        self._parts.happened(update)
        if module.weights_version != before:
            self._parts.callbacks.updated(update.module_id, metrics)

    def left(self, event: Left) -> None:
        """The batches that it held are lost. If it failed and no module has a learner left, the
        next one would fail in the same way: that ends the run."""
        parts, worker = self._parts, event.worker
        parts.checkpointing.left(worker.worker_id)
        parts.metrics.learner_left(worker.worker_id)
        for learners in parts.learners.values():
            learners.left(worker)
        parts.happened(events.LearnerLeft(worker.worker_id, worker.incarnation, event.reason))
        if parts.league:
            parts.league.look()
        if event.failure and not parts.core.members:
            parts.end.fail(f"{worker.worker_id} is lost: {event.reason}", "learner_lost")
