"""The training loop: keep requests in flight, gather what is ready, issue updates, keep books."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from juggler.driver.checkpoint.beginning import Beginning
from juggler.driver.checkpoint.snapshots import SnapshotWriter, SnapshotWritten
from juggler.driver.config import RunConfig
from juggler.driver.core.events import Finish, StopRequested
from juggler.driver.intervals import Intervals
from juggler.driver.lines import metrics_line
from juggler.driver.listen import Listen
from juggler.driver.record.driver_file import announce, withdraw
from juggler.driver.record.journal import Journal, LineWriter
from juggler.driver.record.progress import Progress
from juggler.driver.record.run_directory import RunDirectory, RunDirectoryError
from juggler.driver.run_clock import RunClock
from juggler.driver.signals import signals_become
from juggler.driver.status import StatusReader
from juggler.driver.watching import Doors, StatusAsked, Watching
from juggler.driver.workers.endless_episodes import EndlessEpisodes
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.standstill import Standstill
from juggler.driver.workers.starting import waits_for
from juggler.driver.workers.worker_events import WorkerEvents
from juggler.envrunner.program import ENVRUNNER, EVALUATOR
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.hub import Hub, HubSettings
from juggler.runtime.actors.hub_events import HubEvent
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.checkpoints.checkpoint import Checkpoint

#: What the end of a run may take, together under the 5 s that people wait after a Ctrl-C.
_LAST_UPDATES_SECONDS = 1.0
_SILENCE_SECONDS = 2.5  # of learners whose state is waited for; they say something every second
_WORKERS_LEAVE_SECONDS = 0.5
#: But a large state takes longer, and is worth it: containers are given a minute to end.
_LAST_CHECKPOINT_SECONDS = 40.0
_TELL_SECONDS = 2.0  # until people are told that it is waited for
_LOOK_SECONDS = 0.2  # silence is no event

#: Reasons to stop for which nobody has to have learned anything.
_IN_PART = ("stop_steps", "stop_seconds")

_LINE_SECONDS = 1.0
#: For learners of a group: less than they wait for one of theirs that hangs (COLLECTIVE_SECONDS).
_PEER_SILENCE_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody outside of the loop wants the run to end."""

    reason: str


#: What the driver's loop hears of.
_Event = HubEvent | Exited | SnapshotWritten | StopAsked | StatusAsked


class RunFailed(RuntimeError):
    """A run that could not go on; the message says why. Its directory holds what it got to."""


