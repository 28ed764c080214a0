"""What workers say, and what that means: for the core as events, and for the run as a whole."""

from __future__ import annotations

from google.protobuf import any_pb2

from juggler.driver.checkpoint.beginning import Beginning
from juggler.driver.checkpoint.checkpointing import Checkpointing
from juggler.driver.checkpoint.restoring import connectors_of, core_of, metrics_of
from juggler.driver.checkpoint.snapshots import SnapshotWriter
from juggler.driver.config import RunConfig
from juggler.driver.core import events
from juggler.driver.core.group import worker_order
from juggler.driver.record.progress import Progress
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.confirmation import Confirmation
from juggler.driver.workers.departures import Departures, inset
from juggler.driver.workers.evaluations import Evaluations
from juggler.driver.workers.learners import Learners
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.receipts_first import ReceiptsFirst
from juggler.driver.workers.registry import WorkerRegistry
from juggler.driver.workers.replies import (
    read_arrivals,
    read_evaluation,
    read_group_formed,
    read_module_ready,
    read_not_begun,
    read_note,
    read_receipt,
    read_runner_ready,
    read_update_done,
    used_batches,
)
from juggler.driver.workers.stale_runners import StaleRunners
from juggler.envrunner.program import ENVRUNNER, EVALUATOR
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.hello import Rate, one_line
from juggler.runtime.actors.hub import Hub
from juggler.runtime.actors.hub_events import HubEvent, Joined, Left, Reported, Worker
from juggler.runtime.actors.requests import Completed
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2

_LONGEST_REASON = 8000  # characters: of spaces, two may be told
_NOTE_COUNTS = 1000  # as much as so many arrivals: twenty notes in a second are too many


