"""Envrunner and learner processes as fakes: what they do with commands, and what they send."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from juggler.driver.core.events import (
    Arrived,
    Command,
    Discard,
    Event,
    FormGroup,
    IssueUpdate,
    LearnerLeft,
    PeersMet,
    Request,
    RunnerLeft,
    SampleFailed,
    SampleReceived,
    UnheardUpdate,
    UpdateFailed,
    UpdateFinished,
    UsedBatch,
    WorkerKey,
)
from juggler.driver.core.state import ModuleSettings
from juggler.runtime.episodes.version import Version


@dataclass
class FakeRunner:
    worker: WorkerKey
    steps: dict[str, int]  # by module: of each request, where all of them are live
    requests: deque[Request] = field(default_factory=deque)


@dataclass
class FakeLearner:
    worker: WorkerKey
    versions: dict[str, Version]  # of the modules that it trains
    batches: dict[int, int] = field(default_factory=dict)  # batch id -> live steps
    commands: deque[Command] = field(default_factory=deque)
    answers: list[UpdateFinished] = field(default_factory=list)


class Processes:
    """The processes that are alive, and their messages on the way to the core."""

    def __init__(self, settings: dict[str, ModuleSettings]) -> None:
        # By module: the newest weights that runners can have.
        self.published = dict.fromkeys(settings, Version(0, 0))
        self.settings = settings
        self.runners: dict[str, FakeRunner] = {}
        self.learners: dict[str, FakeLearner] = {}
        self.pending: list[Event] = []

    def kill(self, worker_id: str, survivors: int) -> None:
        """The process is gone; `survivors` of its last messages are still on their way."""
        if (runner := self.runners.pop(worker_id, None)) is not None:
            left: Event = RunnerLeft(*runner.worker, "killed")
            incarnation = runner.worker.incarnation
        else:
            learner = self.learners.pop(worker_id)
            left = LearnerLeft(*learner.worker, "killed")
            incarnation = learner.worker.incarnation
        sent = [event for event in self.pending if getattr(event, "incarnation", "") == incarnation]
        lost = {id(event) for event in sent[survivors:]}
        self.pending = [event for event in self.pending if id(event) not in lost]
        self.pending.append(left)

    def lose(self, worker_id: str, survivors: int) -> None:
        """The same of a learner whose connection broke; it will tell what it had done last."""
        learner = self.learners[worker_id]
        self.kill(worker_id, survivors)
        self.pending += [
            UnheardUpdate(worker_id, each.version, each.used, each.module_id)
            for each in learner.answers[-3:]
        ]

    def sample(self, worker_id: str, share: float, outcome: str) -> None:
        """A runner answers its next request.

        Args:
            share: of the request's steps that turn out to be live.
            outcome: failed, sent, or a reason to drop the batch.
        """
        runner = self.runners[worker_id]
        request = runner.requests.popleft()
        live_steps = round(share * runner.steps[request.module_id])
        if outcome == "failed":
            failed = SampleFailed(request.batch_id, *runner.worker, request.module_id)
            self.pending.append(failed)
            return
        learner = self.learners.get(request.learner)
        if outcome == "sent" and learner is None:
            outcome = "learner_lost"
        if outcome == "sent":
            learner.batches[request.batch_id] = live_steps
            arrived = Arrived(*learner.worker, request.batch_id, live_steps, request.module_id)
            self.pending.append(arrived)
        self.pending.append(
            SampleReceived(
                batch_id=request.batch_id,
                runner=runner.worker.worker_id,
                incarnation=runner.worker.incarnation,
                learner=request.learner,
                live_steps=live_steps,
                version=request.at_least,
                dropped="" if outcome == "sent" else outcome,
                module_id=request.module_id,
            )
        )

    def work(self, worker_id: str, outcome: str) -> None:
        """A learner does its next command.

        Outcome of an update: trained, failed, forgotten (the first batch of the share is not in the
        answer), or the reason why that batch is dropped.
        """
        learner = self.learners[worker_id]
        command = learner.commands.popleft()
        module_id = command.module_id
        if isinstance(command, Discard):
            for batch_id in command.batch_ids:
                learner.batches.pop(batch_id, None)
        elif isinstance(command, FormGroup):
            newest = max(
                other.versions[module_id].update
                for other in self.learners.values()
                if module_id in other.versions
            )
            learner.versions[module_id] = Version(command.generation, newest)
            self.publish(module_id, learner.versions[module_id])
            if worker_id == command.members[0]:
                self.pending.append(PeersMet(command.generation, newest, module_id))
        elif isinstance(command, IssueUpdate):
            if outcome == "failed":
                event: Event = UpdateFailed(
                    command.update_id, *learner.worker, "a peer is gone", module_id
                )
            else:
                event = self._update(learner, command, outcome)
                learner.answers.append(event)
            self.pending.append(event)

    def _update(self, learner: FakeLearner, command: IssueUpdate, outcome: str) -> UpdateFinished:
        ids = dict(command.shares)[learner.worker.worker_id]
        used = [UsedBatch(batch_id, learner.batches.pop(batch_id), 0) for batch_id in ids]
        if outcome == "forgotten":
            del used[0]
        elif outcome != "trained":
            used[0] = used[0]._replace(dropped=outcome)
        module_id = command.module_id
        before = learner.versions[module_id]
        version = learner.versions[module_id] = before._replace(update=before.update + 1)
        if version.update % self.settings[module_id].weights_interval == 0:
            self.publish(module_id, version)
        return UpdateFinished(command.update_id, *learner.worker, version, tuple(used), module_id)

    def publish(self, module_id: str, version: Version) -> None:
        self.published[module_id] = max(self.published[module_id], version)
