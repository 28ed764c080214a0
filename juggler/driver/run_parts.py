"""The parts of a run, and their connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from google.protobuf.message import Message

from juggler.driver.agent_tables import trained_now
from juggler.driver.callbacks import Callback, Callbacks, ChangedValues, Run
from juggler.driver.checkpoint.first_weights import FirstWeights, FrozenModule
from juggler.driver.checkpoint.snapshots import (
    Checkpoints,
    SnapshotWritten,
    core_of,
    metrics_of,
    restores,
)
from juggler.driver.config import RunConfig
from juggler.driver.core.events import Command, Event
from juggler.driver.reporting.wording import Progress
from juggler.driver.run_end import RunClock, RunEnd
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.evaluations import Evaluations
from juggler.driver.workers.league_run import LeagueRun
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.trained_modules import TrainedModules
from juggler.driver.workers.worker_registry import Departures, LeavingLearners, WorkerRegistry
from juggler.envrunner.envrunner_program import ENVRUNNER
from juggler.envrunner.setup import ActingSetup
from juggler.runtime.actors.hub import Hub, Worker
from juggler.runtime.actors.worker import to_json
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


class FrozenParts:
    """Sends modules and players to workers part by part.

    This limits the memory in flight.

    Frozen modules are sent before the Setup; messages appended in between follow it.
    """

    def __init__(self, parts: RunParts) -> None:
        self._registry, self._commands = parts.registry, parts.commands
        self._to_send: dict[Worker, deque[Iterator[Message]]] = {}
        self._on_its_way: set[Worker] = set()  # workers that have not acknowledged their last part
        self._awaited: dict[str, set[Worker]] = {}  # by added player, EnvRunners without it

    def set_up(self, worker: Worker, setup: Message) -> None:
        """Send a worker all frozen modules, then its setup."""
        frozen = list(self._registry.frozen.items())
        parts = (part for name, module in frozen for part in restores(name, module.tree, {}))
        self.append(worker, chain(parts, [setup]))

    def add_player(
        self, module_id: str, setup: ActingSetup, tree: Mapping[str, Tree] | None = None
    ) -> None:
        """Send a player to workers that play, with its weights if given."""
        workers = self._registry.acting_workers()
        # Matches wait for EnvRunners alone.
        self._awaited[module_id] = {each for each in workers if each.role == ENVRUNNER}
        for worker in workers:
            parts = () if tree is None else restores(module_id, tree, {})
            added = training_pb2.AddPlayer(module_id=module_id, config=to_json(setup))
            self.append(worker, chain(parts, [added]))

    def remove_player(self, module_id: str) -> None:
        """Let workers forget a player."""
        self._awaited.pop(module_id, None)
        for worker in self._registry.acting_workers():
            self.append(worker, [training_pb2.RemovePlayer(module_id=module_id)])

    def received(self, worker: Worker, module_id: str) -> None:
        """Note that a worker has received an added player."""
        self._awaited.get(module_id, set()).discard(worker)

    def awaited(self, module_id: str) -> bool:
        """Return whether an EnvRunner has not received a player yet."""
        return bool(self._awaited.get(module_id))

    def append(self, worker: Worker, messages: Iterable[Message]) -> None:
        """Send a worker messages after its other parts."""
        self._to_send.setdefault(worker, deque()).append(iter(messages))
        if worker not in self._on_its_way:
            self.send_next(worker)

    def send_next(self, worker: Worker) -> None:
        """Send a worker its next part, if there is one."""
        queue = self._to_send.get(worker, deque())
        while queue:
            if (message := next(queue[0], None)) is None:
                queue.popleft()
                continue
            self._commands.send(worker, message)
            # An evaluation takes long, and limits nothing.
            if not isinstance(message, training_pb2.Evaluate):
                self._on_its_way.add(worker)
                return
        self._on_its_way.discard(worker)

    def left(self, worker: Worker) -> None:
        self._to_send.pop(worker, None)
        self._on_its_way.discard(worker)
        for workers in self._awaited.values():
            workers.discard(worker)


@dataclass(frozen=True, slots=True, eq=False)
class InheritedState:
    """State that a run takes over from earlier runs."""

    resume: Checkpoint | None = None  # the state to resume from; None: the run is new
    # Weights from other runs by module id; others begin with new weights
    beginning: Mapping[str, FirstWeights] = field(default_factory=dict)
    # The run's modules that are not trained, by id
    frozen: Mapping[str, FrozenModule] = field(default_factory=dict)


class RunParts:
    """The parts shared by loop, events, status and end of a run.

    Each part changes only through its own methods.

    Args:
        checkpoints: directory of the run's checkpoints.
        written: called, in another thread, with each written checkpoint.
        only_local: all workers are processes of this host that the driver starts.
        stop: asks the loop, from any thread, to end the run for a reason.
    """

    def __init__(
        self,
        config: RunConfig,
        hub: Hub,
        local: LocalWorkers,
        progress: Progress,
        clock: RunClock,
        run_dir: Path,
        checkpoints: Path,
        written: Callable[[SnapshotWritten], object],
        inherited: InheritedState = InheritedState(),
        only_local: bool = True,
        callbacks: Sequence[Callback] = (),
        stop: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config, self.run_dir, self.hub, self.local = config, run_dir, hub, local
        self.progress, self.clock, self.only_local = progress, clock, only_local
        self.end = RunEnd(clock)
        resume, beginning = inherited.resume, inherited.beginning
        self.core = core_of(config, resume)
        trained = trained_now(config, resume.counters if resume else None)
        # Numbers that callbacks have set instead of schedules
        self.values = ChangedValues(config, trained, resume)
        if changed := self.values.in_words():
            progress.message(f"the run continues with values set by callbacks: {changed}")
        self.metrics = metrics_of(resume)
        run = Run(run_dir, config.flat(), self.core, progress, stop, self.values, self.metrics)
        self.callbacks = Callbacks(run, self.end, progress, callbacks)
        most_learners = config.driver.most_learners(dialled=not only_local)
        # The other parts look up workers here.
        self.registry = WorkerRegistry(
            config,
            self.core.updates_before,
            most_learners,
            frozen=dict(inherited.frozen),
            trained=trained,
        )
        self.league: LeagueRun | None = None  # the league of the run; None: it has no league
        # These parts reach each other through this object.
        self.commands = CommandSender(self)
        newest = resume.path if resume else None
        self.checkpoints = Checkpoints(self, checkpoints, written, newest)
        # The weights of modules that are not trained, on their way to EnvRunners
        self.frozen_parts = FrozenParts(self)
        self.trained = TrainedModules(self, resume, beginning)
        self.modules = self.trained.modules
        self.leaving_learners = LeavingLearners(self)
        if config.agents.league:
            self.league = LeagueRun(self, resume, beginning)
        self.evaluations = Evaluations(self)
        self.departures = Departures(self)

    def happened(self, event: Event) -> None:
        """Book an event in the core, and send the resulting commands."""
        self.carry_out(self.core.book(event))

    def carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self.commands.carry_out(command)