class WorkerEvents:
    """What workers say, and what that means for the run.

    It decides nothing about batches: `core` does.

    Attributes:
        core: what becomes of batches.
        registry: who is here.
        commands: what workers are told.
        checkpointing: when the run's state is cut.
        confirmation: whether the run is solved.
        metrics: what receipts and updates said.
        connectors: what the EnvRunners' connectors have learned.
        stop_reason: why the run should end; "" while it should go on.
        failure: what failed, where that is why it ends.
        stale_runners: whose steps come too late.
        evaluations: what the evaluator is asked for.
        learners: as a group.
    """

    def __init__(
        self,
        config: RunConfig,
        hub: Hub,
        local: LocalWorkers,
        progress: Progress,
        snapshots: SnapshotWriter,
        resume: Checkpoint | None,
        only_local: bool,
        beginning: Beginning | None = None,
    ) -> None:
        self.core = core_of(config, resume)
        most_learners = config.driver.most_learners(dialled=not only_local)
        self.registry = WorkerRegistry(config, self.updates, most_learners)
        self.metrics = metrics_of(resume)
        self.connectors = connectors_of(resume, beginning)
        self.stop_reason = ""
        self.failure = ""
        self.commands = CommandSender(hub, self.registry, self.connectors)
        self.checkpointing = Checkpointing(
            config.driver, self.core, self.registry, self.commands, snapshots, self.updates
        )
        self.stale_runners = StaleRunners(config.learner.max_staleness)
        self.learners = Learners(
            config, self.core, self.registry, snapshots, progress, resume, beginning
        )
        self.confirmation = Confirmation(
            config,
            self.metrics,
            self.registry,
            self.commands,
            self.checkpointing,
            snapshots,
            progress,
        )
        self.evaluations = Evaluations(
            config, self.metrics, self.registry, self.commands, self.connectors, progress
        )
        self._config = config
        self._hub = hub
        self._receipts_first = ReceiptsFirst(self.commands.pool, config.driver.synchronous)
        self._local = local
        self._progress = progress
        self._snapshots = snapshots
        self._only_local = only_local
        if not only_local:
            self.confirmation.impossible("among workers that dial in nobody evaluates")
        # Episodes not counted yet, by EnvRunner and batch id.
        self._receipts: dict[tuple[str, int], training_pb2.Receipt] = {}
        self._departures = Departures(self.registry, progress)
        # Of those who are attached:
        self._failed_once: set[Worker] = set()
        self._let_go: set[Worker] = set()
        self._rates: dict[Worker, Rate] = {}

    @property
    def updates(self) -> int:
        """That the weights have had, over the whole run."""
        return self.core.weights_version.update

    def regroup(self) -> None:
        """Have learners meet again that lost each other, or begin without those that are late."""
        for due in (self.learners.to_meet_again(), self.learners.to_begin_with_fewer()):
            if due is not None:
                self.happened(due)

    def hear(self, event: HubEvent) -> None:
        """Something came from a worker, or a worker came or went."""
        if event.worker in self._let_go and not isinstance(event, Left):
            return  # what it had said by then
        for heard in self._receipts_first.in_order(event):
            self._hear_or_dismiss(heard)
        self.go_on()

    def go_on(self) -> None:
        """Between two rounds of a synchronous run: begin the next, unless something is first."""
        if not self.core.between_rounds or self.stop_reason:
            return
        self.look_for_end()
        if self.stop_reason or self.confirmation.under_way:
            return
        if not self.checkpointing.holds_up(self.updates):
            self.happened(events.Proceed())

    def look_for_end(self) -> None:
        """Whether the run is solved, or may be."""
        if self.confirmation.look():
            self.stop("solved")

    def _hear_or_dismiss(self, event: HubEvent) -> None:
        try:
            self._hear(event)
        except (TypeError, ValueError) as error:
            # A worker that says what nobody can understand is let go; the others do not notice.
            self._let_go.add(event.worker)
            what = one_line(str(error), _LONGEST_REASON)
            self._hub.dismiss(event.worker, f"sent what cannot be understood: {what}")

    def happened(self, event: events.Event) -> None:
        """Tell the core, and carry out its commands."""
        for command in self.core.handle(event):
            self.commands.carry_out(command)

    def stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def fail(self, text: str, reason: str = "failed") -> None:
        if not self.stop_reason:
            self.stop_reason, self.failure = reason, text

    def exited(self, event: Exited) -> None:
        """A local process has ended. If it was attached, it also left."""
        role = event.worker_id.rpartition("-")[0]
        if self.stop_reason:
            return None
        if event.restart_in is not None:
            text = f"{event.worker_id} (pid {event.pid}) ended: {event.how}. Starting it again"
            return self._progress.message(text, "warning")
        self._local.gave_up_on(event.worker_id)
        if role == LEARNER and self._only_local and not self._local.any_up(LEARNER):
            return self.fail(f"{event.worker_id} is lost: {event.how}", "learner_lost")
        text = f"{event.worker_id} keeps ending (the last time: {event.how}) and stays down"
        if role == ENVRUNNER and self._only_local and not self._local.any_up(ENVRUNNER):
            env, last = self._config.env_runner.env, self.registry.last_failure
            text = f"no EnvRunner is left to step {env}: {text}. {last}"
            return self.fail(text.rstrip(), "no_envrunner")
        if role == EVALUATOR:
            self.confirmation.impossible(f"{event.worker_id} keeps ending")
            self.go_on()
        traceback = self.registry.tracebacks.get(event.worker_id, "")
        self._progress.message(f"{text}\n{inset(traceback)}".rstrip(), "error")

    # -- what workers say -------------------------------------------------------------------------

    def _hear(self, event: HubEvent) -> None:
        completions = self.commands.pool.complete(event)
        if isinstance(event, Left):
            return self._left(event, completions)
        for completed in completions:
            if completed.failure is None:
                self._answered(completed, completed.body or any_pb2.Any())
            else:
                self._failed(completed, completed.failure.message)
        if isinstance(event, Joined):
            self.metrics.workers.joined(event.worker)
            self._set_up(self.registry.joined(event.worker))
            self._rates[event.worker] = Rate()
        elif isinstance(event, Reported):
            self._reported(event.worker, event.body)

    def _reported(self, worker: Worker, body: any_pb2.Any) -> None:
        """Each role has its own kind of report."""
        if worker.role == LEARNER:
            arrivals = read_arrivals(body)
            self._rates[worker].count(len(arrivals.arrivals))
            return self._arrived(worker, arrivals)
        if worker.role != ENVRUNNER:
            raise ValueError(f"a report, where {worker.role}s have none")
        self._rates[worker].count(_NOTE_COUNTS)
        self._progress.message(f"{worker.worker_id} {read_note(body)}", "info")

    def _answered(self, completed: Completed, body: any_pb2.Any) -> None:
        worker, request, last = completed.worker, completed.request, completed.last
        if isinstance(request, training_pb2.Snapshot):
            chunk, spaces = body.value, self.registry.spaces
            learned = self.connectors.merged
            return self._snapshots.take(chunk, last, self.core, self.metrics, spaces, learned)
        if not last:
            raise ValueError("a reply before the last where there is one alone")
        match request:
            case training_pb2.SampleRequest():
                self._sampled(worker, read_receipt(request, body))
            case training_pb2.Update():
                newest = Version(self.core.generation, self.updates)
                self._updated(worker, read_update_done(request, body, newest))
            case training_pb2.Group():
                newest = Version(self.core.generation, self.updates)
                met = self.learners.met(worker, read_group_formed(request, body, newest))
                if met is not None:
                    self.happened(met)
            case training_pb2.Setup() if worker.role != LEARNER:
                self._runner_ready(worker, read_runner_ready(body))
            case training_pb2.AddModule():
                self._module_ready(worker, read_module_ready(request, body))
            case training_pb2.Evaluate():
                self._local.of_use(worker.worker_id)
                evaluation = read_evaluation(request, body)
                if not request.checkpoint:
                    self.evaluations.answered(request, evaluation)
                elif self.confirmation.evaluated(request, evaluation):
                    self.stop("solved")

    def _failed(self, completed: Completed, reason: str) -> None:
        """It could not do what it was asked to. Our workers leave then; their farewell says why."""
        worker, request = completed.worker, completed.request
        key = worker.worker_id, worker.incarnation
        match request:
            case training_pb2.SampleRequest():
                self.happened(events.SampleFailed(request.batch_id, *key))
            case training_pb2.Update():
                self.happened(events.UpdateFailed(request.update_id, *key, reason))
            case training_pb2.Snapshot():
                self._snapshots.abandon()
            case training_pb2.Evaluate():
                self._evaluates_no_more(worker)
        if worker in self._failed_once:
            self._hub.dismiss(worker, f"failed again: {reason}")
        self._failed_once.add(worker)

    def _sampled(self, worker: Worker, receipt: training_pb2.Receipt) -> None:
        self.registry.must_fit_a_batch(receipt.live_steps)
        received = events.SampleReceived(
            receipt.batch_id,
            worker.worker_id,
            worker.incarnation,
            receipt.learner,
            receipt.live_steps,
            Version.of(receipt.version),
            receipt.dropped,
            receipt.stale_steps,
        )
        # Before the core asks for more: requests tell what connectors have learned.
        self.connectors.take(worker.worker_id, receipt.batch_id, receipt.connector_delta)
        if not self._config.driver.synchronous:
            self.connectors.merge_waiting()
        self.happened(received)
        self.metrics.workers.sampled(worker.worker_id, receipt.live_steps, received.version)
        self.metrics.workers.spent(worker.worker_id, receipt.seconds)
        self.metrics.workers.counted(worker.worker_id, receipt.counts)
        self.stale_runners.brought(worker.worker_id, receipt.stale_steps)
        if receipt.dropped:
            # A learner that is lost is told of elsewhere, and once.
            if receipt.dropped != "learner_lost":
                self._progress.message(f"{worker.worker_id}: {receipt.explanation}", "warning")
            return
        self._local.of_use(worker.worker_id)
        self._receipts[worker.worker_id, receipt.batch_id] = receipt
        if not self._config.driver.synchronous:
            self._count_episodes()

    def _count_episodes(self) -> None:
        """In order of EnvRunners and requests: in synchronous mode nothing may depend on who is
        faster."""
        order = sorted(self._receipts, key=lambda key: (worker_order(key[0]), key[1]))
        receipts = [self._receipts.pop(key) for key in order]
        if self.stop_reason and not self._config.driver.synchronous:
            return  # the summary says what the run had reached when it was stopped
        for receipt in receipts:
            self.metrics.episodes_ended(receipt.episode_returns, receipt.episode_lengths)
        if not self._config.driver.synchronous:  # which looks between two rounds
            self.look_for_end()

    def _arrived(self, worker: Worker, message: training_pb2.Arrivals) -> None:
        for arrival in message.arrivals:
            self.registry.must_fit_a_batch(arrival.live_steps)
            self.happened(
                events.Arrived(
                    worker.worker_id, worker.incarnation, arrival.batch_id, arrival.live_steps
                )
            )

    def _updated(self, worker: Worker, done: training_pb2.UpdateDone) -> None:
        used = used_batches(done)
        for batch in used:
            self.registry.must_fit_a_batch(batch.live_steps)
        version = Version.of(done.version)
        self.connectors.merge_waiting()
        self.stale_runners.answered(used, self.core.ledger.updating)
        self.happened(
            events.UpdateFinished(
                done.update_id, worker.worker_id, worker.incarnation, version, used
            )
        )
        self._local.of_use(worker.worker_id)
        self.learners.updated(worker.worker_id, done)
        self._count_episodes()
        trained = [batch for batch in used if not batch.dropped]
        for batch in trained:
            self.metrics.batch_consumed(batch.staleness)
        steps = sum(batch.live_steps for batch in trained)
        self.metrics.workers.trained(worker.worker_id, steps, version)
        self.metrics.workers.spent(worker.worker_id, done.seconds)
        self.metrics.updated(
            worker.worker_id, {key: metrics.values for key, metrics in done.metrics.items()}
        )
        stop_steps = self._config.driver.stop_steps
        if stop_steps is not None and self.core.ledger.trained >= stop_steps:
            self.stop("stop_steps")

    def _evaluates_no_more(self, worker: Worker) -> None:
        self.evaluations.under_way = False
        self.confirmation.left(worker)

    # -- who comes and goes -----------------------------------------------------------------------

    def _set_up(self, setups: list[tuple[Worker, training_pb2.Setup]]) -> None:
        for worker, setup in setups:
            of_learner = worker.role == LEARNER
            for command in self.learners.begin(worker, setup) if of_learner else [setup]:
                self.commands.send(worker, command)

    def _module_ready(self, worker: Worker, ready: training_pb2.ModuleReady) -> None:
        self.metrics.workers.ready(worker)
        if refusal := self.registry.why_no_member(ready):
            return self._hub.dismiss(worker, refusal)
        for kept in self.learners.ready(worker, ready):
            self.happened(kept)
        self.registry.learner_ready(worker, ready)
        self.happened(events.LearnerJoined(worker.worker_id, worker.incarnation))

    def _runner_ready(self, worker: Worker, ready: training_pb2.Ready) -> None:
        self.metrics.workers.ready(worker)
        self._set_up(self.registry.runner_ready(worker, ready))
        if self.core.members:
            self.commands.send(worker, self.registry.learners_message(self.core.generation))
        if worker.role == EVALUATOR:
            self.confirmation.play()
        if worker.role == ENVRUNNER:
            steps = ready.rows * ready.steps
            self.happened(events.RunnerJoined(worker.worker_id, worker.incarnation, steps))

    def _left(self, event: Left, unanswered: list[Completed]) -> None:
        worker, failure = event.worker, event.failure
        self.metrics.workers.left(event)
        self.registry.left(worker)
        self.connectors.left(worker)
        self._failed_once.discard(worker)
        self._let_go.discard(worker)
        self._rates.pop(worker, None)
        if worker.local:
            # It may hang, and must not stay at a post that a successor has to fill.
            after = 5.0 if event.farewell else 0.0
            self._local.kill(worker.worker_id, worker.pid, after, abort=event.unheard)
        # Where nothing has ever worked, to try again would only say the same again.
        hopeless = bool(failure) and not self.registry.had_runner and self._only_local
        if not self.stop_reason and not (hopeless and failure and not failure.traceback):
            self._departures.show(event)
        if worker.role == ENVRUNNER:
            self.stale_runners.left(worker.worker_id)
            key = worker.worker_id, worker.incarnation
            not_begun = read_not_begun(event, unanswered)
            self.happened(events.RunnerLeft(*key, event.reason, not_begun))
            if hopeless:
                self.fail(f"{worker.worker_id} could not start: {event.reason}")
        elif worker.role == EVALUATOR:
            self._evaluates_no_more(worker)
        else:
            self.checkpointing.left(worker.worker_id)
            self.metrics.learner_left(worker.worker_id)
            self.learners.left(worker)
            gone = events.LearnerLeft(worker.worker_id, worker.incarnation, event.reason)
            self.happened(gone)
            # What one has failed at, with nobody else there, the next one would fail at too.
            if failure and not self.core.members:
                self.fail(f"{worker.worker_id} is lost: {event.reason}", "learner_lost")
