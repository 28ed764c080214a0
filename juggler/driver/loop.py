"""The training loop: keeps requests in flight, issues updates, keeps books."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from juggler.driver.checkpoint.snapshots import SnapshotWritten
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.core.events import LearnerLeaves, StartNextTurn, StartWithFewer
from juggler.driver.core.group import worker_order
from juggler.driver.driver_config import MOST_LEARNERS
from juggler.driver.module_placement import bytes_of_copies, must_have_room
from juggler.driver.monitoring import ScaleAsked, StatusAsked
from juggler.driver.periodic_work import PeriodicWork
from juggler.driver.run_parts import RunParts
from juggler.driver.run_status import StatusReader
from juggler.driver.workers.trained_modules import PEER_SILENCE_SECONDS
from juggler.driver.workers.worker_events import WorkerEvents
from juggler.envrunner.envrunner_program import ENVRUNNER
from juggler.learner.process.learner_program import LEARNER
from juggler.runtime.actors.hub import HubEvent, Mailbox
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.wire.v1 import attach_pb2

_LOOK_SECONDS = 0.2  # maximum time between two checks of a condition


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A request from outside the loop to end the run."""

    reason: str


#: Events of the loop.
Event = HubEvent | Exited | SnapshotWritten | StopAsked | StatusAsked | ScaleAsked


class Loop:
    """Drives a run until there is a reason to stop.

    Nothing polls: the loop sleeps in `gather`, and any event wakes it.

    Attributes:
        first_update: seconds until the first update; None before it.
    """

    def __init__(
        self,
        parts: RunParts,
        worker_events: WorkerEvents,
        mailbox: Mailbox[Event],
        periodic_work: PeriodicWork,
        status: StatusReader,
    ) -> None:
        self.first_update: float | None = None
        self._parts = parts
        self._worker_events = worker_events
        self._mailbox = mailbox
        self._periodic_work = periodic_work
        self._status = status

    def run(self) -> None:
        self._periodic_work.begin()
        while not self._parts.end.reached:
            self.top_up()
            self.gather(self._periodic_work.seconds_left())
            self.issue_updates()
            self.finish_updates()
            self._periodic_work.on_intervals()
            self._parts.callbacks.deliver()

    def top_up(self) -> None:
        """Request batches from EnvRunners, within the staleness budgets."""
        parts = self._parts
        parts.carry_out(parts.core.top_up())
        if parts.core.requests_in_flight and not parts.clock.training:
            parts.clock.begin_training()

    def gather(self, seconds: float) -> None:
        """Sleep until an event comes, and book it.

        Batches become *sampled* here, and *trained* or *dropped* by learners' answers.
        """
        for event in self._mailbox.gather(seconds):
            self._handle(event)

    def issue_updates(self) -> None:
        """Start updates of groups that hold enough steps.

        In synchronous mode an update learns from the batches of the turn.
        """
        parts = self._parts
        if parts.end.reached:
            return
        if parts.league:
            parts.league.forget_settled()
        for module in parts.modules.values():
            for due in (module.to_meet_again(), module.to_begin_with_fewer()):
                if due is not None:
                    parts.happened(due)
        parts.carry_out(parts.core.issue_updates())
        parts.leaving_learners.check()

    def finish_updates(self) -> None:
        """End the run, or begin a turn, after finished updates."""
        parts, driver = self._parts, self._parts.config.driver
        if parts.core.trained_enough:
            parts.end.stop("stop_steps")
        self._note_first_update()
        if driver.synchronous and not parts.core.between_turns:
            return
        # Between turns nothing is in flight, so two runs write the same lines.
        self._periodic_work.at_steps()
        if parts.end.reached:
            return
        if parts.evaluations.is_solved():
            return parts.end.stop("solved")
        if not driver.synchronous or parts.evaluations.confirming:
            return
        if not parts.checkpoints.holds_up(parts.core.updates):
            for module_id in parts.core.modules:
                parts.happened(StartNextTurn(module_id))

    def drain(self, seconds: float, done: Callable[[], bool]) -> None:
        """Gather until a condition holds or time is up; issue nothing."""
        deadline = time.monotonic() + seconds
        while not done() and (left := deadline - time.monotonic()) > 0:
            self.gather(min(left, _LOOK_SECONDS))
            self._note_first_update()

    def _handle(self, event: Event) -> None:
        parts = self._parts
        match event:
            case StopAsked():
                parts.end.stop(event.reason)
                parts.evaluations.give_up_candidate()
            case StatusAsked():
                if event.answer.set_running_or_notify_cancel():
                    event.answer.set_result(self._status.read())
            case ScaleAsked():
                if event.answer.set_running_or_notify_cancel():
                    scale(parts, event)
            case Exited():
                parts.departures.exited(event)
            # A turn, a candidate or an evaluation may wait for it.
            case SnapshotWritten():
                parts.checkpoints.done(event)
                if event.problem:
                    parts.progress.message(event.problem, "error")
                elif event.path and not event.aside:
                    parts.callbacks.note("on_checkpoint", event.path)
                parts.evaluations.written(event)
            case _:
                self._worker_events.handle(event)

    def _note_first_update(self) -> None:
        parts = self._parts
        if self.first_update is None and parts.core.has_updated:
            self.first_update = parts.clock.now().wall
            # Not earlier: it would slow down the start, and there are no weights to play.
            if not parts.end.reached and parts.evaluations.wants_evaluators:
                parts.local.start_evaluators()


