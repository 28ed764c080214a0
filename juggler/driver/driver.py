"""One run, from its first worker to its summary."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from juggler.driver.callbacks import Callback
from juggler.driver.checkpoint.beginning import Beginning
from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.checkpoint.snapshots import SnapshotWriter
from juggler.driver.config import RunConfig
from juggler.driver.ending import Ending
from juggler.driver.loop import Event, Loop, StopAsked
from juggler.driver.monitoring import MonitoringOptions, MonitoringServices
from juggler.driver.parts import RunParts
from juggler.driver.record.driver_file import announce, withdraw
from juggler.driver.record.journal import Journal, LineWriter
from juggler.driver.record.progress import Progress
from juggler.driver.record.run_directory import RunDirectory
from juggler.driver.record.wording import Level
from juggler.driver.run_clock import RunClock
from juggler.driver.signals import signals_become
from juggler.driver.status import StatusReader
from juggler.driver.upkeep import Upkeep
from juggler.driver.workers.learners import PEER_SILENCE_SECONDS
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.worker_events import WorkerEvents
from juggler.envrunner.program import ENVRUNNER, EVALUATOR
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.hub import Hub, HubSettings
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.tls import Tls
from juggler.runtime.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a driver takes workers of other hosts.

    Attributes:
        address: "host:port".
        insecure: beyond loopback even without TLS or without a token.
        token: that every worker has to show; empty admits all.
        tls: of this host; None: connections are plain.
    """

    address: str
    insecure: bool = False
    token: str = field(default="", repr=False)
    tls: Tls | None = None


class RunFailed(RuntimeError):
    """A run that could not go on; the message says why. Its directory holds what it got to."""


class Driver:
    """One run: puts its parts together, starts its workers, runs its loop, and closes everything.

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
        frozen: Mapping[str, FrozenModule] | None = None,
        listen: Listen | None = None,
        monitoring: MonitoringOptions | None = None,
        callbacks: Sequence[Callback] = (),
        before: Sequence[tuple[str, Level]] = (),
    ) -> None:
        """
        Args:
            config: of the run.
            directory: where it writes.
            progress: shows people what happens.
            started: when the command was given, in seconds of `time.monotonic`.
            own_code: cloudpickled factories for local workers; see `EnvRunnerProgram`.
            resume: a state to go on from.
            beginning: what the run began with that another one has learned.
            frozen: its modules that are not trained, by id.
            listen: take workers of other hosts there, and start none here.
            monitoring: what else it serves besides its status; None: nothing.
            callbacks: of the script.
            before: what people are to be told first: it came up before the run had a directory.
        """
        self.signal = 0
        self._config = config
        self._directory = directory
        self._before = before
        self._beginning = None if resume else beginning  # to be told of
        self._listen = listen
        self._bound: list[str] = []  # the addresses that this driver listens at
        self._run_id = secrets.token_hex(6)
        token = listen.token if listen else secrets.token_hex(16)
        clock = RunClock(started, resume)
        journal = Journal(progress, directory.path, self._run_id)
        self._mailbox: Mailbox[Event] = Mailbox()
        self._monitoring = MonitoringServices(
            monitoring or MonitoringOptions(), token, self._mailbox.put
        )
        most_learners = config.driver.most_learners(dialled=listen is not None)
        settings = HubSettings(
            run_id=self._run_id,
            roles=(ENVRUNNER, LEARNER, EVALUATOR),
            token=token,
            tls=listen.tls if listen else None,
            hang_seconds=config.driver.hang_seconds,
            # In a group, others wait for a learner that hangs.
            silence_of={LEARNER: PEER_SILENCE_SECONDS} if most_learners > 1 else {},
            most_of={LEARNER: most_learners} if listen else {},
            services=self._monitoring.services,
        )
        self._hub = Hub(settings, self._mailbox)
        self._local = LocalWorkers(self._mailbox, self._run_id, token, own_code)
        newest = resume.path if resume else None
        self._parts = parts = RunParts(
            config,
            self._hub,
            self._local,
            journal,
            SnapshotWriter(self._mailbox, directory.checkpoints, config, clock, newest),
            clock,
            directory.path,
            resume,
            only_local=listen is None,
            beginning=beginning,
            frozen=frozen,
            callbacks=callbacks,
            stop=lambda reason: self._mailbox.put(StopAsked(reason)),
        )
        status = StatusReader(self._run_id, directory.path, parts, journal)
        lines = LineWriter(directory, journal)
        self._upkeep = upkeep = Upkeep(parts, lines, self._bound, self._announce)
        self._loop = Loop(parts, WorkerEvents(parts), self._mailbox, upkeep, status)
        self._ending = Ending(parts, self._loop, upkeep, self._hub, directory)

    def run(self) -> dict[str, Any]:
        """Train until a stop condition holds, somebody interrupts, or nothing can go on.

        Returns:
            The summary, which `summary.json` holds too.

        Raises:
            RunFailed: the run ended because something failed.
            Exception: what a callback raised; SystemExit if it called `sys.exit`.
            EndpointError: the driver cannot listen where it should.
        """
        summary: dict[str, Any] = {}
        self._begin_to_listen()
        try:
            self._drive(summary)
        finally:
            # Signals do again what they do in any program: a script may take its time here.
            self._parts.callbacks.finish(summary)
        # After a signal, the signal ends the program; people have been told of the error.
        if (error := self._parts.callbacks.error) and not self.signal:
            ended = f"The run in {self._directory.path} ended because a callback raised this."
            error.add_note(ended + self._ending.how_to_go_on())
            raise error
        if self._parts.end.failure:
            raise RunFailed(self._parts.end.failure + self._ending.how_to_go_on())
        return summary

    def _drive(self, summary: dict[str, Any]) -> None:
        """From the first worker until everything is closed; fills the summary."""
        grace = 0.0
        with signals_become(lambda reason: self._mailbox.put(StopAsked(reason))) as caught:
            try:
                self._start()
                self._loop.run()
                self._monitoring.ready(False)
                self._ending.wind_down()
                grace = self._ending.leave_seconds
            finally:
                caught.no_more()
                self.signal = caught.number
                # Each of these is done whatever becomes of the one before.
                with ExitStack() as last:
                    last.callback(lambda: summary.update(self._ending.close_books()))
                    last.callback(self._hub.close)
                    last.callback(self._local.close, grace)
                    last.callback(self._monitoring.close)
                    last.callback(withdraw, self._directory.path)

    def _begin_to_listen(self) -> None:
        listen = self._listen
        addresses = [self._local.driver_address] + ([listen.address] if listen else [])
        try:
            self._bound += self._hub.start(addresses, insecure=bool(listen and listen.insecure))
            self._monitoring.start()
        except BaseException:
            self._hub.close()
            self._local.close(grace=0.0)
            raise

    def _start(self) -> None:
        progress, updates = self._parts.progress, self._parts.core.updates_before
        for text, level in self._before:
            progress.message(text, level)
        progress.start(self._config.flat())
        if updates:
            progress.message(f"going on from update {updates}", "info")
        if self._beginning is not None:
            progress.message(f"beginning with {self._beginning.text}", "info")
            for warning in self._beginning.warnings:
                progress.message(warning, "warning")
        self._announce()
        self._parts.callbacks.start()
        self._monitoring.ready(True)
        if self._listen is None:
            self._local.start(self._config.driver, self._config.env_runner.gateway)
        else:
            progress.message(f"waiting for workers at {self._bound[-1]}", "info")

    def _announce(self) -> None:
        if problem := announce(self._directory.path, self._run_id, self._bound):
            self._parts.progress.message(problem, "error")
