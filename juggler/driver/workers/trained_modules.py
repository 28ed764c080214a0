"""The modules that a run trains, which may come and go, and what the driver keeps of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from juggler.driver.checkpoint.beginning import Beginning
from juggler.driver.checkpoint.restoring import connectors_of, is_without, settings_for
from juggler.driver.checkpoint.snapshots import SnapshotWriter
from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import MeetAgain, RunnerPlays, TrainingEnds
from juggler.driver.core.state import ModuleStart
from juggler.driver.record.progress import Progress
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.connector_state import ConnectorState
from juggler.driver.workers.frozen_parts import FrozenParts
from juggler.driver.workers.learners import Learners, ModuleReset
from juggler.driver.workers.registry import WorkerRegistry
from juggler.driver.workers.stale_runners import StaleRunners
from juggler.envrunner.program import ENVRUNNER
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.actors.setups import to_json
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.wire.v1 import training_pb2


class TrainedModules:
    """What there is of each module that is trained, by its id.

    One that is added goes to the learner process with the fewest modules, and to every worker that
    plays. Rounds have it from each EnvRunner that has it. One that is removed is asked for nothing
    more; when nothing of it is under way any more, its books are closed, and all forget it.

    Args:
        config: of the run.
        core: its core, which has the modules to begin with.
        registry: who is here.
        commands: reaches them.
        frozen_parts: sends workers that play what they are told in its order.
        connectors: by module id; filled here.
        snapshots: of the run.
        progress: shows people what happens.
        resume: a state to go on from. Its arrays are let go of once each module has had a learner.
        beginning: what the run began with that another one has learned.

    Attributes:
        connectors: by module id, what its connectors in EnvRunners have learned.
        learners: by module id, the group that trains it.
        stale_runners: by module id, EnvRunners whose steps come too late.
        steps_before: by learner, its own counts of modules that are gone.
    """

    def __init__(
        self,
        config: RunConfig,
        core: DriverCore,
        registry: WorkerRegistry,
        commands: CommandSender,
        frozen_parts: FrozenParts,
        connectors: dict[str, ConnectorState],
        snapshots: SnapshotWriter,
        progress: Progress,
        resume: Checkpoint | None,
        beginning: Beginning | None,
    ) -> None:
        self._config, self._core, self._registry = config, core, registry
        self._commands, self._frozen_parts = commands, frozen_parts
        self._snapshots, self._progress, self._resume = snapshots, progress, resume
        self.connectors = connectors
        self.learners: dict[str, Learners] = {}
        self.stale_runners: dict[str, StaleRunners] = {}
        self.steps_before: dict[str, dict[str, int]] = {}
        self._awaited: dict[str, set[Worker]] = {}  # by module id, those that do not have it yet
        for module_id in core.modules:
            self._keep(module_id, beginning)

    def add(self, module_id: str, settings_of: str, beginning: Beginning | None) -> None:
        """Train another module from now on.

        Args:
            module_id: an id that the run has never had.
            settings_of: the module of the configuration whose settings it has.
            beginning: what it begins with; None: new weights.

        Raises:
            ValueError: nobody knows the spaces of its batches; nothing has changed.
        """
        registry = self._registry
        registry.add(module_id, settings_of)
        # Its first learner begins alone, and others join: nobody is to wait for all of them.
        settings = settings_for(self._config, settings_of, num_learners=1)
        self._core.add(module_id, ModuleStart(settings, late=True))
        self._keep(module_id, beginning)
        for learner in registry.hosts(module_id):
            for command in self.learners[module_id].begin(learner, seed=0):
                self._commands.send(learner, command)
        acting = to_json(registry.acting_setup(module_id))
        self._awaited[module_id] = set(registry.env_runners())
        for worker in registry.players():
            added = training_pb2.AddPlayer(module_id=module_id, config=acting)
            self._frozen_parts.append(worker, [added], self._commands.send)

    def begin_with(self, module_id: str, beginning: Beginning) -> None:
        """Let a module begin with something, before any of its learners is here."""
        self.learners[module_id].beginning = beginning
        self.connectors[module_id] = connectors_of(None, beginning, module_id)

    def learner_ready(self) -> None:
        """A learner has what its module begins with. Once each module has had one, nobody is told
        of the state that the run goes on from any more."""
        if self._resume and all(each.had_learner for each in self.learners.values()):
            self._resume.let_go_of_arrays()
            self._resume = None

    def received(self, worker: Worker, module_id: str) -> None:
        """A worker that plays has a module that was added."""
        if module_id not in self._awaited:
            return
        self._awaited[module_id].discard(worker)
        module = self._core.modules[module_id]
        if worker.role == ENVRUNNER:
            key, steps = (
                (worker.worker_id, worker.incarnation),
                self._registry.begin_playing(module_id),
            )
            self._core.book(RunnerPlays(*key, steps, module_id))
        if module.members:
            self._commands.tell_learners(worker, module_id, module.generation)

    def left(self, worker: Worker) -> None:
        """Nobody waits for it."""
        for workers in self._awaited.values():
            workers.discard(worker)

    def reset(self, module_id: str, seed: int, beginning: Beginning | None) -> None:
        """Give a module other weights and a new optimizer. Its learners carry out commands in their
        order, so no update is half-way. Their group forms anew behind that: EnvRunners get the
        first weights of each generation, and they are to act with these.

        Args:
            module_id: of a module that has learners.
            seed: of what `beginning` leaves out.
            beginning: where the weights are from; None: they are new.
        """
        module = self._core.modules[module_id]
        reset = self.reset_first(module_id, seed, beginning)
        for learner in self._registry.learners_of(module_id):
            for command in reset.commands(module_id):
                self._commands.send(learner, command)
        for formed in self._core.book(MeetAgain(module.generation, module_id)):
            self._commands.carry_out(formed)

    def reset_first(self, module_id: str, seed: int, beginning: Beginning | None) -> ModuleReset:
        """Let the learners of a module that come from now on reset it, if what they are given is of
        this moment or before. The arguments are those of `reset`."""
        reset = ModuleReset(self._core.modules[module_id].generation + 1, seed, beginning)
        self.learners[module_id].last_reset = reset
        return reset

    def can_play(self, module_id: str) -> bool:
        """Whether it has learners, with weights that are not from before its last reset, and every
        EnvRunner has it."""
        module = self._core.modules.get(module_id)
        if module is None or not module.members or self._awaited.get(module_id):
            return False
        return not self.learners[module_id].precede_reset(module.weights_version)

    def remove(self, module_id: str) -> None:
        """Train a module no more. `forget` ends that, when it is settled."""
        for command in self._core.book(TrainingEnds(module_id)):
            self._commands.carry_out(command)

    def settled(self) -> list[str]:
        """Modules that can be forgotten now: nobody has to answer a command about them, and no
        checkpoint is on its way that may have them."""
        settled = [] if self._snapshots.under_way else self._core.settled
        return [each for each in settled if not self._commands.pool.has_one_that(_about(each))]

    def forget(self, module_id: str) -> None:
        """Close the books of a module that is settled, and let everybody forget it."""
        registry = self._registry
        self._core.forget(module_id)
        for worker in registry.players():
            removed = training_pb2.RemovePlayer(module_id=module_id)
            self._frozen_parts.append(worker, [removed], self._commands.send)
        for learner in registry.hosts(module_id):
            self._commands.send(learner, training_pb2.RemoveModule(module_id=module_id))
        registry.remove(module_id)
        for worker_id, counts in self.learners.pop(module_id).steps.items():
            before = self.steps_before.setdefault(worker_id, {})
            for what, steps in counts.items():
                before[what] = before.get(what, 0) + steps
        self._awaited.pop(module_id, None)
        del self.connectors[module_id], self.stale_runners[module_id]

    def _keep(self, module_id: str, beginning: Beginning | None) -> None:
        """Begin the tables of a module."""
        config, module = self._config, self._core.modules[module_id]
        settings = config.of(self._registry.trained[module_id])
        resume = self._resume
        if resume is not None and is_without(resume, module_id):
            resume = None
        self.connectors[module_id] = connectors_of(resume, beginning, module_id)
        several = len(self._core.modules) > 1 or bool(config.agents.league)
        self.stale_runners[module_id] = StaleRunners(
            settings.staleness.drop_after, module_id if several else ""
        )
        self.learners[module_id] = Learners(
            config, module, self._registry, self._snapshots, self._progress, resume, beginning
        )


def _about(module_id: str) -> Callable[[Any], bool]:
    return lambda command: getattr(command, "module_id", "") == module_id
