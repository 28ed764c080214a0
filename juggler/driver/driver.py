"""One run, from its first worker to its summary."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from juggler.driver.callbacks import Callback
from juggler.driver.config import RunConfig
from juggler.driver.core.events import Finish, StopRequested
from juggler.driver.loop import Event, Loop, StopAsked
from juggler.driver.monitoring import MonitoringOptions, MonitoringServices
from juggler.driver.periodic_work import PeriodicWork
from juggler.driver.reporting.progress import Journal
from juggler.driver.reporting.run_directory import (
    RunDirectory,
    RunDirectoryError,
    announce,
    to_json,
    withdraw,
)
from juggler.driver.reporting.wording import IN_PYTHON, Level, Progress, resuming
from juggler.driver.run_end import RunClock
from juggler.driver.run_parts import InheritedState, RunParts
from juggler.driver.run_status import StatusReader
from juggler.driver.script_classes import is_of_a_script
from juggler.driver.signals import REASONS, signals_become, stop_hint
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.trained_modules import PEER_SILENCE_SECONDS
from juggler.driver.workers.worker_events import WorkerEvents
from juggler.envrunner.envrunner_program import ENVRUNNER, EVALUATOR, GatewayAddress
from juggler.learner.process.learner_program import LEARNER
from juggler.runtime.actors.hub import Hub, HubSettings, Mailbox
from juggler.runtime.actors.tls import Tls
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

#: Limits on the duration of a run's end. It usually takes less than the 5 s that people wait after
#: a Ctrl-C. A large last checkpoint takes up to 40 s, recordings up to 30 s, and trackers up to
#: two minutes.
_LAST_UPDATES_SECONDS = 1.0
_SILENCE_SECONDS = 2.5  # of learners that should send a state; they send a message every second
_LEAVE_SECONDS = 0.5
_SIMULATORS_SECONDS = 4.0  # for gateways, which wait until simulators have read the end
_RECORDING_SECONDS = 30.0  # for EnvRunners that are still writing recordings
#: A large state may take longer, because it is worth keeping: containers have a minute to end.
_LAST_CHECKPOINT_SECONDS = 40.0
_REPORT_SECONDS = 2.0  # until a message explains the wait

#: Reasons to stop that are no failure even if nothing was learned.
_IN_PART = ("stop_steps", "stop_seconds")


class Shutdown:
    """Winds a run down, and closes its books."""

    def __init__(
        self, parts: RunParts, loop: Loop, periodic_work: PeriodicWork, directory: RunDirectory
    ) -> None:
        self._parts = parts
        self._loop = loop
        self._periodic_work = periodic_work
        self._directory = directory
        self._command = "train" if parts.only_local else "driver"
        if is_of_a_script(parts.config):
            self._command = IN_PYTHON
        self._last_line: dict[str, Any] | None = None
        self._wait_was_reported = False  # the message about the last checkpoint was shown
        self._hung = ""  # where all environments hung when the run should end

    def wind_down(self) -> float:
        """Finish updates, make the last checkpoint, and release the workers.

        Returns:
            Seconds that workers of this host have to exit.
        """
        parts, checkpoints = self._parts, self._parts.checkpoints
        self._hung = self._periodic_work.standstill.hung_runners(parts.hub.vitals())
        parts.happened(StopRequested())
        self._finish_updates()
        self._wait_for_snapshot(time.monotonic() + _LAST_CHECKPOINT_SECONDS)
        self._wait_for_confirmation()
        deadline = time.monotonic() + _LAST_CHECKPOINT_SECONDS
        self._wait_for_snapshot(deadline)
        synchronous = parts.config.driver.synchronous  # it only saves between two turns
        has_saved = synchronous and self._newest_update() == parts.core.updates
        # A solved run keeps the confirmed weights, although there are newer ones.
        if parts.evaluations.kept is not None:
            if problem := checkpoints.keep(parts.evaluations.kept):
                parts.progress.message(problem, "error")
            elif checkpoints.newest:
                parts.callbacks.note("on_checkpoint", checkpoints.newest)
        elif parts.core.updates and not has_saved and checkpoints.begin():
            self._wait_for_snapshot(deadline)
        parts.evaluations.give_up()
        self._check_for_failure()
        parts.happened(Finish())
        self._last_line = self._periodic_work.write_line()
        parts.callbacks.deliver()
        # A worker that leaves at once would be replaced while another is still busy.
        parts.local.supervisor.stop_restarting()
        for worker in list(parts.registry.attached.values()):
            parts.commands.send(worker, attach_pb2.Stop())
        self._loop.drain(_LEAVE_SECONDS, lambda: not parts.registry.attached)
        runner = parts.config.env_runner
        leave_seconds = _SIMULATORS_SECONDS if runner.gateway else _LEAVE_SECONDS
        return _RECORDING_SECONDS if runner.record else leave_seconds

    def _finish_updates(self) -> None:
        """Wait for updates in flight, and for all metrics of the learners.

        Learners send metrics twice a second. Those of the last updates may show a module that
        cannot improve.
        """
        core, commands = self._parts.core, self._parts.commands
        for module_id, module in core.modules.items():
            for learner in module.members:
                last = training_pb2.Update(module_id=module_id, metrics_only=True)
                commands.send_to(learner, last)
        self._loop.drain(
            _LAST_UPDATES_SECONDS,
            lambda: core.idle and not commands.pool.has_in_flight(training_pb2.Update),
        )

    def _wait_for_confirmation(self) -> None:
        """Wait for the evaluation that confirms whether the run is solved."""
        parts, evaluations = self._parts, self._parts.evaluations
        if parts.end.reason == "stop_steps":
            evaluations.is_solved()
            if evaluations.confirming and parts.only_local:
                parts.local.start_evaluators()  # the run may have ended with its first update
            driver = parts.config.driver
            left = math.inf
            if driver.stop_seconds is not None:
                left = driver.stop_seconds - parts.clock.now().training
            evaluations.wait_for_verdict(self._loop.drain, left, driver.worker_timeout_seconds)
            if evaluations.outcome is not None:
                parts.end.solved_after_all()
        evaluations.give_up_candidate()

    def _wait_for_snapshot(self, deadline: float) -> None:
        self._loop.drain(_REPORT_SECONDS, self._expects_no_snapshot)
        if self._expects_no_snapshot():
            return
        # Once, although there may be several snapshots.
        if not self._wait_was_reported:
            self._wait_was_reported = True
            was_signalled = self._parts.end.reason in REASONS.values()
            presses = "a second Ctrl-C" if was_signalled else "Ctrl-C twice"
            how = stop_hint(f"{presses} leaves without it")
            self._parts.progress.message(f"waiting for the last checkpoint{how}", "info")
        self._loop.drain(deadline - time.monotonic(), self._expects_no_snapshot)

    def _expects_no_snapshot(self) -> bool:
        """Return whether no snapshot is expected, or its learners are silent."""
        checkpoints = self._parts.checkpoints
        if checkpoints.writing or not checkpoints.under_way:
            return not checkpoints.under_way
        vitals = self._parts.hub.vitals()
        learners = [each for name, each in vitals.items() if name.startswith(LEARNER)]
        return all(each.seconds_silent > _SILENCE_SECONDS for each in learners)

    def _newest(self) -> Path | None:
        """The newest checkpoint, unless it was removed."""
        newest = self._parts.checkpoints.newest
        return newest if newest and newest.is_dir() else None

    def _newest_update(self) -> int | None:
        newest = self._newest()
        return int(newest.stem) if newest else None

    def _check_for_failure(self) -> None:
        """Mark a run as failed if it trained or saved nothing."""
        parts, end = self._parts, self._parts.end
        last = (parts.evaluations.outcome or {}).get("update", parts.core.updates)
        # A goal reached while nothing works is no success.
        if end.reason == "stop_seconds" and not parts.core.has_updated:
            standstill = self._periodic_work.standstill
            end.failed_at(f"nothing was trained on. {standstill.describe_workers()}")
        elif end.reason in _IN_PART and parts.local.keep_failing(ENVRUNNER):
            end.failed_at(
                f"it reached {end.reason}, but {parts.config.env_runner.env} kept failing in every "
                f"EnvRunner: {parts.departures.last_failure or parts.departures.last_exit}"
            )
        elif end.reason == "stop_seconds" and self._hung:
            end.failed_at(
                f"it reached stop_seconds, but {parts.config.env_runner.env} hung in every "
                f"EnvRunner: {self._hung}"
            )
        elif last and self._newest_update() != last:
            end.failed_at(f"the last checkpoint, of update {last}, was not written")

    def close_books(self) -> dict[str, Any]:
        """Write the summary, even if the loop ended unexpectedly."""
        parts = self._parts
        if self._last_line is None:
            parts.happened(Finish())
            self._last_line = self._periodic_work.write_line()
        newest = self._newest()
        summary: dict[str, Any] = {
            **self._last_line,
            "startup_time": self._last_line["wall_time"] - self._last_line["training_time"],
            "solved": parts.end.solved_at is not None,
            "confirmation": parts.evaluations.outcome,
            "last_restart": parts.metrics.workers.last_restart or None,
            "wall_seconds_to_first_update": self._loop.first_update,
            "wall_seconds_to_solved": parts.end.solved_at,
            # An unexpected exception leaves no reason.
            "reason_for_stop": parts.end.reason or "killed",
            "failure": parts.end.failure or None,
            "run_dir": str(self._directory.path),
            "command": self._command,
            "checkpoint": str(newest) if newest else None,
            "best": parts.evaluations.best.summary,
        }
        try:
            self._directory.write_summary(summary)
        except RunDirectoryError as error:
            parts.progress.message(str(error), "error")
        parts.progress.finish(summary)
        self._directory.close()
        # As a reader of summary.json finds it.
        return {key: to_json(value) for key, value in summary.items()}

    def how_to_resume(self) -> str:
        """Describe how to resume after a failure, if updates were made."""
        update = self._newest_update()
        if not self._parts.core.has_updated:
            return ""
        if update is None:
            return "\nThere is no checkpoint to resume from"
        return f"\nTo resume from update {update}: {resuming(self._directory.path, self._command)}"


@dataclass(frozen=True, slots=True)
class Listen:
    """Address at which a driver accepts workers of other hosts."""

    address: str  # "host:port"
    insecure: bool = False  # allows addresses beyond loopback without TLS or a token
    token: str = field(default="", repr=False)  # required from every worker; "": all are admitted
    tls: Tls | None = None  # of this host; None: connections are plain


@dataclass(frozen=True, slots=True)
class StartSettings:
    """Settings with which any run starts or resumes."""

    started: float  # time of the command, in seconds of `time.monotonic`
    own_code: bytes = b""  # cloudpickled factories for local workers; see `EnvRunnerProgram`
    listen: Listen | None = None  # accept workers of other hosts there, and start no local ones
    # Services of the driver in addition to its status
    monitoring: MonitoringOptions = field(default_factory=MonitoringOptions)
    callbacks: Sequence[Callback] = ()


class RunFailed(RuntimeError):
    """A run that could not continue; the message has the reason.

    Its directory has its results so far.
    """


class Driver:
    """One run, from its parts and workers to its summary."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        progress: Progress,
        how: StartSettings,
        inherited: InheritedState,
        before: Sequence[tuple[str, Level]],
    ) -> None:
        """Make the parts of a run."""
        listen = how.listen
        self.signal = 0  # signal received during the run; 0: none
        self._config = config
        self._directory = directory
        self._before = before
        self._listen = listen
        self._bound: list[str] = []  # the addresses that this driver listens at
        self._run_id = secrets.token_hex(6)
        token = listen.token if listen else secrets.token_hex(16)
        clock = RunClock(how.started, inherited.resume)
        journal = Journal(progress, directory.path, self._run_id)
        # One mailbox keeps the order of all events.
        self._mailbox: Mailbox[Event] = Mailbox()
        self._monitoring = MonitoringServices(how.monitoring, token, self._mailbox.put)
        self._hub = self._make_hub(token)
        self._local = LocalWorkers(self._mailbox, self._run_id, token, how.own_code)
        self._parts = parts = RunParts(
            config,
            self._hub,
            self._local,
            journal,
            clock,
            directory.path,
            directory.checkpoints,
            self._mailbox.put,
            inherited,
            only_local=listen is None,
            # Any thread may ask for it, so the loop reads it between other events.
            stop=lambda reason: self._mailbox.put(StopAsked(reason)),
            callbacks=how.callbacks,
        )
        # These know all parts, so they come last.
        self._periodic_work = periodic = PeriodicWork(parts, directory, self._bound, self._announce)
        status = StatusReader(self._run_id, parts, journal, lambda: periodic.newest_line)
        self._loop = Loop(parts, WorkerEvents(parts), self._mailbox, periodic, status)
        self._ending = Shutdown(parts, self._loop, periodic, directory)

    def _make_hub(self, token: str) -> Hub:
        driver, listen = self._config.driver, self._listen
        most_learners = driver.most_learners(dialled=listen is not None)
        settings = HubSettings(
            run_id=self._run_id,
            roles=(ENVRUNNER, LEARNER, EVALUATOR),
            token=token,
            tls=listen.tls if listen else None,
            hang_seconds=driver.hang_seconds,
            most_of={LEARNER: most_learners} if listen else {},
            services=self._monitoring.services,
        )
        hub = Hub(settings, self._mailbox)
        if most_learners > 1:  # in a group, all learners wait for one that hangs
            hub.lose_after(LEARNER, PEER_SILENCE_SECONDS)
        return hub

    def run(self) -> dict[str, Any]:
        """Train until a stop condition, an interrupt or a failure.

        Raises:
            Exception: the exception of a callback; SystemExit if it called `sys.exit`.
        """
        summary: dict[str, Any] = {}
        self._start_listening()
        try:
            self._drive(summary)
        finally:
            # Restore the default signal handling: a script's code may be slow here.
            self._parts.callbacks.finish(summary)
        # After a signal, the signal ends the program; the error was already shown.
        if (error := self._parts.callbacks.error) and not self.signal:
            ended = f"The run in {self._directory.path} ended because a callback raised this."
            error.add_note(ended + self._ending.how_to_resume())
            raise error
        if self._parts.end.failure:
            raise RunFailed(self._parts.end.failure + self._ending.how_to_resume())
        return summary

    def _drive(self, summary: dict[str, Any]) -> None:
        """Run from the first worker until everything is closed; fill the summary."""
        grace = 0.0
        with signals_become(lambda reason: self._mailbox.put(StopAsked(reason))) as caught:
            try:
                self._start()
                self._loop.run()
                self._monitoring.ready(False)
                grace = self._ending.wind_down()
            finally:
                caught.no_more()
                self.signal = caught.number
                # Each of these is done, even if an earlier one fails.
                with ExitStack() as last:
                    last.callback(lambda: summary.update(self._ending.close_books()))
                    last.callback(self._hub.close)
                    last.callback(self._local.close, grace)
                    last.callback(self._monitoring.close)
                    last.callback(withdraw, self._directory.path)

    def _start_listening(self) -> None:
        listen = self._listen
        addresses = [self._local.driver_address] + ([listen.address] if listen else [])
        try:
            self._bound += self._hub.start(addresses, insecure=bool(listen and listen.insecure))
            self._monitoring.start()
        except BaseException:
            self._monitoring.close()
            self._hub.close()
            self._local.close(grace=0.0)
            raise

    def _start(self) -> None:
        progress, updates = self._parts.progress, self._parts.core.updates_before
        for text, level in self._before:
            progress.message(text, level)
        progress.start(self._config.flat())
        if updates:
            progress.message(f"resuming from update {updates}", "info")
        self._announce()
        self._parts.callbacks.start()
        self._monitoring.ready(True)
        if self._listen is None:
            gateway, logs = self._config.env_runner.gateway, self._directory.path / "logs"
            taking = GatewayAddress(gateway, logs=str(logs)) if gateway else None
            self._local.start(self._config.driver, taking)
        else:
            progress.message(f"waiting for workers at {self._bound[-1]}", "info")

    def _announce(self) -> None:
        if problem := announce(self._directory.path, self._run_id, self._bound):
            self._parts.progress.message(problem, "error")
