"""Learners of this host that leave because fewer are wanted."""

from __future__ import annotations

import time

from juggler.driver.core.driver_core import DriverCore
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.registry import WorkerRegistry
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.wire.v1 import attach_pb2


class LeavingLearners:
    """Tells learners to stop once no module needs them any more, as `LeftGroup` says.

    What was asked for them has been trained on by then, and others have their weights. One that
    takes too long for the first, as where an EnvRunner hangs, is told so all the same: what it
    holds is dropped then, as with one that gets SIGTERM.

    Args:
        core: knows which modules need a learner.
        registry: who is here.
        commands: reaches them.
        local: their processes.
        patience: seconds until a learner takes too long.
    """

    def __init__(
        self,
        core: DriverCore,
        registry: WorkerRegistry,
        commands: CommandSender,
        local: LocalWorkers,
        patience: float,
    ) -> None:
        self._core, self._registry = core, registry
        self._commands, self._local = commands, local
        self._patience = patience
        self._deadlines: dict[Worker, float] = {}

    def add(self, learner: Worker) -> None:
        """This learner leaves. The core has been told."""
        self._deadlines[learner] = time.monotonic() + self._patience

    def look(self) -> None:
        """Tell those to stop that may."""
        for learner, deadline in list(self._deadlines.items()):
            if self._registry.attached.get(learner.worker_id) is not learner:
                del self._deadlines[learner]  # it has ended by itself
            elif self._may_stop(learner, time.monotonic() > deadline):
                del self._deadlines[learner]
                self._commands.send(learner, attach_pb2.Stop())
                self._local.end(learner.worker_id, was_told=True)

    def _may_stop(self, learner: Worker, is_late: bool) -> bool:
        if is_late:
            modules = self._core.modules.values()
            return all(module.can_spare(learner.worker_id) for module in modules)
        owes_answers = self._commands.pool.in_flight(learner) > 0  # such as a checkpoint
        return learner.worker_id not in self._core.members and not owes_answers
