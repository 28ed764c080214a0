"""The training loop: keep requests in flight, gather what comes, issue updates, keep books."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from juggler.driver.checkpoint.snapshots import SnapshotWritten
from juggler.driver.core.events import Proceed
from juggler.driver.monitoring import ScaleAsked, StatusAsked
from juggler.driver.parts import RunParts
from juggler.driver.scaling import scale
from juggler.driver.status import StatusReader
from juggler.driver.upkeep import Upkeep
from juggler.driver.workers.worker_events import WorkerEvents
from juggler.runtime.actors.hub_events import HubEvent
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.supervisor import Exited

_LOOK_SECONDS = 0.2  # at most, between two looks whether something that is waited for holds


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody outside of the loop wants the run to end."""

    reason: str


#: What the loop hears of.
Event = HubEvent | Exited | SnapshotWritten | StopAsked | StatusAsked | ScaleAsked


class Loop:
    """A run from its first worker until there is a reason to stop.

    Nothing polls: the loop sleeps in `gather`, and whatever comes wakes it.

    Args:
        parts: of the run.
        worker_events: understands what workers say.
        mailbox: where everything comes in.
        upkeep: what is due on intervals.
        status: answers those who watch.

    Attributes:
        first_update: seconds of the run until its first update; None before that.
    """

    def __init__(
        self,
        parts: RunParts,
        worker_events: WorkerEvents,
        mailbox: Mailbox[Event],
        upkeep: Upkeep,
        status: StatusReader,
    ) -> None:
        self.first_update: float | None = None
        self._parts = parts
        self._worker_events = worker_events
        self._mailbox = mailbox
        self._upkeep = upkeep
        self._status = status

    def run(self) -> None:
        self._upkeep.begin()
        while not self._parts.end.reached:
            self.top_up()
            self.gather(self._upkeep.seconds_left())
            self.issue_updates()
            self.finish_updates()
            self._upkeep.on_intervals()
            self._parts.callbacks.tell()

    def top_up(self) -> None:
        """Ask EnvRunners for batches, wherever the staleness budget of a module has room."""
        parts = self._parts
        parts.carry_out(parts.core.top_up())
        if parts.core.requests_in_flight and not parts.clock.training:
            parts.clock.begin_training()

    def gather(self, seconds: float) -> None:
        """Sleep until something comes, for so many seconds at most, and book all that came.

        Batches become *sampled* here, and *trained* or *dropped* by learners' answers.
        """
        for event in self._mailbox.gather(seconds):
            self._hear(event)

    def issue_updates(self) -> None:
        """Have a group make an update where all its learners hold their share of `batch_size`.

        In synchronous mode an update is of what the turn has brought. Groups admit who came first.
        """
        parts = self._parts
        if parts.end.reached:
            return
        if parts.league:
            parts.league.learners.forget_settled()
        for learners in parts.learners.values():
            for due in (learners.to_meet_again(), learners.to_begin_with_fewer()):
                if due is not None:
                    parts.happened(due)
        parts.carry_out(parts.core.issue_updates())
        parts.leaving_learners.look()

    def finish_updates(self) -> None:
        """Do what follows from the updates that were answered: end the run, or begin a turn."""
        parts, driver = self._parts, self._parts.config.driver
        if parts.core.trained_enough:
            parts.end.stop("stop_steps")
        self._note_first_update()
        if driver.synchronous and not parts.core.between_turns:
            return
        self._upkeep.at_steps()
        if parts.end.reached:
            return
        if parts.confirmation.look():
            return parts.end.stop("solved")
        if not driver.synchronous or parts.confirmation.under_way:
            return
        if not parts.checkpointing.holds_up(parts.core.updates):
            for module_id in parts.core.modules:
                parts.happened(Proceed(module_id))

    def drain(self, seconds: float, done: Callable[[], bool]) -> None:
        """Hear what comes for so many seconds, or until something holds; issue nothing."""
        deadline = time.monotonic() + seconds
        while not done() and (left := deadline - time.monotonic()) > 0:
            self.gather(min(left, _LOOK_SECONDS))
            self._note_first_update()

    def _hear(self, event: Event) -> None:
        parts = self._parts
        match event:
            case StopAsked():
                parts.end.stop(event.reason)
                parts.confirmation.give_up()
            case StatusAsked():
                if event.answer.set_running_or_notify_cancel():
                    event.answer.set_result(self._status.read())
            case ScaleAsked():
                if event.answer.set_running_or_notify_cancel():
                    scale(parts, event)
            case Exited():
                parts.departures.exited(event)
            case SnapshotWritten():
                parts.snapshots.done(event)
                if event.problem:
                    parts.progress.message(event.problem, "error")
                elif event.path and not event.aside:
                    parts.callbacks.checkpoint(event.path)
                parts.confirmation.written(event)
                parts.evaluations.written(event)
            case _:
                self._worker_events.hear(event)

    def _note_first_update(self) -> None:
        parts = self._parts
        if self.first_update is None and parts.core.has_updated:
            self.first_update = parts.clock.now().wall
            # Not before: it would slow down the start, and has nothing to play.
            evaluates = parts.only_local and parts.config.driver.evaluation_seconds > 0
            if not parts.end.reached and (evaluates or parts.confirmation.wants_evaluator):
                parts.local.start_evaluators()
