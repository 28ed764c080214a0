"""What workers say: read, and handed to whoever it is for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from google.protobuf import any_pb2

from juggler.driver.core import events
from juggler.driver.parts import RunParts
from juggler.driver.record.wording import Level
from juggler.driver.workers import replies
from juggler.driver.workers.learner_events import LearnerEvents
from juggler.driver.workers.runner_events import RunnerEvents
from juggler.envrunner.program import ENVRUNNER
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.hello import Rate, one_line
from juggler.runtime.actors.hub_events import HubEvent, Joined, Left, Replied, Reported, Worker
from juggler.runtime.actors.requests import Completed, RequestPool
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2

_LONGEST_REASON = 8000  # characters: it may tell two spaces
_NOTE = training_pb2.Note.DESCRIPTOR.full_name
#: A note counts as much as this many arrivals, so over eighty notes a second are too many. In a
#: minute, a gateway may send ten lines about arriving simulators and ten about leaving ones.
#: Another twenty may follow when the next minute begins.
_NOTE_COUNTS = 250


class WorkerEvents:
    """Reads what workers say, and hands it on: to `RunnerEvents`, `LearnerEvents`, or a part.

    A worker that says what cannot be understood is let go; the others do not notice.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._runners = RunnerEvents(parts)
        self._learners = LearnerEvents(parts)
        self._agents = parts.config.agent_names
        self._receipts_first = ReceiptsFirst(parts.commands.pool, parts.config.driver.synchronous)
        # Of those who are attached:
        self._failed_once: set[Worker] = set()
        self._let_go: set[Worker] = set()
        self._rates: dict[Worker, Rate] = {}

    def hear(self, event: HubEvent) -> None:
        """Something came from a worker, or a worker came or went."""
        if event.worker in self._let_go and not isinstance(event, Left):
            return  # what it had said by then
        for heard in self._receipts_first.in_order(event):
            try:
                self._hear(heard)
            except (TypeError, ValueError) as error:
                self._let_go.add(heard.worker)
                what = one_line(str(error), _LONGEST_REASON)
                reason = f"sent what cannot be understood: {what}"
                self._parts.departures.last_failure = f"It {reason}"
                self._parts.hub.dismiss(heard.worker, reason)

    def _hear(self, event: HubEvent) -> None:
        completions = self._parts.commands.pool.complete(event)
        if isinstance(event, Left):
            return self._left(event, completions)
        for completed in completions:
            if completed.failure is None:
                self._answered(completed, completed.body or any_pb2.Any())
            else:
                self._failed(completed, completed.failure.message)
        if isinstance(event, Joined):
            self._joined(event.worker)
        elif isinstance(event, Reported):
            self._reported(event.worker, event.body)

    def _joined(self, worker: Worker) -> None:
        parts = self._parts
        self._rates[worker] = Rate()
        parts.metrics.workers.joined(worker)
        self._set_up(parts.registry.joined(worker))

    def _reported(self, worker: Worker, body: any_pb2.Any) -> None:
        """Whoever it is may have a note for people; learners also report what arrived."""
        if worker.role == LEARNER and body.TypeName() != _NOTE:
            arrivals = replies.read_arrivals(body)
            self._rates[worker].count(len(arrivals.arrivals))
            return self._learners.arrived(worker, arrivals)
        self._rates[worker].count(_NOTE_COUNTS)
        note = replies.read_note(body)
        if note.HasField("simulators"):
            self._parts.metrics.workers.has_simulators(worker.worker_id, note.simulators)
        level: Level = "warning" if note.warning else "info"
        self._parts.progress.message(f"{worker.worker_id} {note.text}", level)

    def _answered(self, completed: Completed, body: any_pb2.Any) -> None:
        parts, worker, request = self._parts, completed.worker, completed.request
        if isinstance(request, training_pb2.Snapshot):
            if parts.league and parts.league.weights.take(
                completed.command_id, body.value, completed.last
            ):
                return
            module_id = request.module_id
            spaces = parts.registry.spaces.get(module_id)
            learned = parts.connectors[module_id].merged
            state = module_id, body.value, completed.last
            return parts.snapshots.take(
                *state, parts.core, parts.metrics, spaces, learned, parts.more_counters
            )
        if not completed.last:
            raise ValueError("a reply before the last where there is one alone")
        match request:
            case training_pb2.SampleRequest():
                known = self._agents, self._runners.is_module
                self._runners.sampled(worker, replies.read_receipt(request, body, *known))
            case training_pb2.Update():
                newest = self._newest(request.module_id)
                self._learners.updated(worker, replies.read_update_done(request, body, newest))
                self._runners.count_episodes()
            case training_pb2.Group():
                newest = self._newest(request.module_id)
                self._learners.formed(worker, replies.read_group_formed(request, body, newest))
            case training_pb2.Restore() | training_pb2.RemovePlayer() if worker.role != LEARNER:
                self._send_next_part(worker)
            case training_pb2.Setup() if worker.role != LEARNER:
                self._set_up(self._runners.ready(worker, replies.read_runner_ready(body)))
                self._send_next_part(worker)
            case training_pb2.AddPlayer():
                if parts.league:
                    parts.league.received(worker, request.module_id)
                self._send_next_part(worker)
            case training_pb2.AddModule():
                self._learners.ready(worker, replies.read_module_ready(request, body))
            case training_pb2.Evaluate():
                parts.local.of_use(worker.worker_id)
                known = self._agents, self._runners.is_module
                evaluation = replies.read_evaluation(request, body, *known)
                if parts.evaluations.is_of_it(request):
                    parts.evaluations.answered(worker, request, evaluation)
                elif parts.confirmation.evaluated(request, evaluation):
                    parts.end.stop("solved")
                if request.HasField("version"):
                    self._send_next_part(worker)

    def _send_next_part(self, worker: Worker) -> None:
        """Of what modules play with, or what is to follow it."""
        if (part := self._parts.frozen_parts.next(worker)) is not None:
            self._parts.commands.send(worker, part)

    def _newest(self, module_id: str) -> Version:
        """The version that nothing of this module can exceed by more than one update."""
        module = self._parts.core.module(module_id)
        return Version(module.generation, module.weights_version.update)

    def _failed(self, completed: Completed, reason: str) -> None:
        """It could not do what it was asked to. Our workers leave then; their farewell says why."""
        parts, worker, request = self._parts, completed.worker, completed.request
        key = worker.worker_id, worker.incarnation
        match request:
            case training_pb2.SampleRequest():
                parts.happened(events.SampleFailed(request.batch_id, *key, request.module_id))
            case training_pb2.Update():
                failed = events.UpdateFailed(request.update_id, *key, reason, request.module_id)
                parts.happened(failed)
            case training_pb2.Snapshot():
                if not (parts.league and parts.league.weights.abandoned(completed.command_id)):
                    parts.snapshots.abandon(request.module_id)
            case training_pb2.Evaluate():
                self._evaluates_no_more(worker)
        if worker in self._failed_once:
            parts.hub.dismiss(worker, f"failed again: {reason}")
        self._failed_once.add(worker)

    def _evaluates_no_more(self, worker: Worker) -> None:
        self._parts.evaluations.left(worker)
        self._parts.confirmation.left(worker)

    def _set_up(self, setups: list[tuple[Worker, training_pb2.Setup]]) -> None:
        for worker, setup in setups:
            if worker.role != LEARNER:
                self._parts.commands.send(worker, self._parts.frozen_parts.first(worker, setup))
                continue
            for command in self._learners.first_commands(worker, setup):
                self._parts.commands.send(worker, command)

    def _left(self, event: Left, unanswered: list[Completed]) -> None:
        parts, worker = self._parts, event.worker
        parts.metrics.workers.left(event)
        parts.registry.left(worker)
        parts.frozen_parts.left(worker)
        if parts.league:
            for each in unanswered:
                parts.league.weights.abandoned(each.command_id)
        for connectors in parts.connectors.values():
            connectors.left(worker)
        self._failed_once.discard(worker)
        self._let_go.discard(worker)
        self._rates.pop(worker, None)
        if worker.local:
            # It may hang, and must not stay at a post that a successor has to fill.
            after = 5.0 if event.farewell else 0.0
            parts.local.kill(worker.worker_id, worker.pid, after, abort=event.unheard)
        parts.departures.left(event)
        if not parts.end.reached:
            parts.callbacks.worker_lost(worker.worker_id, event.reason)
        if worker.role == ENVRUNNER:
            self._runners.left(event, replies.read_not_begun(event, unanswered))
        elif worker.role == LEARNER:
            self._learners.left(event)
        else:
            self._evaluates_no_more(worker)
            parts.confirmation.play()  # another one may be here


class ReceiptsFirst:
    """In synchronous mode, an update's receipts are heard before the learner's answer to it.

    Receipts tell which episodes ended and what connectors have learned, and the requests behind the
    update pass that on: nothing of it may depend on who is faster. Every receipt that is missing
    comes soon, since the learner has its batch, or its EnvRunner leaves.

    Args:
        pool: where requests are in flight.
        synchronous: else everything is heard as it comes.
    """

    def __init__(self, pool: RequestPool, synchronous: bool) -> None:
        self._pool = pool
        self._synchronous = synchronous
        self._early: deque[HubEvent] = deque()  # an answer, and what the learner said after it

    def in_order(self, event: HubEvent) -> Iterator[HubEvent]:
        """What is to be heard now that this event has come. The pool has to know of each of them
        before the next one is asked for."""
        if self._synchronous and event.worker.role == LEARNER:
            if isinstance(event, Left):  # nobody can wait for it any more
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
            isinstance(event, Replied)
            and isinstance(self._pool.asked(event), training_pb2.Update)
            and self._pool.has_in_flight(training_pb2.SampleRequest)
        )
