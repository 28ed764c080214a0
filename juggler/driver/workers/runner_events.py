"""What EnvRunners say, and what it means for the run."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

from juggler.driver.core import events
from juggler.driver.core.group import worker_order
from juggler.driver.parts import RunParts
from juggler.driver.workers.unreached_learners import UnreachedLearners
from juggler.envrunner.info_numbers import from_messages
from juggler.envrunner.program import ENVRUNNER, EVALUATOR
from juggler.runtime.actors.hub_events import Left, Worker
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2

#: The run ends if learners refuse this many batches of an EnvRunner and accept none in between.
_MOST_REFUSED: Final = 10


class RunnerEvents:
    """Books receipts, and what EnvRunners and evaluators say when they come and go."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._synchronous = parts.config.driver.synchronous
        # Those whose episodes are not counted yet, by EnvRunner and batch id.
        self._receipts: dict[tuple[str, int], training_pb2.Receipt] = {}
        self._unreached = UnreachedLearners()
        # By module and EnvRunner: refused batches since the last accepted one.
        self._refused: dict[str, Counter[str]] = defaultdict(Counter)

    def ready(
        self, worker: Worker, ready: training_pb2.Ready
    ) -> list[tuple[Worker, training_pb2.Setup]]:
        """Its environments are made, or those of an evaluator. Returns who can be set up now."""
        parts = self._parts
        parts.metrics.workers.ready(worker)
        setups = parts.registry.runner_ready(worker, ready)
        for module_id, module in parts.core.modules.items():
            if module.members:
                parts.commands.tell_learners(worker, module_id, module.generation)
        if worker.role == EVALUATOR:
            parts.confirmation.play()
        if worker.role == ENVRUNNER:
            steps = {module.module_id: module.rows * module.steps for module in ready.modules}
            parts.happened(events.RunnerJoined(worker.worker_id, worker.incarnation, steps))
        return setups

    def sampled(self, worker: Worker, receipt: training_pb2.Receipt) -> None:
        """A batch is with its learner, or is lost."""
        parts, module_id = self._parts, receipt.module_id
        parts.registry.must_fit_a_batch(module_id, receipt.live_steps)
        for played in receipt.played:
            if not self._may_play(played.module_id):
                raise ValueError(f"module {played.module_id[:100]!r} played, and is none to play")
        version = Version.of(receipt.version)
        # Before the core asks for more: requests tell what connectors have learned.
        connectors = parts.connectors[module_id]
        connectors.take(worker.worker_id, receipt.batch_id, receipt.connector_delta)
        if not self._synchronous:
            connectors.merge_waiting()
        parts.happened(
            events.SampleReceived(
                receipt.batch_id,
                worker.worker_id,
                worker.incarnation,
                receipt.learner,
                receipt.live_steps,
                version,
                receipt.dropped,
                receipt.stale_steps,
                module_id,
            )
        )
        if parts.league:
            parts.league.finished(worker, receipt.matches)
        elif receipt.matches:
            raise ValueError("the outcome of a match, and this run has no league")
        parts.metrics.workers.sampled(worker.worker_id, receipt.live_steps, version)
        for played in receipt.played:
            parts.metrics.played(played.module_id, played.steps)
        parts.metrics.workers.spent(worker.worker_id, receipt.seconds)
        parts.metrics.workers.counted(worker.worker_id, receipt.counts)
        if receipt.HasField("simulators"):
            parts.metrics.workers.has_simulators(worker.worker_id, receipt.simulators)
        parts.stale_runners[module_id].brought(worker.worker_id, receipt.stale_steps)
        self._look_whether_it_arrived(worker, receipt)
        if receipt.dropped:
            self._count_episodes_of_others(receipt)
            # A learner that is lost or not reached is told of elsewhere. Who has numbers that are
            # not finite leaves because of them, and says so.
            if receipt.dropped == "refused":
                self._is_refused(worker, receipt)
            elif receipt.dropped not in ("learner_lost", "nonfinite"):
                parts.progress.message(f"{worker.worker_id}: {receipt.explanation}", "warning")
            return
        self._refused[module_id].clear()
        parts.local.of_use(worker.worker_id)
        self._receipts[worker.worker_id, receipt.batch_id] = receipt
        if not self._synchronous:
            self.count_episodes()

    def _look_whether_it_arrived(self, worker: Worker, receipt: training_pb2.Receipt) -> None:
        learner = self._parts.registry.attached.get(receipt.learner)
        if learner is None:
            return
        if not receipt.dropped:
            return self._unreached.brought(worker, learner)
        if receipt.dropped == "learner_lost":
            generation = self._parts.core.modules[receipt.module_id].generation
            text = self._unreached.lost(worker, learner, generation, receipt.explanation)
            if text:
                self._parts.progress.message(text, "warning")

    def _is_refused(self, worker: Worker, receipt: training_pb2.Receipt) -> None:
        """Log a refused batch. End the run after too many in a row."""
        parts, refused = self._parts, self._refused[receipt.module_id]
        refused[worker.worker_id] += 1
        parts.progress.message(f"{worker.worker_id}: {receipt.explanation}", "warning")
        if refused[worker.worker_id] == _MOST_REFUSED:
            parts.end.fail(
                f"{receipt.learner} has refused {_MOST_REFUSED} batches of {worker.worker_id} in a "
                f"row, and taken no others. The last reason: {receipt.explanation}"
            )

    def is_module(self, module_id: str) -> bool:
        """Whether it is a module of the run, trained or not, or was one until a moment ago."""
        return module_id in self._parts.core.modules or self._may_play(module_id)

    def _may_play(self, module_id: str) -> bool:
        """Whether it is not trained, and plays, or did until a moment ago."""
        parts = self._parts
        if parts.league and module_id in parts.league.retired:
            return True
        return module_id in parts.registry.frozen or module_id in parts.config.others

    def count_episodes(self) -> None:
        """In order of EnvRunners and requests: in synchronous mode nothing may depend on who is
        faster."""
        order = sorted(self._receipts, key=lambda key: (worker_order(key[0]), key[1]))
        receipts = [self._receipts.pop(key) for key in order]
        if self._parts.end.reached and not self._synchronous:
            return  # the summary says what the run had reached when it was stopped
        for receipt in receipts:
            self._count(receipt)

    def _count(self, receipt: training_pb2.Receipt) -> None:
        """With several agents, an episode of the run is one of an environment, and its return the
        sum of all agents' returns."""
        metrics, ended = self._parts.metrics, (receipt.episode_returns, receipt.episode_lengths)
        metrics.info_numbers(from_messages(receipt.infos))
        if not self._parts.config.played_by:
            return metrics.episodes_ended(*ended)
        self._count_episodes_of_others(receipt)
        metrics.agents_ended(receipt.module_id, *ended)
        metrics.episodes_ended(receipt.env_returns, receipt.env_lengths)
        for of_agent in receipt.agent_returns:
            metrics.agent_ended(of_agent.agent, of_agent.returns)

    def _count_episodes_of_others(self, receipt: training_pb2.Receipt) -> None:
        for played in receipt.played:
            self._parts.metrics.agents_ended(
                played.module_id, played.episode_returns, played.episode_lengths
            )

    def left(self, event: Left, not_begun: frozenset[int]) -> None:
        """
        Args:
            event: that it is gone.
            not_begun: batches that it was asked for and made no step of.
        """
        parts, worker = self._parts, event.worker
        for stale_runners in parts.stale_runners.values():
            stale_runners.left(worker.worker_id)
        self._unreached.left(worker)
        if parts.league:
            parts.league.left(worker)
        key = worker.worker_id, worker.incarnation
        parts.happened(events.RunnerLeft(*key, event.reason, not_begun))
        if parts.departures.hopeless(event):
            parts.end.fail(f"{worker.worker_id} could not start: {event.reason}")
