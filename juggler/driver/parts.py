"""The parts of a run, and how they hang together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from juggler.driver.checkpoint.beginning import Beginning
from juggler.driver.checkpoint.checkpointing import Checkpointing
from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.checkpoint.restoring import connectors_of, core_of, metrics_of
from juggler.driver.checkpoint.snapshots import SnapshotWriter
from juggler.driver.config import RunConfig
from juggler.driver.core.events import Command, Event
from juggler.driver.record.progress import Progress
from juggler.driver.run_clock import RunClock
from juggler.driver.run_end import RunEnd
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.confirmation import Confirmation
from juggler.driver.workers.departures import Departures
from juggler.driver.workers.evaluations import Evaluations, Evaluator
from juggler.driver.workers.frozen_parts import FrozenParts
from juggler.driver.workers.league_run import LEAGUE, LeagueRun
from juggler.driver.workers.learners import Learners
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.registry import WorkerRegistry
from juggler.driver.workers.stale_runners import StaleRunners
from juggler.runtime.actors.hub import Hub
from juggler.runtime.checkpoints.checkpoint import Checkpoint


class RunParts:
    """What the loop, the events of workers, the status and the end of a run share.

    Each part is written to by its own methods alone.

    Args:
        run_dir: where the run writes.
        resume: a state to go on from.
        only_local: all workers are processes of this host that the driver starts.
        beginning: what a new run begins with that another one has learned.
        frozen: the modules that are not trained, by id.

    Attributes:
        core: what becomes of batches, module by module.
        end: why the run is to end.
        clock: how long it has taken.
        local: the worker processes of this host.
        registry: who is here.
        league: what is told to the league of a run; None: it has none.
        frozen_parts: the weights of modules that are not trained, on their way to EnvRunners.
        commands: what workers are told.
        connectors: by module id, what the connectors of EnvRunners have learned.
        learners: by module id, the group that trains it.
        metrics: what receipts and updates said.
        snapshots: cuts of the state on their way to the disk.
        checkpointing: when such a cut is made.
        evaluations: how well the newest weights play.
        confirmation: whether the run is solved.
        departures: workers that leave, and processes that end.
        stale_runners: by module id, EnvRunners whose steps come too late.
        updates_before: that the weights had when this process began.
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
        self.updates_before = self.core.updates
        self.metrics = metrics_of(resume)
        self.connectors = {
            module_id: connectors_of(resume, beginning, module_id)
            for module_id in self.core.modules
        }
        most_learners = config.driver.most_learners(dialled=not only_local)
        present = dict(frozen or {})
        self.registry = WorkerRegistry(config, self.updates_before, most_learners, frozen=present)
        self.frozen_parts = FrozenParts(present)
        self.commands = CommandSender(hub, self.registry, self.connectors)
        self.league: LeagueRun | None = None
        if config.agents.league:
            self.league = self.commands.league = LeagueRun(
                config,
                run_dir,
                self.core,
                self.registry,
                self.commands,
                self.connectors,
                self.frozen_parts,
                progress,
                None if resume is None else resume.counters.get(LEAGUE),
                beginning.weights if beginning else {},
            )
        several = len(self.core.modules) > 1
        self.stale_runners = {
            module_id: StaleRunners(
                config.of(module_id).staleness.drop_after, module_id if several else ""
            )
            for module_id in self.core.modules
        }
        self.learners = {
            module_id: Learners(config, core, self.registry, snapshots, progress, resume, beginning)
            for module_id, core in self.core.modules.items()
        }
        self.checkpointing = Checkpointing(
            config.driver,
            self.core,
            self.registry,
            self.commands,
            snapshots,
            self.updates_before,
        )
        evaluator = Evaluator(self.registry, self.commands, self.metrics)
        self.evaluations = Evaluations(config, evaluator, self.connectors, self.metrics, progress)
        self.confirmation = Confirmation(
            config, evaluator, self.metrics, self.checkpointing, snapshots, progress
        )
        if not only_local:
            self.confirmation.impossible("among workers that dial in nobody evaluates")
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

    def happened(self, event: Event) -> None:
        """Tell the core, and send what it wants sent because of it."""
        self.carry_out(self.core.book(event))

    def carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self.commands.carry_out(command)
