"""A run whose workers are started and let go while it trains, without processes."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from juggler.driver.config import DriverConfig
from juggler.driver.monitoring import ScaleAsked
from juggler.driver.scaling import scale
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.learner.process.program import LearnerSetup
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.setups import from_json
from juggler.runtime.wire.v1 import attach_pb2, training_pb2
from support.worker_events_world import ROWS, STEPS, WorkersWorld


class Supervisor:
    """Starts nothing, and keeps whom it should have started, and when it should kill whom."""

    restarts = 0

    def __init__(self, _: Mailbox[Any]) -> None:
        self.started: list[str] = []
        self.let_go_within: dict[str, float] = {}

    def add(self, worker_id: str, *_: Any) -> None:
        self.started.append(worker_id)

    def let_go(self, worker_id: str, seconds: float) -> None:
        self.let_go_within[worker_id] = seconds

    def of_use(self, worker_id: str) -> None:
        pass

    def kill(self, *_: Any, **__: Any) -> None:
        pass


class World(WorkersWorld):
    """A run of one host. All of its workers are ready, and its learners have met."""

    def __init__(self, directory: Path, **keys: Any) -> None:
        local = LocalWorkers(Mailbox(), "run", "token", b"")
        self.supervisor: Any = local._supervisor
        learners: dict[str, Any] = {"num_learners": keys.get("num_learners", 1), "devices": "cpu"}
        local.start(DriverConfig(num_env_runners=1, **learners))
        super().__init__(directory, only_local=True, local=local, **{**learners, **keys})
        local._directory.remove()
        self.supervisor.started.clear()
        if len(self.parts.core.modules) == 1 and self.core.members:
            self.meet(*self.learners)

    def scale(self, learners: int = 0, env_runners: int = 0) -> Future[tuple[int, int]]:
        asked = ScaleAsked(env_runners, learners, Future())
        scale(self.parts, asked)
        self.turn()
        return asked.answer

    def refusal(self, learners: int, env_runners: int = 0) -> str:
        error = self.scale(learners, env_runners).exception()
        assert isinstance(error, ValueError)
        assert self.supervisor.started == []
        assert self.supervisor.let_go_within == {}
        return str(error)

    def get_ready(self, worker: Worker, *module_ids: str) -> None:
        super().get_ready(worker, *module_ids)
        if worker.role == "learner":
            ((command_id, _),) = self.asked(worker, training_pb2.Setup)
            self.reply(worker, command_id, attach_pb2.Done())

    def come(self, index: int) -> Worker:
        """A learner that was started is ready."""
        learner = self.join("learner", index)
        self.get_ready(learner)
        return learner

    def meet(self, *learners: Worker) -> None:
        """These learners can update together, in each group that they were told of."""
        for learner in learners:
            for command_id, group in self.asked(learner, training_pb2.Group):
                formed = training_pb2.GroupFormed(
                    module_id=group.module_id,
                    generation=group.generation,
                    update=self.core.weights_version.update,
                    state_hash=1,
                )
                self.reply(learner, command_id, formed)

    def may_meet(self, learner: Worker) -> bool:
        ((_, setup),) = self.asked(learner, training_pb2.Setup)
        return from_json(setup.config, LearnerSetup).may_meet

    def was_stopped(self, learner: Worker) -> bool:
        return bool(self.asked(learner, attach_pb2.Stop))

    def told_of(self) -> list[str]:
        """The learners that the EnvRunner was told of last."""
        _, told = self.asked(self.runner, training_pb2.Learners)[-1]
        return [each.worker_id for each in told.learners]

    def answer_requests(self, already: set[int]) -> None:
        """The EnvRunner brings what it was asked for, and has not brought already."""
        for command_id, request in self.asked(self.runner, training_pb2.SampleRequest):
            if request.batch_id not in already:
                already.add(request.batch_id)
                receipt = training_pb2.Receipt(
                    batch_id=request.batch_id, learner=request.learner, live_steps=ROWS * STEPS
                )
                self.reply(self.runner, command_id, receipt)

    def make_updates(self, already: set[int]) -> None:
        """Each learner makes those that it was asked for, and has not made already."""
        for learner in self.learners:
            for command_id, update in self.asked(learner, training_pb2.Update):
                if command_id not in already:
                    already.add(command_id)
                    version = self.core.weights_version.update + (learner is self.learners[0])
                    done = training_pb2.UpdateDone(
                        update_id=update.update_id,
                        version={"generation": update.generation, "update": max(1, version)},
                    )
                    for batch_id in update.batch_ids:
                        done.batches.add(batch_id=batch_id, live_steps=ROWS * STEPS)
                    self.reply(learner, command_id, done)
