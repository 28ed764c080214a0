"""When a run's state is cut for a checkpoint, and what everybody is told of it."""

from __future__ import annotations

from juggler.driver.checkpoint.snapshots import SnapshotWriter
from juggler.driver.config import DriverConfig
from juggler.driver.core.module_core import ModuleCore
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.registry import WorkerRegistry
from juggler.runtime.wire.v1 import training_pb2


class Checkpointing:
    """Asks the learner for its state: whenever it is told to, and in synchronous mode by itself.

    Asynchronously, the clock says when, and training goes on meanwhile. In synchronous mode it
    happens between two rounds, at multiples of `checkpoint_updates`, and the next round waits until
    the checkpoint is on the disk. Then everybody begins anew, as the workers of a run do that is
    resumed from it: what a checkpoint does not hold, nobody has. Hence both runs give the same
    numbers.

    Args:
        update: that the run begins with; its checkpoint is there.
    """

    def __init__(
        self,
        config: DriverConfig,
        core: ModuleCore,
        registry: WorkerRegistry,
        commands: CommandSender,
        snapshots: SnapshotWriter,
        update: int,
    ) -> None:
        self._every = config.checkpoint_updates
        self._core = core
        self._registry = registry
        self._commands = commands
        self._snapshots = snapshots
        self._last = update
        self._asked: str | None = None  # the learner that sends its state

    def begin(self, candidate: bool = False) -> bool:
        """Ask for a state as it is. False where nobody is there to ask.

        Args:
            candidate: it is to lie aside.
        """
        return self._ask(training_pb2.Snapshot(module_id=self._core.module_id), candidate)

    def holds_up(self, update: int) -> bool:
        """Between two rounds of a synchronous run: whether the next one has to wait. Begins the
        checkpoint that is due."""
        members = self._core.members
        if self._snapshots.under_way or not members:
            return True
        if update % self._every or update == self._last:
            return False
        self._last = update
        self._commands.begin_anew(update)
        module_id = self._core.module_id
        first, *others = (self._registry.ready[member] for member in members)
        for learner in others:
            seed = self._registry.seed(learner, update=update)
            self._commands.send(learner, training_pb2.BeginAnew(module_id=module_id, seed=seed))
        seed = self._registry.seed(first, update=update)
        return self._ask(training_pb2.Snapshot(module_id=module_id, seed=seed))

    def left(self, worker_id: str) -> None:
        """A learner is gone, and with it the state that it may have been sending."""
        if worker_id == self._asked:
            self._asked = None
            self._snapshots.abandon()

    def _ask(self, command: training_pb2.Snapshot, candidate: bool = False) -> bool:
        members = self._core.members
        if not members or self._snapshots.under_way:
            return False
        self._snapshots.begin(candidate)
        self._asked = members[0]
        self._commands.tell(members[0], command)
        return True
