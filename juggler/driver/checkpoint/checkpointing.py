"""When a run's state is cut for a checkpoint, and what everybody is told of it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from juggler.driver.checkpoint.snapshots import SnapshotWriter
from juggler.driver.config import DriverConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.registry import WorkerRegistry
from juggler.runtime.wire.v1 import training_pb2


class Checkpointing:
    """Asks one learner of each module for its state: when told to, and in synchronous mode by
    itself.

    Asynchronously, the clock says when, and training goes on meanwhile. In synchronous mode it
    happens between two turns, at multiples of `checkpoint_updates`, and the next turn waits until
    the checkpoint is on the disk. Then everybody begins anew, as the workers of a run do that is
    resumed from it: what a checkpoint does not hold, nobody has. Hence both runs give the same
    numbers.

    Args:
        update: that the run begins with; its checkpoint is there.
        needed: tells which modules a checkpoint has although their training has ended.

    Attributes:
        suspended: whether there are no checkpoints, because another run has the directory.
    """

    def __init__(
        self,
        config: DriverConfig,
        core: DriverCore,
        registry: WorkerRegistry,
        commands: CommandSender,
        snapshots: SnapshotWriter,
        update: int,
        needed: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._needed = needed
        self._every = config.checkpoint_updates
        self._core = core
        self._registry = registry
        self._commands = commands
        self._snapshots = snapshots
        self._last = update
        self._asked: dict[str, str] = {}  # by module id, the learner that sends its state
        self.suspended = False

    @property
    def waits_for(self) -> list[str]:
        """The modules that have no learner: without their states there is no checkpoint."""
        return [each.module_id for each in self._core.in_checkpoints() if not each.members]

    def begin(self, aside: str = "") -> bool:
        """Ask for the state of every module as it is. False where a module has nobody to ask,
        another one is on its way, or checkpoints are suspended.

        Args:
            aside: the directory of the run where it is to lie; "": among the checkpoints.
        """
        return not self.suspended and self._ask(None, aside)

    def holds_up(self, update: int) -> bool:
        """Between two turns of a synchronous run: whether the next one has to wait. Begins the
        checkpoint that is due.

        Args:
            update: of the run: those of all modules together.
        """
        modules = self._core.modules.values()
        if self._snapshots.under_way or not all(module.members for module in modules):
            return True
        # Each round makes one update of every module.
        rounds = max(module.weights_version.update for module in modules)
        if self.suspended or rounds % self._every or update == self._last:
            return False
        self._last = update
        self._commands.begin_anew(update)
        for module in modules:
            for member in module.members[1:]:
                learner = self._registry.ready[member]
                seed = self._registry.seed(learner, update=update)
                anew = training_pb2.BeginAnew(module_id=module.module_id, seed=seed)
                self._commands.send(learner, anew)
        return self._ask(update)

    def left(self, worker_id: str) -> None:
        """A learner is gone, and with it the states that it may have been sending."""
        for module_id in [each for each, asked in self._asked.items() if asked == worker_id]:
            del self._asked[module_id]
            self._snapshots.abandon(module_id)

    def _ask(self, begins_anew: int | None, aside: str = "") -> bool:
        """Ask the first learner of each module, which begins anew at an update if one is given.
        Modules that were just added are left out, and those that are let go unless they are needed.
        """
        modules = self._core.in_checkpoints(self._needed())
        if not modules or self._snapshots.under_way:
            return False
        if not all(module.members for module in modules):
            return False
        trained = {each.module_id: self._registry.trained[each.module_id] for each in modules}
        self._snapshots.begin(trained, aside)
        self._asked = {module.module_id: module.members[0] for module in modules}
        for module_id, worker_id in self._asked.items():
            command = training_pb2.Snapshot(module_id=module_id)
            if begins_anew is not None:
                learner = self._registry.ready[worker_id]
                command.seed = self._registry.seed(learner, update=begins_anew)
            self._commands.tell(worker_id, command)
        return True
