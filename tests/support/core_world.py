"""A driver core among fake processes, and what must hold whatever they do.

A test delivers the messages of the processes in any order, twice, or after their sender's death.
The world keeps books of its own, from messages alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    Command,
    Discard,
    Event,
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    LearnerLeaves,
    LearnerLeft,
    LeftGroup,
    PeersMet,
    Proceed,
    Request,
    RunnerJoined,
    RunnerLeft,
    RunnerPlays,
    TrainingEnds,
    WorkerKey,
)
from juggler.driver.core.group import worker_order
from juggler.driver.core.state import ModuleSettings, ModuleStart
from juggler.runtime.episodes.version import Version
from support.core_books import ModuleBooks, RoundBooks
from support.core_fakes import FakeLearner, FakeRunner, Processes

#: Learners 0 to 3 train the first module, 4 to 7 the second, and those above all modules. A module
#: that is added is trained by those of one of them, too.
LEARNERS_OF_A_MODULE = 4


class World(Processes):
    """
    Args:
        settings: of each module.
        events_a_turn: how many events the core is told before it is asked for updates and requests,
            as the driver's loop asks it behind all that came at once.
    """

    def __init__(self, settings: Mapping[str, ModuleSettings], events_a_turn: int = 1) -> None:
        super().__init__(dict(settings))
        self.first = tuple(settings)
        self.added: dict[str, int] = {}  # whose learners train it: the number of one of the first
        self.gone: list[ModuleBooks] = []  # of modules that were let go
        self.plays: dict[WorkerKey, set[str]] = {}  # the modules that a runner has
        self.core = DriverCore({key: ModuleStart(each) for key, each in settings.items()})
        self.known: dict[str, str] = {}
        self.books = {
            key: ModuleBooks(module, self.known) for key, module in self.core.modules.items()
        }
        self.rounds = RoundBooks(self.books, self.plays)
        self.newest = Version(0, 0)
        self.delivered: list[Event] = []
        self.leavers: set[WorkerKey] = set()  # learners that are to leave
        self._events_a_turn = events_a_turn
        self._events = 0  # since the last turn
        self._incarnations = 0

    # What happens in the world.

    def start_runner(self, index: int, steps: int) -> None:
        worker = self._new_worker(f"envrunner-{index}")
        # Fewer agents are played by the second module.
        of_module = {key: max(1, steps // (1 + n)) for n, key in enumerate(self.settings)}
        self.runners[worker.worker_id] = FakeRunner(worker, of_module)
        self.deliver(RunnerJoined(worker.worker_id, worker.incarnation, of_module))

    def start_learner(self, index: int) -> None:
        """Of the modules that learners of this index train."""
        modules = [each for each in self.settings if self._trains(index, each)]
        worker = self._new_worker(f"learner-{index}")
        versions = dict.fromkeys(modules, Version(0, 0))
        self.learners[worker.worker_id] = FakeLearner(worker, versions)
        for module_id in modules:
            self.deliver(LearnerJoined(worker.worker_id, worker.incarnation, module_id))

    def let_go(self, worker_id: str) -> None:
        """This learner is to leave. Its process ends once no group needs it."""
        worker = self.learners[worker_id].worker
        self.leavers.add(worker)
        for books in self.books.values():
            books.let_go(worker)
        self.pending = [  # the driver hears of no further module of it
            each
            for each in self.pending
            if not isinstance(each, LearnerJoined)
            or WorkerKey(each.learner, each.incarnation) != worker
        ]
        self.deliver(LearnerLeaves(*worker))

    def stays(self, worker_id: str) -> bool:
        """Whether there is such a learner, which is not to leave."""
        learner = self.learners.get(worker_id)
        return learner is not None and learner.worker not in self.leavers

    def _end_those_that_left(self) -> None:
        for worker in [learner.worker for learner in self.learners.values()]:
            if worker in self.leavers and worker.worker_id not in self.core.members:
                self.kill(worker.worker_id, survivors=len(self.pending))

    def _trains(self, index: int, module_id: str) -> bool:
        number = index // LEARNERS_OF_A_MODULE
        own = self.added[module_id] if module_id in self.added else self.first.index(module_id)
        return number in (own, *range(len(self.first), number + 1))

    def add_module(self, number: int) -> None:
        """The learners of a module of the beginning are to train another one, too."""
        module_id = f"new-{len(self.added) + len(self.gone)}-{self.core.next_id}"
        self.added[module_id] = number
        settings = replace(self.settings[self.first[number]], num_learners=1)
        self.settings[module_id], self.published[module_id] = settings, Version(0, 0)
        self.core.add(module_id, ModuleStart(settings, late=True))
        self.books[module_id] = ModuleBooks(self.core.modules[module_id], self.known)
        for worker_id, learner in self.learners.items():
            if self._trains(worker_order(worker_id)[1], module_id):
                learner.versions[module_id] = Version(0, 0)
                self.pending.append(LearnerJoined(*learner.worker, module_id))
        for runner in self.runners.values():
            runner.steps[module_id] = next(iter(runner.steps.values()))
            self.pending.append(RunnerPlays(*runner.worker, runner.steps[module_id], module_id))

    def remove_module(self, module_id: str) -> None:
        """One that was added is trained no more."""
        self.deliver(TrainingEnds(module_id))

    def _forget_settled(self) -> None:
        for module_id in self.core.settled:
            trained = self.core.trained
            self.core.forget(module_id)
            assert self.core.trained == trained
            books = self.books.pop(module_id)
            assert books.leaves
            self.gone.append(books)
            del self.settings[module_id], self.added[module_id]
            for learner in self.learners.values():
                learner.versions.pop(module_id, None)
                learner.commands = deque(
                    each for each in learner.commands if each.module_id != module_id
                )
                for batch_id in books.requests:
                    learner.batches.pop(batch_id, None)

    def _new_worker(self, worker_id: str) -> WorkerKey:
        self._incarnations += 1
        return WorkerKey(worker_id, f"process-{self._incarnations}")

    # What the core is told, and what it answers.

    def deliver(self, event: Event) -> list[Command]:
        self._expect(event)
        commands = self._obey_all(self.core.book, event)
        self.delivered.append(event)
        self._events += 1
        return [*commands, *self.turn()] if self._events >= self._events_a_turn else commands

    def turn(self) -> list[Command]:
        """What the driver's loop does behind the events that came at once."""
        self._events = 0
        self._forget_settled()
        self._end_those_that_left()
        return [*self._obey_all(self.core.issue_updates), *self._obey_all(self.core.top_up)]

    def _obey_all(self, asked: Any, *about: Event) -> list[Command]:
        versions = {key: module.weights_version for key, module in self.core.modules.items()}
        before = {key: set(each.core.ledger.unreported) for key, each in self.books.items()}
        commands: list[Command] = list(asked(*about))
        for key, books in self.books.items():
            assert books.core.weights_version >= versions[key]
            books.check_reopened(before[key])
        self.rounds.check([each for each in commands if isinstance(each, Request)])
        for command in commands:
            self._obey(command)
        most = next(iter(self.settings.values())).requests_per_runner
        self.rounds.check_open(most)
        for key, books in self.books.items():
            books.check_admission(commands)
            coming = Proceed(key) in self.pending
            if books.core.between_turns and not coming:
                self.pending.append(Proceed(key))
        return commands

    def deliver_next(self, index: int = 0) -> None:
        self.deliver(self.pending.pop(index))

    def _expect(self, event: Event) -> None:
        match event:
            case RunnerJoined(worker_id, incarnation) | LearnerJoined(worker_id, incarnation):
                fresh = not any(
                    isinstance(past, RunnerJoined | LearnerJoined)
                    and past.incarnation == incarnation
                    for past in self.delivered
                )
                if fresh:
                    self._gone(worker_id)
                    self.known[worker_id] = incarnation
                    if isinstance(event, RunnerJoined):
                        key = WorkerKey(worker_id, incarnation)
                        self.plays[key] = set(event.steps_per_request)
            case RunnerPlays(worker_id, incarnation, _, module_id):
                if self.known.get(worker_id) == incarnation:
                    self.plays[WorkerKey(worker_id, incarnation)].add(module_id)
            case RunnerLeft(worker_id, incarnation) | LearnerLeft(worker_id, incarnation):
                if self.known.get(worker_id) == incarnation:
                    self._gone(worker_id)
            case _ if getattr(event, "module_id", "") in self.books:
                self.books[event.module_id].expect(event)
                if isinstance(event, PeersMet):
                    self.publish(event.module_id, Version(event.generation, event.update))

    def _gone(self, worker_id: str) -> None:
        incarnation = self.known.pop(worker_id, "")
        for books in self.books.values():
            books.gone(worker_id, incarnation)

    def _obey(self, command: Command) -> None:
        books = self.books[command.module_id]
        match command:
            case Request():
                books.check_request(command, self.published[command.module_id])
                runner = self.runners.get(command.runner)
                if runner is not None and runner.worker.incarnation == command.incarnation:
                    runner.requests.append(command)
            case FormGroup():
                books.check_group(command)
                self._send(command.members, command)
            case LeftGroup():
                books.check_left(command)
            case IssueUpdate():
                books.check_update(command, self.learners)
                if books.settings.synchronous:
                    assert not self._asked_for(), "not every request has ended"
                self._send([share.learner for share in command.shares], command)
            case Discard():
                self._send([command.learner], command)

    def _asked_for(self) -> int:
        """Requests that are under way, of any module."""
        return sum(len(each) for books in self.books.values() for each in books.unreported.values())

    def _send(self, worker_ids: list[str] | tuple[str, ...], command: Command) -> None:
        for worker_id in worker_ids:
            if worker_id in self.learners:
                assert command.module_id in self.learners[worker_id].versions
                self.learners[worker_id].commands.append(command)

    def check(self) -> None:
        """Whenever nothing is being handled."""
        for books in self.books.values():
            books.check()
        whole = self.core.counters()
        whole.check()
        every = [*self.books.values(), *self.gone]
        assert whole.sampled == sum(sum(each.sampled.values()) for each in every)
        assert whole.trained == sum(each.trained for each in every)
        assert self.core.weights_version >= self.newest
        self.newest = self.core.weights_version

    # A world without faults.

    def run(self, until_updates: int, modules: Iterable[str] = (), max_rounds: int = 400) -> None:
        """Everybody does what it is told to, until each of these modules, or of all, has made so
        many more updates."""
        watched = [self.books[key] for key in modules] or list(self.books.values())
        goals = [books.updates_closed() + until_updates for books in watched]
        for _ in range(max_rounds):
            while self.pending:
                self.deliver_next()
            self.turn()
            self.check()
            if all(b.updates_closed() >= goal for b, goal in zip(watched, goals, strict=True)):
                return
            for runner in self.runners.values():
                while runner.requests:
                    self.sample(runner.worker.worker_id, 1.0, "sent")
            for learner in self.learners.values():
                while learner.commands:
                    self.work(learner.worker.worker_id, "trained")
        raise AssertionError(f"stands still: {[vars(books.core.ledger) for books in watched]}")

    def duplicate(self, index: int) -> None:
        """A message comes that came before."""
        self.deliver(replace(self.delivered[index % len(self.delivered)]))
