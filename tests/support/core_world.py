"""A driver core among fake processes, and what must hold whatever they do.

A test delivers the messages of the processes in any order, twice, or after their sender's death.
The world keeps books of its own, from messages alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

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
    UnheardUpdate,
    UpdateFailed,
    UpdateFinished,
    WorkerKey,
)
from juggler.driver.core.group import worker_order
from juggler.driver.core.module_core import ModuleCore, ModuleStart
from juggler.driver.core.state import ModuleSettings
from juggler.runtime.episodes.version import Version
from support.core_fakes import FakeLearner, FakeRunner, Processes

#: Learners 0 to 3 train the first module, 4 to 7 the second, and those above all modules.
LEARNERS_OF_A_MODULE = 4


class ModuleBooks:
    """What the world knows of one module, and what must hold there.

    Args:
        core: of the module.
        known: worker id -> incarnation, as the core must see it; the world keeps it.
    """

    def __init__(self, core: ModuleCore, known: Mapping[str, str]) -> None:
        self.core = core
        self.settings = core.settings
        self.known = known
        self.group: tuple[str, ...] = ()
        self.generation = 0
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

    def expect(self, event: Event) -> None:
        """Book the event here, as the rules have it."""
        match event:
            case PeersMet():
                self.unheard.clear()
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
            case UnheardUpdate():
                told = [each for each in event.used if each.batch_id in self.unheard]
                self.unheard -= {each.batch_id for each in told}
                self.trained += sum(each.live_steps for each in told if not each.dropped)

    def gone(self, worker_id: str, incarnation: str) -> None:
        self.unreported.pop(WorkerKey(worker_id, incarnation), None)
        self.group = tuple(name for name in self.group if name != worker_id)
        for update_id, waiting in self.waiting.items():
            if worker_id in waiting:
                self.unheard.update(self.shares[update_id][worker_id])
                waiting.discard(worker_id)

    def updates_in_flight(self) -> int:
        return sum(map(bool, self.waiting.values()))

    def updates_closed(self) -> int:
        return len(self.waiting) - self.updates_in_flight()

    def _reported(self, batch_id: int, live_steps: int | None) -> None:
        request = self.requests[batch_id]
        runner = WorkerKey(request.runner, request.incarnation)
        self.unreported.get(runner, set()).discard(batch_id)
        if live_steps is not None:
            self.sampled.setdefault(batch_id, live_steps)

    # What must hold.

    def check_group(self, command: FormGroup) -> None:
        assert command.generation > self.generation
        assert set(command.members) >= set(self.group), "a survivor was left out"
        assert set(command.members) <= set(self.known)
        grown = set(command.members) > set(self.group)
        assert not grown or not self.updates_in_flight(), "joined during an update"
        self.group, self.generation = command.members, command.generation

    def check_request(self, request: Request, published: Version) -> None:
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
            assert at_least <= published, "the runner would wait for ever"
            behind = max(0, newest.update - 1) - at_least.update
            assert 0 <= behind < self.settings.weights_interval
            assert at_least.generation == newest.generation

    def check_update(self, update: IssueUpdate, learners: Mapping[str, FakeLearner]) -> None:
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
            if share.learner in learners:
                assert learners[share.learner].batches.keys() >= set(share.batch_ids)
        if self.settings.synchronous:
            assert self.updates_in_flight() == 1
            for share in update.shares:
                order = [(worker_order(self.requests[i].runner), i) for i in share.batch_ids]
                assert order == sorted(order)
        else:
            assert self.updates_in_flight() <= self.settings.max_updates_in_flight

    def check_admission(self, commands: list[Command]) -> None:
        """The last request for a learner found less than its part of the bound open."""
        if self.settings.synchronous:
            return
        bound = self.settings.max_open_updates * self.settings.batch_size / max(1, len(self.group))
        asked = [each for each in commands if isinstance(each, Request)]
        ours = [each for each in asked if each.module_id == self.core.module_id]
        for learner, request in {each.learner: each for each in ours}.items():
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

    def check_reopened(self, unreported: set[int]) -> None:
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
        assert core.idle == (not self.updates_in_flight())
        assert len(ledger.requested) == sum(map(len, self.unreported.values()))
        assert core.members == self.group
        members = core._group.members
        for worker_id, learner in members.items():
            assert learner.open_steps == self._open_steps(worker_id)
            assert learner.held_steps == sum(batch.steps for batch in learner.held)
        held = [batch.batch_id for learner in members.values() for batch in learner.held]
        assert sorted(held) == sorted(ledger.held)


class RoundBooks:
    """What the world knows of rounds, over all modules."""

    def __init__(self, books: Mapping[str, ModuleBooks]) -> None:
        self._books = books

    def check(self, requests: list[Request]) -> None:
        """What the core asked for at once."""
        for number, asked in groupby(requests, key=_round_of):
            together = list(asked)
            first = together[0]
            assert number == first.batch_id, "a round came in pieces"
            assert {(each.runner, each.incarnation) for each in together} == {
                (first.runner, first.incarnation)
            }
            modules = {each.module_id for each in together}
            assert len(modules) == len(together)
            told = {each.requests_in_round for each in together}
            assert told == ({len(together)} if first.round else {0})
            self._check_modules(modules)

    def _check_modules(self, modules: set[str]) -> None:
        """A module is left out if it has no learners, has enough, or need not be waited for."""
        for module_id, books in self._books.items():
            excused = books.settings.synchronous or not books.settings.waited_for
            assert module_id in modules or excused or not books.group

    def check_open(self, most: int) -> None:
        """No runner has more rounds that are not reported in full."""
        rounds: dict[WorkerKey, set[int]] = {}
        for books in self._books.values():
            for worker, batch_ids in books.unreported.items():
                numbers = {_round_of(books.requests[batch_id]) for batch_id in batch_ids}
                rounds.setdefault(worker, set()).update(numbers)
        assert all(len(numbers) <= most for numbers in rounds.values())


def _round_of(request: Request) -> int:
    return request.round or request.batch_id


class World(Processes):
    """
    Args:
        settings: of each module.
        events_a_turn: how many events the core is told before it is asked for updates and requests,
            as the driver's loop asks it behind all that came at once.
    """

    def __init__(self, settings: Mapping[str, ModuleSettings], events_a_turn: int = 1) -> None:
        super().__init__(settings)
        self.core = DriverCore({key: ModuleStart(each) for key, each in settings.items()})
        self.known: dict[str, str] = {}
        self.books = {
            key: ModuleBooks(module, self.known) for key, module in self.core.modules.items()
        }
        self.rounds = RoundBooks(self.books)
        self.delivered: list[Event] = []
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
        first = index // LEARNERS_OF_A_MODULE
        modules = list(self.settings)[first : first + 1] or list(self.settings)
        worker = self._new_worker(f"learner-{index}")
        versions = dict.fromkeys(modules, Version(0, 0))
        self.learners[worker.worker_id] = FakeLearner(worker, versions)
        for module_id in modules:
            self.deliver(LearnerJoined(worker.worker_id, worker.incarnation, module_id))

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
            case RunnerLeft(worker_id, incarnation) | LearnerLeft(worker_id, incarnation):
                if self.known.get(worker_id) == incarnation:
                    self._gone(worker_id)
            case _ if hasattr(event, "module_id"):
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
        assert whole.sampled == sum(sum(each.sampled.values()) for each in self.books.values())
        assert whole.trained == sum(each.trained for each in self.books.values())

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
