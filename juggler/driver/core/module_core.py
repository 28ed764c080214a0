"""The driver's core for one module: an event in, commands out.

Messages may arrive twice, late, or out of order. Noticing missing messages is up to the caller,
which reports a worker that is silent for too long as left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from juggler.driver.core import events
from juggler.driver.core.admission import Admission
from juggler.driver.core.core_state import CoreModuleState, ModuleStart
from juggler.driver.core.events import WorkerKey
from juggler.driver.core.group import GroupMember
from juggler.driver.core.ledger import OpenBatch
from juggler.driver.core.runners import Runner, Runners
from juggler.runtime.episodes.version import Version


class ModuleCore:
    """The books of one module: batches, updates, and its group of learners.

    It does not know other modules: they share only the runners and the admission.

    Args:
        module_id: of the module; every command names it.
        start: the state that the module begins with.
        state: made from `start`; admission reads it.
        admission: of all modules.
        runners: of all modules.
        take_id: returns ids for batches and updates, each once in a run.

    Attributes:
        settings: bound its requests and updates.
        ledger: the fate of its steps.
        weights_version: the newest version that a learner reported.
    """

    def __init__(
        self,
        module_id: str,
        start: ModuleStart,
        state: CoreModuleState,
        admission: Admission,
        runners: Runners,
        take_id: Callable[[], int],
    ) -> None:
        self.module_id = module_id
        self.settings = start.settings
        self.weights_version = Version(start.generation, start.update)
        self.ledger = state.ledger
        self._take_id = take_id
        self._group = state.group
        self._state = state
        self._admission = admission
        self._runners = runners
        # Shares of learners that left during updates, by update id: a learner that returns with
        # its weights may still report them.
        self._unanswered: dict[int, OpenBatch] = {}
        self._stopping = False
        self._finished = False
        self._commands: list[events.Command] = []

    # State that the caller reads.

    @property
    def idle(self) -> bool:
        """No update is in flight."""
        return not self._state.updates

    @property
    def between_turns(self) -> bool:
        """In synchronous mode: an update is finished, and `StartNextTurn` is awaited."""
        return self._state.between_turns

    @property
    def updates_in_flight(self) -> int:
        return len(self._state.updates)

    @property
    def generation(self) -> int:
        """Generation of the learner group."""
        return self._group.generation

    @property
    def members(self) -> tuple[str, ...]:
        """Learners of the group, by rank."""
        return tuple(self._group.members)

    @property
    def missing_learners(self) -> int:
        """Number of learners that the first group still waits for."""
        return self._group.missing

    def can_spare(self, learner: str) -> bool:
        """Return whether the group keeps its weights if this learner leaves."""
        return self._group.can_spare(learner)

    @property
    def updating_steps(self) -> int:
        """Steps in updates that are not finished."""
        return sum(learner.updating_steps for learner in self._group.members.values())

    @property
    def held_steps(self) -> int:
        """Steps that wait at learners and are in no update yet."""
        return sum(batch.steps for batch in self.ledger.held.values())

    # Actions of the caller.

    def book(self, event: events.OfModule | events.OfEveryModule) -> list[events.Command]:
        """Book an event, and return the commands to send, in order."""
        if self._finished:
            return []
        self._commands = []
        match event:
            case events.SampleReceived() | events.SampleFailed():
                self._sample_ended(event)
            case events.BatchArrived():
                self._arrived(event)
            case events.UpdateFinished() | events.UpdateAborted():
                self._update_answered(event)
            case events.UnreportedUpdate():
                self._unreported_update(event)
            case events.LearnerJoined():
                self._group.join(WorkerKey(event.learner, event.incarnation))
            # The first group waits for more learners, up to a limit.
            case events.StartWithFewer():
                self._group.begin_with_fewer()
            case events.LearnerLeaves():
                if learner := self._group.find(WorkerKey(event.learner, event.incarnation)):
                    self._group.release(learner)
            case events.LearnerLeft():
                self._learner_left(WorkerKey(event.learner, event.incarnation))
            case events.PeersMet():
                met = Version(event.generation, event.update)
                self.weights_version = max(self.weights_version, met)
                self._group.met(event.generation)
                # The group continues without their learners.
                self._unanswered.clear()
            case events.RebuildGroup():
                self._announce(self._group.renew(event.generation))
            case events.StartNextTurn():
                self._state.between_turns = False
            case events.StopRequested() | events.TrainingEnds():
                self._stopping = True
            case events.Finish():
                # Answers that still come count no more: the ledger is closed.
                self._stopping = self._finished = True
                self._state.updates.clear()
                self.ledger.finish()
            case _:
                assert_never(event)
        return self._commands

    @property
    def admissible(self) -> frozenset[str]:
        """Waiting learners that may be admitted now, between updates."""
        return self._group.admissible if self.idle and not self._stopping else frozenset()

    def admit(self) -> list[events.Command]:
        """Admit these learners."""
        self._commands = []
        if self.admissible:
            self._announce(self._group.admit())
        return self._commands

    def remove_leaving(self) -> list[events.Command]:
        """Remove learners that are leaving and have nothing in flight."""
        self._commands = []
        if self.idle and not self._stopping:
            for learner in self._group.done:
                for batch in learner.held:  # these have no live steps
                    self.ledger.drop(batch, "learner_lost")
                self._commands.append(
                    events.ReleaseLearner(learner.worker.worker_id, self.module_id)
                )
            self._announce(self._group.remove_leaving())
        return self._commands

    def issue_updates(self) -> list[events.Command]:
        """Issue every update that its learners can make now."""
        self._commands = []
        if self._stopping:
            return []
        # No update is issued while learners wait to join, which keeps their wait short.
        if self._group.members and not self._group.joiners and not self.between_turns:
            while (shares := self._admission.next_update(self._state)) is not None:
                self._issue(shares)
        return self._commands

    def request(
        self, runner: Runner, learner: GroupMember, number: int, requests_in_round: int
    ) -> events.Request:
        """Request a batch, as part of a round."""
        steps = runner.steps[self.module_id]
        batch = OpenBatch(self._take_id(), runner.worker, learner.worker, steps, number)
        self.ledger.request(batch)
        learner.opens(batch)
        return events.Request(
            runner=runner.worker.worker_id,
            incarnation=runner.worker.incarnation,
            batch_id=batch.batch_id,
            learner=learner.worker.worker_id,
            generation=self._group.generation,
            at_least=self._acceptable_weights(),
            module_id=self.module_id,
            round=number if requests_in_round > 1 else 0,
            requests_in_round=requests_in_round if requests_in_round > 1 else 0,
        )

    def lose_runner(self, worker: WorkerKey, not_begun: frozenset[int]) -> None:
        """Close the requests of a runner that left.

        It made no step for the requests in `not_begun`.
        """
        owed = [batch for batch in self.ledger.requested.values() if batch.runner == worker]
        for batch in owed:
            self._close_request(batch)
            if batch.batch_id in not_begun:
                self.ledger.cancel(batch)
            else:
                self.ledger.lose(batch)

    def _announce(self, members: tuple[str, ...] | None) -> None:
        """Return the commands for a changed group; None: it has not changed."""
        if members is not None:
            self._state.has_begun = True
            formed = events.FormGroup(self._group.generation, members, self.module_id)
            self._commands.append(formed)

    # Batches.

    def _acceptable_weights(self) -> Version:
        """Return the oldest weights that may act for a new request.

        Asynchronously, weights published one update before the newest may act. Admission leaves
        room for one more update than that, so weights that arrive late make no batch stale. If a
        generation has begun since, runners have its first weights, which are newer.
        """
        settings, newest = self._state.settings, self.weights_version
        if settings.synchronous:
            return newest
        behind = max(0, newest.update - 1)
        return newest._replace(update=behind - behind % settings.weights_interval)

    def _sample_ended(self, event: events.SampleReceived | events.SampleFailed) -> None:
        if self._runners.find(WorkerKey(event.runner, event.incarnation)) is None:
            return
        batch = self.ledger.requested.get(event.batch_id)
        if isinstance(event, events.SampleFailed):
            if batch is not None:
                self._end_request(batch)
                self.ledger.cancel(batch)
            return
        self.ledger.drop_unbatched(event.stale_steps)
        if batch is not None:
            astray = event.learner != batch.learner.worker_id
            reason = event.dropped or ("learner_lost" if astray else "")
            self._first_report(batch, event.live_steps, reason)

    def _arrived(self, event: events.BatchArrived) -> None:
        worker = WorkerKey(event.learner, event.incarnation)
        learner = self._group.find(worker)
        if learner is None:
            return
        ledger = self.ledger
        batch = ledger.requested.get(event.batch_id) or self._revived(event.batch_id)
        if batch is not None:
            # Requested for another learner, or for an earlier process of this one.
            reason = "learner_lost" if batch.learner != worker else ""
            self._first_report(batch, event.live_steps, reason)
        if event.batch_id not in ledger.held and event.batch_id not in ledger.updating:
            self._discard(event.learner, event.batch_id)

    def _revived(self, batch_id: int) -> OpenBatch | None:
        """Reopen a lost request; None: it was not lost."""
        batch = self.ledger.revive(batch_id)
        if batch is not None and (learner := self._group.find(batch.learner)) is not None:
            learner.opens(batch)
        return batch

    def _first_report(self, batch: OpenBatch, steps: int, dropped: str) -> None:
        """Book a requested batch as sampled, and as held unless dropped."""
        self._end_request(batch)
        self.ledger.hold(batch, steps)
        learner = self._group.find(batch.learner)
        if dropped or learner is None:
            self.ledger.drop(batch, dropped or "learner_lost")
        else:
            learner.opens(batch)
            learner.hold(batch)

    def _end_request(self, batch: OpenBatch) -> None:
        """Close a request, and queue its runner for the next one."""
        self._close_request(batch)
        if (runner := self._runners.request_ended(batch.runner, batch.round)) is not None:
            self._admission.has_room(runner)

    def _close_request(self, batch: OpenBatch) -> None:
        if (learner := self._group.find(batch.learner)) is not None:
            learner.closes(batch)

    # Updates.

    def _issue(self, shares: dict[str, list[OpenBatch]]) -> None:
        update_id = self._take_id()
        self._state.updates[update_id] = shares
        for share in shares.values():
            for batch in share:
                self.ledger.use(batch)
        named = tuple(
            events.UpdateShare(worker_id, tuple(batch.batch_id for batch in share))
            for worker_id, share in shares.items()
        )
        issued = events.IssueUpdate(
            update_id, self._group.generation, named, module_id=self.module_id
        )
        self._commands.append(issued)

    def _update_answered(self, event: events.UpdateFinished | events.UpdateAborted) -> None:
        learner = self._group.find(WorkerKey(event.learner, event.incarnation))
        if learner is None:
            return
        share = self._take_share(event.update_id, event.learner)
        if share is None:  # an answer came already
            return
        learner.answers(share)
        if isinstance(event, events.UpdateFinished):
            self.ledger.settle(share, event.used)
            self.weights_version = max(self.weights_version, event.version)
        else:
            # The other ranks may have applied it: these steps must not be used again.
            for batch in share:
                self.ledger.drop(batch, "learner_lost")
            self._discard(event.learner, *(batch.batch_id for batch in share))

    def _discard(self, learner: str, *batch_ids: int) -> None:
        self._commands.append(events.Discard(learner, batch_ids, self.module_id))

    def _unreported_update(self, event: events.UnreportedUpdate) -> None:
        answers = {used.batch_id: used for used in event.used if used.batch_id in self._unanswered}
        share = [self._unanswered.pop(batch_id) for batch_id in answers]
        for batch in share:
            self.ledger.reopen(batch, "learner_lost")
        self.ledger.settle(share, answers.values())
        self.weights_version = max(self.weights_version, event.version)

    def _take_share(self, update_id: int, learner: str) -> list[OpenBatch] | None:
        """Take one learner's share; the last one closes the update."""
        shares = self._state.updates.get(update_id)
        if shares is None or learner not in shares:
            return None
        share = shares.pop(learner)
        if not shares:
            del self._state.updates[update_id]
            self._state.between_turns = self.settings.synchronous
        return share

    # Learners.

    def _learner_left(self, worker: WorkerKey) -> None:
        if (learner := self._group.find(worker)) is None:
            return
        for batch in learner.held:
            self.ledger.drop(batch, "learner_lost")
        for update_id in list(self._state.updates):
            for batch in self._take_share(update_id, worker.worker_id) or ():
                self.ledger.drop(batch, "learner_lost")
                self._unanswered[batch.batch_id] = batch
        self._announce(self._group.leave(learner))
