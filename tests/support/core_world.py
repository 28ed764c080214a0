"""A driver core among fake processes, and what must hold whatever they do.

A test delivers the messages of the processes in any order, twice, or after their sender's death.
The world keeps books of its own, from messages alone.
"""

from __future__ import annotations

from dataclasses import replace

from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    Arrived,
    Command,
    Discard,
    Event,
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    LearnerLeft,
    PeersMet,
    Proceed,
    Request,
    RunnerJoined,
    RunnerLeft,
    SampleFailed,
    SampleReceived,
    UpdateFailed,
    UpdateFinished,
    UpdateKept,
    WorkerKey,
)
from juggler.driver.core.group import worker_order
from juggler.driver.core.state import CoreSettings
from juggler.runtime.episodes.version import Version
from support.core_fakes import FakeLearner, FakeRunner, Processes


class World(Processes):
    def __init__(self, settings: CoreSettings) -> None:
        super().__init__(settings.weights_interval)
        self.settings = settings
        self.core = DriverCore(settings)
        self.delivered: list[Event] = []
        self.group: tuple[str, ...] = ()
        self.generation = 0
        self.known: dict[str, str] = {}  # worker id -> incarnation, as the core must see it
        self.requests: dict[int, Request] = {}
        self.unreported: dict[WorkerKey, set[int]] = {}  # by runner: requests under way
        self.sampled: dict[int, int] = {}  # batch id -> live steps of the first report
        self.trained = 0
        self.waiting: dict[int, set[str]] = {}  # by update: members that have yet to answer
        self.shares: dict[int, dict[str, tuple[int, ...]]] = {}  # the same, all of them
        self.unheard: set[int] = set()  # batches in updates of learners that left
        self.used: set[int] = set()
        self.open: set[int] = set()
        self.closed: set[int] = set()
        self._incarnations = 0

    # What happens in the world.

    def start_runner(self, index: int, steps: int) -> None:
        worker = self._new_worker(f"envrunner-{index}")
        self.runners[worker.worker_id] = FakeRunner(worker, steps)
        self.deliver(RunnerJoined(worker.worker_id, worker.incarnation, steps))

    def start_learner(self, index: int) -> None:
        worker = self._new_worker(f"learner-{index}")
        self.learners[worker.worker_id] = FakeLearner(worker, Version(0, 0))
        self.deliver(LearnerJoined(worker.worker_id, worker.incarnation))

    def _new_worker(self, worker_id: str) -> WorkerKey:
        self._incarnations += 1
        return WorkerKey(worker_id, f"process-{self._incarnations}")

    # What the core is told, and what it answers.

    def deliver(self, event: Event) -> list[Command]:
        self._expect(event)
        version, before = self.core.weights_version, set(self.core.ledger.unreported)
        commands = self.core.handle(event)
        self.delivered.append(event)
        assert self.core.weights_version >= version
        self._check_reopened(before)
        for command in commands:
            self._obey(command)
        self._check_admission(commands)
        if self.core.between_rounds and not any(isinstance(each, Proceed) for each in self.pending):
            self.pending.append(Proceed())
        return commands

    def deliver_next(self, index: int = 0) -> None:
        self.deliver(self.pending.pop(index))

    def _expect(self, event: Event) -> None:
        """Book the event here, as the rules have it."""
        match event:
            case PeersMet(generation, update):
                self.unheard.clear()
                self.publish(Version(generation, update))
            case RunnerJoined(worker_id, incarnation) | LearnerJoined(worker_id, incarnation):
                fresh = not any(
                    isinstance(past, RunnerJoined | LearnerJoined)
                    and past.incarnation == incarnation
                    for past in self.delivered
                )
                if fresh:
                    self._gone(worker_id)
                    self.known[worker_id] = incarnation
            case RunnerLeft(worker_id, incarnation) | LearnerLeft(worker_id, incarnation):
                if self.known.get(worker_id) == incarnation:
                    self._gone(worker_id)
            case SampleReceived() | SampleFailed():
                if self.known.get(event.runner) == event.incarnation:
                    self._reported(event.batch_id, getattr(event, "live_steps", None))
            case Arrived():
                if self.known.get(event.learner) == event.incarnation:
                    self._reported(event.batch_id, event.live_steps)
            case UpdateFinished() | UpdateFailed():
                waiting = self.waiting.get(event.update_id, set())
                if self.known.get(event.learner) == event.incarnation and event.learner in waiting:
                    waiting.remove(event.learner)
                    if isinstance(event, UpdateFinished):
                        self.trained += sum(b.live_steps for b in event.used if not b.dropped)

            case UpdateKept():
                told = [each for each in event.used if each.batch_id in self.unheard]
                self.unheard -= {each.batch_id for each in told}
                self.trained += sum(each.live_steps for each in told if not each.dropped)

    def _gone(self, worker_id: str) -> None:
        incarnation = self.known.pop(worker_id, "")
        self.unreported.pop(WorkerKey(worker_id, incarnation), None)
        self.group = tuple(name for name in self.group if name != worker_id)
        for update_id, waiting in self.waiting.items():
            if worker_id in waiting:
                self.unheard.update(self.shares[update_id][worker_id])
                waiting.discard(worker_id)

    def _updates_in_flight(self) -> int:
        return sum(map(bool, self.waiting.values()))

    def _updates_closed(self) -> int:
        return len(self.waiting) - self._updates_in_flight()

    def _reported(self, batch_id: int, live_steps: int | None) -> None:
        request = self.requests[batch_id]
        runner = WorkerKey(request.runner, request.incarnation)
        self.unreported.get(runner, set()).discard(batch_id)
        if live_steps is not None:
            self.sampled.setdefault(batch_id, live_steps)

    def _obey(self, command: Command) -> None:
        match command:
            case Request():
                self._check_request(command)
                runner = self.runners.get(command.runner)
                if runner is not None and runner.worker.incarnation == command.incarnation:
                    runner.requests.append(command)
            case FormGroup():
                assert command.generation > self.generation
                assert set(command.members) >= set(self.group), "a survivor was left out"
                assert set(command.members) <= set(self.known)
                grown = set(command.members) > set(self.group)
                assert not grown or not self._updates_in_flight(), "joined during an update"
                self.group, self.generation = command.members, command.generation
                self._send(command.members, command)
            case IssueUpdate():
                self._check_update(command)
                self._send([share.learner for share in command.shares], command)
            case Discard():
                self._send([command.learner], command)

    def _send(self, worker_ids: list[str] | tuple[str, ...], command: Command) -> None:
        for worker_id in worker_ids:
            if worker_id in self.learners:
                self.learners[worker_id].commands.append(command)

    # What must hold.

    def _check_request(self, request: Request) -> None:
        assert request.batch_id not in self.requests
        self.requests[request.batch_id] = request
        assert self.known[request.runner] == request.incarnation
        under_way = self.unreported.setdefault(
            WorkerKey(request.runner, request.incarnation), set()
        )
        under_way.add(request.batch_id)
        assert len(under_way) <= self.settings.requests_per_runner
        assert request.learner in self.group
        assert request.generation == self.generation
        newest, at_least = self.core.weights_version, request.at_least
        if self.settings.synchronous:
            assert at_least == newest
        else:
            assert at_least <= self.published, "the runner would wait for ever"
            behind = max(0, newest.update - 1) - at_least.update
            assert 0 <= behind < self.settings.weights_interval
            assert at_least.generation == newest.generation

    def _check_update(self, update: IssueUpdate) -> None:
        assert update.update_id not in self.waiting
        self.waiting[update.update_id] = set(self.group)
        self.shares[update.update_id] = dict(update.shares)
        assert tuple(share.learner for share in update.shares) == self.group
        assert update.generation == self.generation
        ids = [batch_id for share in update.shares for batch_id in share.batch_ids]
        assert len(set(ids)) == len(ids)
        assert not self.used.intersection(ids), "a batch is in two updates"
        self.used.update(ids)
        for share in update.shares:
            held = sum(self.sampled[batch_id] for batch_id in share.batch_ids)
            if self.settings.synchronous:
                assert held > 0
            else:
                assert held * len(update.shares) >= self.settings.batch_size
            if share.learner in self.learners:
                assert self.learners[share.learner].batches.keys() >= set(share.batch_ids)
        if self.settings.synchronous:
            assert self._updates_in_flight() == 1
            assert not any(self.unreported.values()), "not every request has ended"
            for share in update.shares:
                order = [(worker_order(self.requests[i].runner), i) for i in share.batch_ids]
                assert order == sorted(order)
        else:
            assert self._updates_in_flight() <= self.settings.max_updates_in_flight

    def _check_admission(self, commands: list[Command]) -> None:
        """The last request for a learner found less than its part of the bound open."""
        if self.settings.synchronous:
            return
        bound = self.settings.max_open_updates * self.settings.batch_size / max(1, len(self.group))
        last = {command.learner: command for command in commands if isinstance(command, Request)}
        for learner, request in last.items():
            batch = self.core.ledger.requested[request.batch_id]
            assert self._open_steps(learner) - batch.steps < bound

    def _open_steps(self, learner: str) -> int:
        """Steps requested for this very process, held by it, or in its shares."""
        worker = WorkerKey(learner, self.known[learner])
        ledger = self.core.ledger
        return sum(
            batch.steps
            for state in (ledger.requested, ledger.held, ledger.updating)
            for batch in state.values()
            if batch.learner == worker
        )

    def _check_reopened(self, unreported: set[int]) -> None:
        ledger = self.core.ledger
        now = {*ledger.requested, *ledger.held, *ledger.updating}
        assert now.isdisjoint(self.closed - unreported), "a closed batch was opened again"
        self.closed |= self.open - now
        self.closed -= now
        self.open = now

    def check(self) -> None:
        """Whenever nothing is being handled."""
        core, ledger = self.core, self.core.ledger
        ledger.check()
        states = [ledger.requested, ledger.held, ledger.updating, ledger.unreported]
        assert sum(map(len, states)) == len(set().union(*states)), "a batch is in two states"
        assert ledger.sampled == sum(self.sampled.values())
        assert ledger.trained == self.trained
        assert ledger.lost_unreported == sum(b.steps for b in ledger.unreported.values())
        assert core.idle == (not self._updates_in_flight())
        assert len(ledger.requested) == sum(map(len, self.unreported.values()))
        assert core.members == self.group
        members = core._group.members
        for worker_id, learner in members.items():
            assert learner.open_steps == self._open_steps(worker_id)
            assert learner.held_steps == sum(batch.steps for batch in learner.held)
        held = [batch.batch_id for learner in members.values() for batch in learner.held]
        assert sorted(held) == sorted(ledger.held)

    # A world without faults.

    def run(self, until_updates: int, max_rounds: int = 200) -> None:
        """Everybody does what it is told to, until so many more updates were made."""
        goal = self._updates_closed() + until_updates
        for _ in range(max_rounds):
            while self.pending:
                self.deliver_next()
            self.check()
            if self._updates_closed() >= goal:
                return
            for runner in self.runners.values():
                while runner.requests:
                    self.sample(runner.worker.worker_id, runner.steps, "sent")
            for learner in self.learners.values():
                while learner.commands:
                    self.work(learner.worker.worker_id, "trained")
        raise AssertionError(f"the run stands still: {vars(self.core.ledger)}")

    def duplicate(self, index: int) -> None:
        """A message comes that came before."""
        self.deliver(replace(self.delivered[index % len(self.delivered)]))
