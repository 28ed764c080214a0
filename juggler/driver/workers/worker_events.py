"""Reads workers' messages, and books them or passes them on."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message

from juggler.driver.core import events
from juggler.driver.core.group import worker_order
from juggler.driver.reporting.wording import Level
from juggler.driver.run_parts import RunParts
from juggler.driver.workers.trained_modules import used_batches
from juggler.envrunner.envrunner_program import ENVRUNNER
from juggler.envrunner.info_numbers import from_messages, keep_newest
from juggler.learner.process.learner_program import LEARNER
from juggler.runtime.actors.hub import (
    HubEvent,
    Worker,
    WorkerJoined,
    WorkerLeft,
    WorkerReplied,
    WorkerReported,
    one_line,
)
from juggler.runtime.actors.requests import Completed, RequestPool
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

M = TypeVar("M", bound=Message)

_LONGEST_REASON: Final = 8000  # characters: it may describe two spaces
_LONGEST_TEXT: Final = 1000
_TEXTS: Final = ("description", "explanation", "hopeless", "peer_lost", "text", "why_alone")
_NOTE: Final = training_pb2.Note.DESCRIPTOR.full_name
_MOST_REFUSED: Final = 10  # consecutive refused batches of an EnvRunner that end the run
#: EnvRunners may notice a lost learner before the driver does; within this time it has left.
_GRACE_SECONDS: Final = 5.0
_AGAIN_SECONDS: Final = 60.0


def read(packed: any_pb2.Any, message: M) -> M:
    """Read an answer or a report; texts become one line each.

    Raises:
        TypeError: it is another message.
        ValueError: it is not a message.
    """
    kind: Any = message.DESCRIPTOR
    if not packed.Is(kind):
        raise TypeError(f"{packed.TypeName()[:100] or 'nothing'} instead of {kind.full_name}")
    try:
        message.ParseFromString(packed.value)
    except DecodeError as error:
        raise ValueError(f"bytes that are not a {kind.full_name}") from error
    for name in _TEXTS:
        if name in kind.fields_by_name:
            setattr(message, name, one_line(getattr(message, name), _LONGEST_TEXT))
    return message


class WorkerEvents:
    """Reads workers' messages, and books them or passes them on."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._synchronous = parts.config.driver.synchronous
        # Receipts whose episodes are not counted yet, by EnvRunner and batch id.
        self._receipts: dict[tuple[str, int], training_pb2.Receipt] = {}
        # By EnvRunner and learner: the generation of the learners' group, the time of the first
        # lost batch since one arrived or a warning, and whether there was a warning.
        self._unreached: dict[tuple[Worker, Worker], tuple[int, float, bool]] = {}
        # By module and EnvRunner: refused batches since the last accepted one.
        self._refused: dict[str, Counter[str]] = defaultdict(Counter)
        self._receipts_first = ReceiptOrder(parts.commands.pool, self._synchronous)
        # Parts for attached workers:
        self._failed_once: set[Worker] = set()
        self._dismissed: set[Worker] = set()

    def handle(self, event: HubEvent) -> None:
        """Handle an event of a worker."""
        if event.worker in self._dismissed and not isinstance(event, WorkerLeft):
            return  # a message from before its dismissal
        for each in self._receipts_first.in_order(event):
            try:
                self._handle(each)
            except (TypeError, ValueError) as error:
                self._dismissed.add(each.worker)
                what = one_line(str(error), _LONGEST_REASON)
                reason = f"sent an invalid message: {what}"
                self._parts.departures.last_failure = f"It {reason}"
                self._parts.hub.dismiss(each.worker, reason)

    def _handle(self, event: HubEvent) -> None:
        completions = self._parts.commands.pool.complete(event)
        if isinstance(event, WorkerLeft):
            return self._left(event, completions)
        for completed in completions:
            if completed.failure is None:
                self._answered(completed, completed.body or any_pb2.Any())
            else:
                self._failed(completed, completed.failure.message)
        if isinstance(event, WorkerJoined):
            self._parts.metrics.workers.joined(event.worker)
            self._set_up(self._parts.registry.joined(event.worker))
        elif isinstance(event, WorkerReported):
            self._reported(event.worker, event.body)

    def _reported(self, worker: Worker, body: any_pb2.Any) -> None:
        """Handle a worker's report: a message for people, or arrived batches."""
        if worker.role == LEARNER and body.TypeName() != _NOTE:
            return self._arrived(worker, read(body, training_pb2.Arrivals()))
        note = read(body, training_pb2.Note())
        if note.HasField("simulators"):
            self._parts.metrics.workers.has_simulators(worker.worker_id, note.simulators)
        level: Level = "warning" if note.warning else "info"
        self._parts.progress.message(f"{worker.worker_id} {note.text}", level)

    def _answered(self, completed: Completed, body: any_pb2.Any) -> None:
        parts, worker, request = self._parts, completed.worker, completed.request
        if isinstance(request, training_pb2.Snapshot):
            if request.whole:
                assert parts.league is not None
                number = completed.command_id
                return parts.league.receive(number, body.value, completed.last)
            return parts.checkpoints.add_chunk(request.module_id, body.value, completed.last)
        # States apart, each request has one answer.
        match request:
            case training_pb2.SampleRequest():
                self._sampled(worker, read(body, training_pb2.Receipt()))
            case training_pb2.Update() if request.metrics_only:
                self._last_metrics(worker, read(body, training_pb2.UpdateDone()))
            case training_pb2.Update():
                done = read(body, training_pb2.UpdateDone())
                self._must_not_be_ahead(request.module_id, Version.of(done.version))
                self._updated(worker, done)
                self._count_episodes()
            case training_pb2.Group():
                formed = read(body, training_pb2.GroupFormed())
                self._must_not_be_ahead(request.module_id, Version(0, formed.update))
                self._formed(worker, formed)
            # Parts are sent one by one: each answer lets the next one go.
            case training_pb2.Restore() | training_pb2.RemovePlayer() if worker.role != LEARNER:
                parts.frozen_parts.send_next(worker)
            case training_pb2.Setup() if worker.role != LEARNER:
                self._set_up(self._runner_ready(worker, read(body, training_pb2.Ready())))
                parts.frozen_parts.send_next(worker)
            case training_pb2.AddPlayer():
                if parts.league:
                    parts.league.received(worker, request.module_id)
                parts.frozen_parts.send_next(worker)
            case training_pb2.AddModule():
                self._learner_ready(worker, read(body, training_pb2.ModuleReady()))
            # Candidates and evaluations share the evaluators.
            case training_pb2.Evaluate():
                parts.local.supervisor.of_use(worker.worker_id)
                evaluation = read(body, training_pb2.Evaluation())
                parts.evaluations.answered(worker, request, evaluation)

    def _must_not_be_ahead(self, module_id: str, version: Version) -> None:
        """Reject a version that no weights can have: requests would wait forever."""
        module = self._parts.core.module(module_id)
        newest = Version(module.generation, module.weights_version.update)
        if version.generation > newest.generation or version.update > newest.update + 1:
            raise ValueError(f"weights of {version}, but the newest can be one after {newest}")

    def _failed(self, completed: Completed, reason: str) -> None:
        """Handle a failed request; its worker usually leaves."""
        parts, worker, request = self._parts, completed.worker, completed.request
        key = worker.worker_id, worker.incarnation
        match request:
            case training_pb2.SampleRequest():
                parts.happened(events.SampleFailed(request.batch_id, *key, request.module_id))
            case training_pb2.Update() if not request.metrics_only:
                failed = events.UpdateAborted(request.update_id, *key, reason, request.module_id)
                parts.happened(failed)
            case training_pb2.Snapshot():
                if request.whole:
                    assert parts.league is not None
                    parts.league.abandoned(completed.command_id)
                else:
                    # Another learner may be asked, or a later checkpoint made.
                    parts.checkpoints.abandon(request.module_id)
            case training_pb2.Evaluate():
                parts.evaluations.left(worker)
        if worker in self._failed_once:
            parts.hub.dismiss(worker, f"failed again: {reason}")
        self._failed_once.add(worker)

    def _set_up(self, setups: list[tuple[Worker, training_pb2.Setup]]) -> None:
        for worker, setup in setups:
            if worker.role != LEARNER:
                setup.steps_trained = self._parts.core.trained
                self._parts.frozen_parts.set_up(worker, setup)
                continue
            self._parts.commands.send(worker, setup)
            for module_id in self._parts.registry.hosting.modules_of(worker.index):
                for command in self._parts.modules[module_id].begin(worker, setup.seed):
                    self._parts.commands.send(worker, command)

    def _left(self, event: WorkerLeft, unanswered: list[Completed]) -> None:
        parts, worker = self._parts, event.worker
        parts.metrics.workers.left(event)
        parts.registry.left(worker)
        parts.frozen_parts.left(worker)
        if parts.league:
            for each in unanswered:
                parts.league.abandoned(each.command_id)
        for module in parts.modules.values():
            module.connectors.left(worker)
        self._failed_once.discard(worker)
        self._dismissed.discard(worker)
        if worker.local:
            # It may hang, and its successor needs its place.
            after = 5.0 if event.farewell else 0.0
            supervisor = parts.local.supervisor
            supervisor.kill(worker.worker_id, worker.pid, after, abort=event.unresponsive)
        parts.departures.left(event)
        if not parts.end.reached:
            parts.callbacks.note("on_worker_lost", worker.worker_id, event.reason)
        if worker.role == ENVRUNNER:
            self._runner_left(event, unanswered)
        if worker.role == LEARNER:
            self._learner_left(event)
        else:
            parts.evaluations.left(worker)

    # -- EnvRunners -------------------------------------------------------------------------------

    def _runner_ready(
        self, worker: Worker, ready: training_pb2.Ready
    ) -> list[tuple[Worker, training_pb2.Setup]]:
        """Handle a ready worker; return workers to set up now."""
        parts = self._parts
        parts.metrics.workers.ready(worker)
        setups = parts.registry.runner_ready(worker, ready)
        parts.evaluations.play_candidate()
        # Evaluators play checkpoints, and need no learner.
        if worker.role == ENVRUNNER:
            for module_id, module in parts.core.modules.items():
                if module.members:
                    parts.commands.send_learners(worker, module_id, module.generation)
            steps = {module.module_id: module.rows * module.steps for module in ready.modules}
            parts.happened(events.RunnerJoined(worker.worker_id, worker.incarnation, steps))
        return setups

    def _sampled(self, worker: Worker, receipt: training_pb2.Receipt) -> None:
        """Book a receipt: a batch is at its learner, or lost."""
        parts, module_id = self._parts, receipt.module_id
        version = Version.of(receipt.version)
        # Before the core sends requests, which carry the state of connectors.
        connectors = parts.modules[module_id].connectors
        connectors.add_delta(worker.worker_id, receipt.batch_id, receipt.connector_delta)
        if not self._synchronous:
            connectors.merge_waiting()
        # Before anything is counted: an invalid receipt raises here.
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
        # Dropped steps were sampled, too.
        parts.metrics.workers.worked(worker.worker_id, receipt.live_steps, version)
        for played in receipt.played:
            parts.metrics.of(played.module_id).played += played.steps
        parts.metrics.workers.spent(worker.worker_id, receipt.seconds)
        parts.metrics.workers.counted(worker.worker_id, receipt.counts)
        if receipt.HasField("simulators"):
            parts.metrics.workers.has_simulators(worker.worker_id, receipt.simulators)
        parts.modules[module_id].stale_runners.brought(worker.worker_id, receipt.stale_steps)
        self._check_arrival(worker, receipt)
        if receipt.dropped:
            self._count_episodes_of_others(receipt)
            # A learner that is lost or not reached is reported elsewhere, and a worker with
            # non-finite numbers leaves and reports them.
            if receipt.dropped == "refused":
                self._is_refused(worker, receipt)
            elif receipt.dropped not in ("learner_lost", "nonfinite"):
                parts.progress.message(f"{worker.worker_id}: {receipt.explanation}", "warning")
            return
        self._refused[module_id].clear()
        parts.local.supervisor.of_use(worker.worker_id)
        self._receipts[worker.worker_id, receipt.batch_id] = receipt
        if not self._synchronous:
            self._count_episodes()

    def _check_arrival(self, worker: Worker, receipt: training_pb2.Receipt) -> None:
        """Warn if batches of an EnvRunner do not reach a learner.

        While a new group of learners forms, they accept no batches.
        """
        learner = self._parts.registry.attached.get(receipt.learner)
        if learner is None:
            return
        if not receipt.dropped:
            self._unreached.pop((worker, learner), None)
        if receipt.dropped != "learner_lost":
            return
        # EnvRunners may notice a lost learner before the driver does.
        generation, now = self._parts.core.modules[receipt.module_id].generation, time.monotonic()
        before, since, shown = self._unreached.get((worker, learner), (-1, now, False))
        if before != generation:
            self._unreached[worker, learner] = (generation, now, False)
        elif now - since >= (_AGAIN_SECONDS if shown else _GRACE_SECONDS):
            self._unreached[worker, learner] = (generation, now, True)
            where = ", ".join(learner.data_addresses)
            self._parts.progress.message(
                f"batches of {worker.worker_id} on {worker.host} do not reach {learner.worker_id} "
                f"on {learner.host} at {where}: {receipt.explanation}. They are dropped "
                f"(learner_lost), and updates wait for that learner. Can {worker.host} reach that "
                "address? A learner needs --bind, and --advertise if it is known by another "
                "address; with TLS, its certificate must name it",
                "warning",
            )

    def _is_refused(self, worker: Worker, receipt: training_pb2.Receipt) -> None:
        """Log a refused batch; end the run after many."""
        parts, refused = self._parts, self._refused[receipt.module_id]
        refused[worker.worker_id] += 1
        parts.progress.message(f"{worker.worker_id}: {receipt.explanation}", "warning")
        if refused[worker.worker_id] == _MOST_REFUSED:
            parts.end.fail(
                f"{receipt.learner} has refused {_MOST_REFUSED} batches of {worker.worker_id} in a "
                f"row, and accepted no others. The last reason: {receipt.explanation}"
            )

    def _count_episodes(self) -> None:
        """Count episodes in order of EnvRunners and requests, for reproducible runs."""
        order = sorted(self._receipts, key=lambda key: (worker_order(key[0]), key[1]))
        receipts = [self._receipts.pop(key) for key in order]
        if self._parts.end.reached and not self._synchronous:
            return  # the summary has the state at the time of the stop
        for receipt in receipts:
            self._count(receipt)

    def _count(self, receipt: training_pb2.Receipt) -> None:
        """Count a receipt's episodes; several agents' returns add up."""
        metrics, ended = self._parts.metrics, (receipt.episode_returns, receipt.episode_lengths)
        keep_newest(metrics.infos, from_messages(receipt.infos))
        if not self._parts.config.played_by:
            return metrics.episodes_ended(*ended)
        self._count_episodes_of_others(receipt)
        metrics.of(receipt.module_id).episodes_ended(*ended)
        metrics.episodes_ended(receipt.env_returns, receipt.env_lengths)
        for of_agent in receipt.agent_returns:
            metrics.of_agent(of_agent.agent).episodes_ended(of_agent.returns)

    def _count_episodes_of_others(self, receipt: training_pb2.Receipt) -> None:
        for played in receipt.played:
            metrics = self._parts.metrics.of(played.module_id)
            metrics.episodes_ended(played.episode_returns, played.episode_lengths)

    def _runner_left(self, event: WorkerLeft, unanswered: Iterable[Completed]) -> None:
        """Handle a lost EnvRunner; its last answers name begun requests."""
        not_begun = frozenset(
            each.request.batch_id
            for each in unanswered
            if isinstance(each.request, training_pb2.SampleRequest)
            and event.farewell
            and each.command_id not in event.unanswered
        )
        parts, worker = self._parts, event.worker
        # Its successor is another process, perhaps on another host.
        for module in parts.modules.values():
            module.stale_runners.left(worker.worker_id)
        self._unreached = {
            pair: each for pair, each in self._unreached.items() if worker not in pair
        }
        # Other EnvRunners play its matches again.
        if parts.league:
            parts.league.left(worker)
        key = worker.worker_id, worker.incarnation
        parts.happened(events.RunnerLeft(*key, event.reason, not_begun))
        if parts.departures.hopeless(event):
            parts.end.fail(f"{worker.worker_id} could not start: {event.reason}")

    # -- learners ---------------------------------------------------------------------------------

    def _learner_ready(self, worker: Worker, ready: training_pb2.ModuleReady) -> None:
        """Handle a learner that has the first weights of a module."""
        parts, module_id = self._parts, ready.module_id
        parts.metrics.workers.ready(worker)
        if refusal := parts.registry.why_no_member(worker, ready):
            return parts.hub.dismiss(worker, refusal)
        learners = parts.modules[module_id]
        for command in learners.reset_again(worker, ready):
            parts.commands.send(worker, command)
        for kept in learners.ready(worker, ready):
            self._made(kept, {})
        parts.registry.learner_ready(worker, ready)
        parts.trained.learner_ready()
        parts.happened(events.LearnerJoined(worker.worker_id, worker.incarnation, module_id))

    def _formed(self, worker: Worker, formed: training_pb2.GroupFormed) -> None:
        """Handle a learner that has met its group, or could not."""
        met = self._parts.modules[formed.module_id].met(worker, formed)
        if met is not None:
            self._parts.happened(met)
        if self._parts.league:
            self._parts.league.check()

    def _arrived(self, worker: Worker, message: training_pb2.Arrivals) -> None:
        """Book batches that arrived at a learner."""
        parts, module_id = self._parts, message.module_id
        if module_id not in parts.modules:
            return  # a player that has left: its books are closed
        key = worker.worker_id, worker.incarnation
        for arrival in message.arrivals:
            parts.happened(
                events.BatchArrived(*key, arrival.batch_id, arrival.live_steps, module_id)
            )

    def _updated(self, worker: Worker, done: training_pb2.UpdateDone) -> None:
        """Book a learner's share of an update."""
        parts, worker_id, module_id = self._parts, worker.worker_id, done.module_id
        used = used_batches(done)
        version = Version.of(done.version)
        if done.peer_lost:  # a new member may have none of the group's updates
            version = parts.core.modules[module_id].weights_version
        # A checkpoint of this update has what connectors learned before it.
        for module in parts.modules.values():
            module.connectors.merge_waiting()
        updating = parts.core.modules[module_id].ledger.updating
        parts.modules[module_id].stale_runners.answered(used, updating)
        key = worker_id, worker.incarnation
        metrics = {key: each.values for key, each in done.metrics.items()}
        finished = events.UpdateFinished(done.update_id, *key, version, used, module_id)
        self._made(finished, metrics)
        parts.local.supervisor.of_use(worker_id)
        parts.modules[module_id].updated(worker, done)
        # After the booking, which raises if the answer is invalid.
        trained = [batch for batch in used if not batch.dropped]
        for batch in trained:
            parts.metrics.batch_consumed(module_id, batch.staleness)
        steps = sum(batch.live_steps for batch in trained)
        parts.metrics.workers.worked(worker_id, steps, version)
        if parts.league:
            parts.league.trained(module_id, steps)
        parts.metrics.updated(worker_id, module_id, metrics)
        self._measured(worker, done)

    def _last_metrics(self, worker: Worker, done: training_pb2.UpdateDone) -> None:
        """Store the metrics of updates that earlier answers did not have."""
        metrics = {key: each.values for key, each in done.metrics.items()}
        # Numbers that are only measured at some updates stay.
        self._parts.metrics.updated(worker.worker_id, done.module_id, metrics, keep=True)
        self._measured(worker, done)

    def _measured(self, worker: Worker, done: training_pb2.UpdateDone) -> None:
        metrics = self._parts.metrics
        metrics.workers.spent(worker.worker_id, done.seconds)
        metrics.replayed(worker.worker_id, done.module_id, done.replay)
        if done.hopeless:
            self._hopeless(worker, done.module_id, done.hopeless)

    def _hopeless(self, worker: Worker, module_id: str, why: str) -> None:
        """End the run, or fail the learner if other modules train.

        The state of the learner is good, so it writes the last checkpoint when the run ends.
        """
        modules, end = self._parts.core.modules, self._parts.end
        failure = f"{worker.worker_id} cannot improve {why}"
        others = {name for each in modules.values() for name in each.members}
        has_others = bool(others - set(modules[module_id].members))
        if end.reached and has_others:
            self._parts.progress.message(failure, "error")
        elif end.reason == "solved":
            pass  # its weights are good
        elif end.reached:
            end.failed_at(failure)
        elif has_others:
            # A dismissed worker may come back with the same state, and fail in every update.
            self._parts.commands.send(worker, attach_pb2.Stop(failure=why))
        else:
            end.fail(failure, "learner_lost")

    def _made(
        self,
        update: events.UpdateFinished | events.UnreportedUpdate,
        metrics: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Book an update, and call callbacks once per group."""
        module = self._parts.core.modules[update.module_id]
        before = module.weights_version
        self._parts.happened(update)
        if module.weights_version != before:
            self._parts.metrics.updates += 1
            self._parts.callbacks.updated(update.module_id, metrics)

    def _learner_left(self, event: WorkerLeft) -> None:
        """Handle a lost learner, and end a run without any."""
        parts, worker = self._parts, event.worker
        parts.checkpoints.left(worker.worker_id)
        parts.metrics.learner_left(worker.worker_id)
        for module in parts.modules.values():
            module.left(worker)
        parts.happened(events.LearnerLeft(worker.worker_id, worker.incarnation, event.reason))
        if parts.league:
            parts.league.check()
        if event.failure and not parts.core.members:
            parts.end.fail(f"{worker.worker_id} is lost: {event.reason}", "learner_lost")


class ReceiptOrder:
    """Orders receipts before answers to their updates, in synchronous mode.

    Receipts report ended episodes and the connectors' state, and the requests after the update
    pass that on: none of it may depend on speed. Every missing receipt comes soon, since the
    learner has its batch, or its EnvRunner leaves.
    """

    def __init__(self, pool: RequestPool, synchronous: bool) -> None:
        self._pool = pool
        self._synchronous = synchronous
        self._early: deque[HubEvent] = deque()  # an answer, and later messages of the same learner

    def in_order(self, event: HubEvent) -> Iterator[HubEvent]:
        """Yield events to handle now; the pool must know each first."""
        if self._synchronous and event.worker.role == LEARNER:
            if isinstance(event, WorkerLeft):  # no command waits for it any more
                yield from self._early
                self._early.clear()
            elif self._early or self._comes_early(event):
                self._early.append(event)
                return
        yield event
        while self._early and not self._pool.has_in_flight(training_pb2.SampleRequest):
            yield self._early.popleft()

    def _comes_early(self, event: HubEvent) -> bool:
        return (
            isinstance(event, WorkerReplied)
            and isinstance(asked := self._pool.asked(event), training_pb2.Update)
            # At the end of a run, requests in flight may never be answered.
            and not asked.metrics_only
            and self._pool.has_in_flight(training_pb2.SampleRequest)
        )
