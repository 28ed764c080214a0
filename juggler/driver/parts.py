"""The parts of a run, and how they hang together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from juggler.driver.callbacks import Callback, Callbacks, Run
from juggler.driver.changed_values import ChangedValues
from juggler.driver.checkpoint.beginning import Beginning
from juggler.driver.checkpoint.best import BestCheckpoint
from juggler.driver.checkpoint.checkpointing import Checkpointing
from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.checkpoint.restoring import core_of, metrics_of
from juggler.driver.checkpoint.snapshots import SnapshotWriter
from juggler.driver.config import RunConfig
from juggler.driver.core.events import Command, Event
from juggler.driver.league_players import trained_now
from juggler.driver.record.progress import Progress
from juggler.driver.run_clock import RunClock
from juggler.driver.run_end import RunEnd
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.confirmation import Confirmation
from juggler.driver.workers.connector_state import ConnectorState
from juggler.driver.workers.departures import Departures
from juggler.driver.workers.evaluations import Evaluations, Evaluators
from juggler.driver.workers.frozen_parts import FrozenParts
from juggler.driver.workers.league_run import LeagueRun
from juggler.driver.workers.learners import Learners
from juggler.driver.workers.leaving_learners import LeavingLearners
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.registry import WorkerRegistry
from juggler.driver.workers.stale_runners import StaleRunners
from juggler.driver.workers.trained_modules import TrainedModules
from juggler.runtime.actors.hub import Hub
from juggler.runtime.checkpoints.checkpoint import Checkpoint


class RunParts:
    """What the loop, the events of workers, the status and the end of a run share.

    Each part is written to by its own methods alone.

    Args:
        run_dir: where the run writes.
        resume: a state to go on from.
        only_local: all workers are processes of this host that the driver starts.
        beginning: what the run began with that another one has learned.
        frozen: the modules that are not trained, by id.
        callbacks: of the script.
        stop: asks the loop, from any thread, to end the run for a reason.

    Attributes:
        core: what becomes of batches, module by module.
        end: why the run is to end.
        clock: how long it has taken.
        local: the worker processes of this host.
        registry: who is here.
        league: what is told to the league of a run; None: it has none.
        frozen_parts: the weights of modules that are not trained, on their way to EnvRunners.
        commands: what workers are told.
        values: numbers that callbacks have put in the place of schedules.
        trained: the modules that are trained, which may come and go.
        connectors: by module id, what the connectors of EnvRunners have learned.
        learners: by module id, the group that trains it.
        leaving_learners: those that go because fewer are wanted.
        metrics: what receipts and updates said.
        snapshots: cuts of the state on their way to the disk.
        checkpointing: when such a cut is made.
        evaluations: how well the newest weights play.
        confirmation: whether the run is solved.
        departures: workers that leave, and processes that end.
        callbacks: tells those of the script what happens.
        stale_runners: by module id, EnvRunners whose steps come too late.
    """

    def __init__(
        self,
        config: RunConfig,
        hub: Hub,
        local: LocalWorkers,
        progress: Progress,
        snapshots: SnapshotWriter,
        clock: RunClock,
        run_dir: Path,
        resume: Checkpoint | None = None,
        only_local: bool = True,
        beginning: Beginning | None = None,
        frozen: Mapping[str, FrozenModule] | None = None,
        callbacks: Sequence[Callback] = (),
        stop: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config = config
        self.hub = hub
        self.local = local
        self.progress = progress
        self.snapshots = snapshots
        self.clock = clock
        self.only_local = only_local
        self.end = RunEnd(clock)
        self.core = core_of(config, resume)
        trained = trained_now(config, resume.counters if resume else None)
        self.values = ChangedValues(config, trained, resume)
        if told := self.values.in_words():
            progress.message(f"callbacks have set {told}, which the run goes on with")
        self.metrics = metrics_of(resume)
        run = Run(run_dir, config.flat(), self.core, progress, stop, self.values, self.metrics)
        self.callbacks = Callbacks(run, self.end, progress, callbacks)
        most_learners = config.driver.most_learners(dialled=not only_local)
        present = dict(frozen or {})
        self.registry = WorkerRegistry(
            config,
            self.core.updates_before,
            most_learners,
            frozen=present,
            trained=trained,
        )
        self.frozen_parts = FrozenParts(present)
        self.connectors: dict[str, ConnectorState] = {}
        self.commands = CommandSender(hub, self.registry, self.connectors, self.values)
        self.trained = TrainedModules(
            config,
            self.core,
            self.registry,
            self.commands,
            self.frozen_parts,
            self.connectors,
            snapshots,
            progress,
            resume,
            beginning,
        )
        self.leaving_learners = LeavingLearners(
            self.core,
            self.registry,
            self.commands,
            local,
            config.driver.worker_timeout_seconds,
        )
        self.league: LeagueRun | None = None
        if config.agents.league:
            self.league = self.commands.league = LeagueRun(
                config,
                run_dir,
                self.core,
                self.registry,
                self.commands,
                self.trained,
                self.frozen_parts,
                progress,
                resume,
                beginning,
            )
        self.checkpointing = Checkpointing(
            config.driver,
            self.core,
            self.registry,
            self.commands,
            snapshots,
            self.core.updates_before,
            self.league.learners.needed if self.league else tuple,
        )
        evaluators = Evaluators(
            self.registry, self.commands, self.frozen_parts, self.metrics, only_local=only_local
        )
        self.evaluations = Evaluations(
            config,
            evaluators,
            self.core,
            self.connectors,
            self.metrics,
            self.checkpointing,
            snapshots,
            BestCheckpoint(run_dir),
            self.callbacks,
            progress,
        )
        self.confirmation = Confirmation(
            config, evaluators, self.metrics, self.checkpointing, snapshots, progress
        )
        self.departures = Departures(
            config,
            self.end,
            self.registry,
            local,
            self.confirmation,
            self.metrics,
            progress,
            only_local,
        )

    @property
    def learners(self) -> Mapping[str, Learners]:
        return self.trained.learners

    @property
    def restarts(self) -> int:
        """Workers that took the place of others, on this host and on others."""
        return self.local.restarts + self.metrics.workers.remote_restarts()

    @property
    def stale_runners(self) -> Mapping[str, StaleRunners]:
        return self.trained.stale_runners

    def more_counters(self) -> dict[str, Any]:
        """What a checkpoint has of the run beside its books."""
        league = self.league.counters() if self.league else {}
        return {**league, **self.values.to_state()}

    def happened(self, event: Event) -> None:
        """Tell the core, and send what it wants sent because of it."""
        self.carry_out(self.core.book(event))

    def carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self.commands.carry_out(command)