class Driver:
    """One run, from its first worker to its summary.

    Attributes:
        signal: that came while it ran; 0: none.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        progress: Progress,
        *,
        started: float,
        own_code: bytes = b"",
        resume: Checkpoint | None = None,
        beginning: Beginning | None = None,
        listen: Listen | None = None,
        doors: Doors | None = None,
    ) -> None:
        """
        Args:
            config: of the run.
            directory: where it writes.
            progress: shows people what happens.
            started: when the command was given, in seconds of `time.monotonic`.
            own_code: cloudpickled factories for local workers; see `EnvRunnerProgram`.
            resume: a state to go on from.
            beginning: of a new run, what it begins with that another one has learned.
            listen: take workers of other hosts there, and start none here.
            doors: through which others may watch; None: its status alone.
        """
        self.signal = 0
        self._config = config
        self._directory = directory
        self._beginning = beginning
        self._listen = listen
        self._clock = RunClock(started, resume)
        token = listen.token if listen else secrets.token_hex(16)
        run_id = secrets.token_hex(6)
        self._progress = Journal(progress, directory.path, run_id)
        self._lines = LineWriter(directory, self._progress)
        self._mailbox: Mailbox[_Event] = Mailbox()
        self._watching = Watching(doors or Doors(), token, self._mailbox.put)
        most_learners = config.driver.most_learners(dialled=listen is not None)
        settings = HubSettings(
            run_id=run_id,
            roles=(ENVRUNNER, LEARNER, EVALUATOR),
            token=token,
            tls=listen.tls if listen else None,
            hang_seconds=config.driver.hang_seconds,
            # In a group, others wait for a learner that hangs.
            silence_of={LEARNER: _PEER_SILENCE_SECONDS} if most_learners > 1 else {},
            most_of={LEARNER: most_learners},
            services=self._watching.services,
        )
        self._hub = Hub(settings, self._mailbox)
        self._local = LocalWorkers(self._mailbox, run_id, token, own_code)
        self._snapshots = SnapshotWriter(
            self._mailbox,
            directory.checkpoints,
            config,
            self._clock,
            resume.path if resume else None,
        )
        self._workers = WorkerEvents(
            config,
            self._hub,
            self._local,
            self._progress,
            self._snapshots,
            resume,
            only_local=listen is None,
            beginning=beginning,
        )
        self._status = StatusReader(
            run_id,
            directory.path,
            config,
            self._clock,
            self._workers,
            self._hub,
            self._local,
            self._progress,
        )
        self._standstill = Standstill(config, self._workers, self._local)
        self._endless = EndlessEpisodes(config.env_runner)
        self._updates_before = self._workers.updates  # those of the run that is resumed
        self._first_update: float | None = None
        self._solved: float | None = None
        self._bound: list[str] = []
        self._last_line: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """Train until a stop condition holds, somebody interrupts, or nothing can go on.

        Returns:
            The summary, which `summary.json` holds too.

        Raises:
            RunFailed: the run ended because something failed.
            EndpointError: the driver cannot listen where it should.
        """
        workers, grace = self._workers, 0.0
        summary: dict[str, Any] = {}
        self._begin_to_listen()
        with signals_become(lambda reason: self._mailbox.put(StopAsked(reason))) as caught:
            try:
                self._start()
                while not workers.stop_reason:
                    for event in self._mailbox.gather(self._intervals.left()):
                        self._on(event)
                    self._keep_intervals()
                self._wind_down()
                grace = _WORKERS_LEAVE_SECONDS
            finally:
                caught.no_more()
                self.signal = caught.number
                # Each of these is done whatever becomes of the one before.
                with ExitStack() as last:
                    last.callback(lambda: summary.update(self._close_books()))
                    last.callback(self._hub.close)
                    last.callback(self._local.close, grace)
                    last.callback(self._watching.close)
                    last.callback(withdraw, self._directory.path)
        if workers.failure:
            raise RunFailed(workers.failure + self._how_to_go_on())
        return summary

    def _how_to_go_on(self) -> str:
        update, newest = self._newest_update(), self._snapshots.newest
        if newest is None or not newest.is_dir():  # somebody may have removed it
            trained = self._workers.updates > self._updates_before
            return "\nThere is no checkpoint to go on from" if trained else ""
        return f"\nTo go on from update {update}: juggler train --resume {self._directory.path}"

    def _begin_to_listen(self) -> None:
        listen = self._listen
        addresses = [self._local.driver_address] + ([listen.address] if listen else [])
        try:
            self._bound = self._hub.start(addresses, insecure=bool(listen and listen.insecure))
            self._watching.start()
        except BaseException:
            self._hub.close()
            self._local.close(grace=0.0)
            raise

    def _start(self) -> None:
        driver = self._config.driver
        self._progress.start(self._config.flat())
        if self._workers.updates:
            self._progress.message(f"going on from update {self._workers.updates}", "info")
        if self._beginning is not None:
            self._progress.message(f"beginning with {self._beginning.text}", "info")
            for warning in self._beginning.warnings:
                self._progress.message(warning, "warning")
        self._announce()
        self._watching.ready(True)
        if self._listen is None:
            self._local.start(driver, self._config.env_runner.gateway)
        else:
            self._progress.message(f"waiting for workers at {self._bound[-1]}", "info")
        self._intervals = Intervals(
            {
                "line": _LINE_SECONDS,
                # What a clock says would make the numbers of a synchronous run differ.
                "checkpoint": 0.0 if driver.synchronous else driver.checkpoint_seconds,
                "evaluation": driver.evaluation_seconds,
                "look": driver.worker_timeout_seconds,
            }
        )

    def _announce(self) -> None:
        if problem := announce(self._directory.path, self._status.run_id, self._bound):
            self._progress.message(problem, "error")

    def _on(self, event: _Event) -> None:
        workers = self._workers
        if isinstance(event, StopAsked):
            workers.stop(event.reason)
            workers.confirmation.give_up()
        elif isinstance(event, StatusAsked):
            if event.answer.set_running_or_notify_cancel():
                event.answer.set_result(self._status.read())
        elif isinstance(event, Exited):
            workers.metrics.workers.exited(event)
            workers.exited(event)
        elif isinstance(event, SnapshotWritten):
            self._snapshots.done(event)
            if event.problem:
                self._progress.message(event.problem, "error")
            workers.confirmation.written(event)
            workers.go_on()
        else:
            workers.hear(event)
            if not self._clock.training and workers.core.ledger.requested:
                self._clock.begin_training()
            if self._first_update is None and workers.updates > self._updates_before:
                self._first_update = self._clock.now().wall
                # Not before: it would slow down the start, and has nothing to play.
                evaluates = self._config.driver.evaluation_seconds > 0
                if not workers.stop_reason and (evaluates or workers.confirmation.wants_evaluator):
                    self._local.start_evaluator()
        if self._solved is None and workers.stop_reason == "solved":
            self._solved = self._clock.now().wall

    # -- intervals --------------------------------------------------------------------------------

    def _keep_intervals(self) -> None:
        for name in self._intervals.due():
            match name:
                case "line":
                    self._write_line()
                    self._look_for_sockets()
                case "checkpoint":
                    self._workers.checkpointing.begin()
                case "evaluation":
                    if self._workers.core.members:
                        self._workers.evaluations.begin(self._workers.updates)
                case "look":
                    self._look_for_standstill()
        self._workers.regroup()
        driver = self._config.driver
        if driver.stop_seconds is not None and self._clock.is_up(
            driver.stop_seconds, driver.worker_timeout_seconds
        ):
            self._workers.stop("stop_seconds")

    def _look_for_standstill(self) -> None:
        if text := self._standstill.look():
            waits = self._listen is not None or self._config.env_runner.gateway
            if self._standstill.starting and not self._workers.registry.complete():
                text = f"{text}. Workers are at work on their start, and are waited for"
                self._progress.message(text, "warning")
            elif not waits and not self._workers.registry.complete():
                self._workers.fail(text)
            else:
                self._progress.message(text, "warning")
            return
        if text := self._workers.confirmation.overdue():
            self._progress.message(text, "warning")
        for text in self._standstill.silent_runners():
            self._progress.message(text, "warning")

    def _look_for_sockets(self) -> None:
        """Without them no worker of this host can take the place of one that dies."""
        gone = self._local.directory_is_gone()
        if not gone or self._workers.stop_reason:
            return
        if self._listen is None:
            return self._workers.fail(gone)
        if self._local.driver_address in self._bound:
            self._bound.remove(self._local.driver_address)
            self._announce()
            self._progress.message(f"{gone}; workers do not need it", "warning")
        return None

    def _write_line(self) -> dict[str, Any]:
        line = metrics_line(self._workers, self._local.restarts, self._clock.now())
        if self._lines.append(line):  # into a new directory: nobody finds the run there yet
            self._announce()
            if not self._config.driver.synchronous and not self._workers.stop_reason:
                self._workers.checkpointing.begin()
        if self._workers.updates == self._updates_before and not self._workers.stop_reason:
            text = waits_for(self._config, self._workers.registry, self._workers.core)
            self._progress.waiting(text, line["wall_time"])
        else:
            self._progress.update(line)
        for text in (*self._workers.stale_runners.look(), *self._endless.look(self._workers)):
            self._progress.message(text, "warning")
        return line

    # -- the end ----------------------------------------------------------------------------------

    def _wind_down(self) -> None:
        """Let updates end, make the last checkpoint, and send everybody home."""
        workers = self._workers
        self._watching.ready(False)
        workers.happened(StopRequested())
        self._drain(_LAST_UPDATES_SECONDS, lambda: workers.core.idle)
        self._wait_for_snapshot(time.monotonic() + _LAST_CHECKPOINT_SECONDS)
        self._wait_for_confirmation()
        deadline = time.monotonic() + _LAST_CHECKPOINT_SECONDS
        self._wait_for_snapshot(deadline)
        if workers.confirmation.kept is not None:
            if problem := self._snapshots.keep(workers.confirmation.kept):
                self._progress.message(problem, "error")
        elif workers.updates and not self._has_saved() and workers.checkpointing.begin():
            self._wait_for_snapshot(deadline)
        self._see_what_failed()
        workers.happened(Finish())
        self._last_line = self._write_line()
        workers.commands.dismiss_all()
        self._drain(_WORKERS_LEAVE_SECONDS, lambda: not workers.registry.attached)

    def _wait_for_confirmation(self) -> None:
        """A run that has made its last step may have solved its task with it."""
        workers, confirmation = self._workers, self._workers.confirmation
        if workers.stop_reason == "stop_steps":
            workers.look_for_end()
            if confirmation.under_way:
                self._local.start_evaluator()  # the run may have ended with its first update
            patience = self._config.driver.worker_timeout_seconds
            confirmation.wait(self._drain, self._seconds_left(), patience)
            if confirmation.outcome is not None:
                workers.stop_reason, self._solved = "solved", self._clock.now().wall
        confirmation.give_up()

    def _wait_for_snapshot(self, deadline: float) -> None:
        self._drain(_TELL_SECONDS, self._no_snapshot_comes)
        if not self._no_snapshot_comes():
            text = "waiting for the last checkpoint; a second Ctrl-C leaves without it"
            self._progress.message(text, "info")
            self._drain(deadline - time.monotonic(), self._no_snapshot_comes)

    def _no_snapshot_comes(self) -> bool:
        """None is under way, or the learners that it should come from say nothing more."""
        if self._snapshots.writing or not self._snapshots.under_way:
            return not self._snapshots.under_way
        learners = [each for name, each in self._hub.vitals().items() if name.startswith(LEARNER)]
        return all(each.seconds_silent > _SILENCE_SECONDS for each in learners)

    def _has_saved(self) -> bool:
        """Whether a synchronous run has a checkpoint of its last update: taken between two rounds,
        as no other could be now."""
        return self._config.driver.synchronous and self._newest_update() == self._workers.updates

    def _newest_update(self) -> int | None:
        """Of the newest checkpoint."""
        newest = self._snapshots.newest
        return int(newest.stem) if newest else None

    def _see_what_failed(self) -> None:
        """A run that trained on nothing, or has no checkpoint of its end, did not end well."""
        workers = self._workers
        if workers.failure:
            return
        if workers.stop_reason == "stop_seconds" and workers.updates == self._updates_before:
            workers.failure = f"nothing was trained on. {self._standstill.what_is_there()}"
        elif workers.stop_reason in _IN_PART and self._local.keep_failing(ENVRUNNER):
            workers.failure = (
                f"it got to {workers.stop_reason}, but {self._config.env_runner.env} kept failing "
                f"in every EnvRunner: {workers.registry.last_failure or 'see above'}"
            )
        else:
            last = (workers.confirmation.outcome or {}).get("update", workers.updates)
            if last and self._newest_update() != last:
                workers.failure = f"the last checkpoint, of update {last}, was not written"

    def _drain(self, seconds: float, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not done() and (left := deadline - time.monotonic()) > 0:
            for event in self._mailbox.gather(min(left, _LOOK_SECONDS)):
                self._on(event)

    def _close_books(self) -> dict[str, Any]:
        workers = self._workers
        if self._last_line is None:  # the loop was left in its middle
            workers.happened(Finish())
            self._last_line = self._write_line()
        newest = self._snapshots.newest
        summary = {
            **self._last_line,
            "startup_time": self._last_line["wall_time"] - self._last_line["training_time"],
            "solved": self._solved is not None,
            "confirmation": workers.confirmation.outcome,
            "wall_seconds_to_first_update": self._first_update,
            "wall_seconds_to_solved": self._solved,
            "reason_for_stop": workers.stop_reason or "killed",
            "failure": workers.failure or None,
            "run_dir": str(self._directory.path),
            "checkpoint": str(newest) if newest and newest.is_dir() else None,
        }
        try:
            self._directory.write_summary(summary)
        except RunDirectoryError as error:
            self._progress.message(str(error), "error")
        self._progress.finish(summary)
        self._directory.close()
        return summary

    def _seconds_left(self) -> float:
        limit = self._config.driver.stop_seconds
        return math.inf if limit is None else limit - self._clock.now().training