def scale(parts: RunParts, asked: ScaleAsked) -> None:
    """Start or end workers of this host as requested, and answer."""
    why = _why_fixed(parts)
    if asked.env_runners:
        why = why or _why_not_these_runners(parts.config)
    if asked.learners:
        why = why or _why_not_these_learners(parts, asked.learners)
    if why:
        asked.answer.set_exception(ValueError(why))
        return
    before = (
        _scale_runners(parts, asked.env_runners) if asked.env_runners else 0,
        _scale_learners(parts, asked.learners) if asked.learners else 0,
    )
    asked.answer.set_result(before)


def _scale_runners(parts: RunParts, wanted: int) -> int:
    attached = parts.registry.attached
    before, leaving = parts.local.scale(ENVRUNNER, wanted)
    for worker_id in leaving:
        if worker_id in attached:
            parts.commands.send(attached[worker_id], attach_pb2.Stop())
        parts.local.end(worker_id, was_asked=worker_id in attached)
    _report(parts, "EnvRunners", wanted, before)
    return before


def _scale_learners(parts: RunParts, wanted: int) -> int:
    if wanted > 1:
        parts.registry.most_learners = max(parts.registry.most_learners, wanted)
        parts.hub.lose_after(LEARNER, PEER_SILENCE_SECONDS)
    before, leaving = parts.local.scale(LEARNER, wanted)
    for worker_id in leaving:
        learner = parts.registry.attached.get(worker_id)
        if learner is None:
            parts.local.end(worker_id, was_asked=False)
            continue
        # Leaving learners first train on the batches that they hold.
        parts.happened(LearnerLeaves(worker_id, learner.incarnation))
        parts.leaving_learners.add(learner)
    if wanted < parts.config.driver.learners:  # no module may wait for learners that will not come
        for module_id, module in parts.core.modules.items():
            if module.missing_learners:
                parts.happened(StartWithFewer(module_id))
    _report(parts, "learners", wanted, before)
    return before


def _report(parts: RunParts, what: str, wanted: int, before: int) -> None:
    if wanted != before:
        text = f"{what}: {wanted} instead of {before}"
        parts.progress.message(text, "info")


def _why_fixed(parts: RunParts) -> str:
    """Return why the workers of this run cannot change, or ""."""
    if parts.end.reached:
        return "the run is ending"
    if not parts.only_local:
        return (
            "the workers of this run dial in: start or end them where they are; a run of `juggler "
            "launch` is scaled where it was launched"
        )
    if parts.config.driver.synchronous:
        return "a synchronous run has the same workers in each turn: resume it with more or fewer"
    return ""


def _why_not_these_runners(config: RunConfig) -> str:
    """Return why no EnvRunner can come or go, or ""."""
    if config.env_runner.dataset:
        return "EnvRunners that play a data set share it out when the run begins"
    if config.env_runner.gateway and not config.env_runner.simulator:
        return "simulators dial this run's only gateway"
    return ""


def _why_not_these_learners(parts: RunParts, wanted: int) -> str:
    """Return why this number of learners is impossible, or ""."""
    config = parts.config
    for what, has in (
        ("num_learners in its tables of modules", config.agents.own_learners),
        ("modules that share parts", config.agents.shared),
        ("a league", config.agents.league),
    ):
        if has:
            return f"a run with {what} keeps its learners: resume it with more or fewer"
    if wanted > MOST_LEARNERS:
        return f"{wanted} learners: must be at most {MOST_LEARNERS}"
    # Modules never move between processes.
    hosts = Counter(
        module_id
        for worker_id in parts.local.wanted(LEARNER, wanted)
        for module_id in parts.registry.hosting.modules_of(worker_order(worker_id)[1])
    )
    try:
        _must_fit(parts, parts.local.wanted(LEARNER, wanted))
    except ConfigError as error:
        return str(error)
    if orphans := [each for each in parts.core.modules if each not in hosts]:
        return (
            f"module {orphans[0]!r} would have no learner: modules stay with their learner "
            "processes, so keep more of them"
        )
    return ""


def _must_fit(parts: RunParts, learners: Sequence[str]) -> None:
    """Check that these learners' replays fit into this host's memory."""
    registry, driver, vitals = parts.registry, parts.config.driver, parts.hub.vitals()
    if all(map(parts.local.is_up, learners)):
        return  # no worker is added
    # Memory that present learners already fill is not needed again.
    sizes, taken, kept_by = [], 0.0, dict[str, float]()
    for worker_id in learners:
        _, index = worker_order(worker_id)
        device = driver.device_name(index)
        kept = {
            each: float(registry.kept_bytes.get((device, each), 0))
            for each in registry.hosting.modules_of(index)
        }
        kept_by |= kept
        sizes.append(sum(kept.values()))
        if worker_id in vitals:  # upper bound: the process has other memory, too
            taken += min(sizes[-1], vitals[worker_id].resident_bytes)
    must_have_room(sizes, taken, bytes_of_copies(parts.config, kept_by))
