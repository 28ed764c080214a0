"""A driver core among fake processes, and its invariants."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeVar

from juggler.driver.core.core_state import ModuleSettings, ModuleStart
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    BatchArrived,
    Command,
    Discard,
    Event,
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    LearnerLeaves,
    LearnerLeft,
    PeersMet,
    ReleaseLearner,
    Request,
    RunnerJoined,
    RunnerLeft,
    RunnerPlays,
    SampleFailed,
    SampleReceived,
    StartNextTurn,
    TrainingEnds,
    UnreportedUpdate,
    UpdateAborted,
    UpdateFinished,
    UsedBatch,
    WorkerKey,
)
from juggler.driver.core.group import worker_order
from juggler.driver.core.ledger import Ledger, OpenBatch
from juggler.driver.core.module_core import ModuleCore
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version


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
    """Living processes, and their messages in transit to the core."""

    def __init__(self, settings: dict[str, ModuleSettings]) -> None:
        # By module: the newest weights that runners can have.
        self.published = dict.fromkeys(settings, Version(0, 0))
        self.settings = settings
        self.runners: dict[str, FakeRunner] = {}
        self.learners: dict[str, FakeLearner] = {}
        self.pending: list[Event] = []

    def kill(self, worker_id: str, survivors: int) -> None:
        """End a process; `survivors` of its last messages still arrive."""
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
        """Lose a learner's connection; its last updates are reported later."""
        learner = self.learners[worker_id]
        self.kill(worker_id, survivors)
        self.pending += [
            UnreportedUpdate(worker_id, each.version, each.used, each.module_id)
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
            arrived = BatchArrived(*learner.worker, request.batch_id, live_steps, request.module_id)
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
                event: Event = UpdateAborted(
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
        self.leaves = False
        self.leavers: set[WorkerKey] = set()  # learners that are to leave
        self.ignored: set[WorkerKey] = set()  # the ones of these that are in no group any more

    def expect(self, event: Event) -> None:
        """Book the event here, as the rules have it."""
        match event:
            case TrainingEnds():
                self.leaves = True
            case PeersMet():
                self.unheard.clear()
            case SampleReceived() | SampleFailed():
                if self.known.get(event.runner) == event.incarnation:
                    self._reported(event.batch_id, getattr(event, "live_steps", None))
            case BatchArrived():
                worker = WorkerKey(event.learner, event.incarnation)
                is_known = self.known.get(event.learner) == event.incarnation
                if is_known and worker not in self.ignored:
                    self._reported(event.batch_id, event.live_steps)
            case UpdateFinished() | UpdateAborted():
                waiting = self.waiting.get(event.update_id, set())
                if self.known.get(event.learner) == event.incarnation and event.learner in waiting:
                    waiting.remove(event.learner)
                    if isinstance(event, UpdateFinished):
                        self.trained += sum(b.live_steps for b in event.used if not b.dropped)
            case UnreportedUpdate():
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

    def let_go(self, worker: WorkerKey) -> None:
        """Tell this learner to leave. A newcomer will not join."""
        self.leavers.add(worker)
        if worker.worker_id not in self.group:
            self.ignored.add(worker)

    def leaving(self) -> set[str]:
        """Those of the group that are to leave, where others stay."""
        found = {name for name in self.group if WorkerKey(name, self.known[name]) in self.leavers}
        return found if found < set(self.group) else set()

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

    def check_left(self, command: ReleaseLearner) -> None:
        assert command.learner in self.leaving()
        assert not self.updates_in_flight(), "left during an update"
        assert not any(each.steps for each in self._open(command.learner)), (
            "something of it is lost"
        )
        self.ignored.add(WorkerKey(command.learner, self.known[command.learner]))
        self.group = tuple(name for name in self.group if name != command.learner)

    def check_group(self, command: FormGroup) -> None:
        assert command.generation > self.generation
        assert set(command.members) >= set(self.group), "a survivor was left out"
        assert set(command.members) <= set(self.known)
        grown = set(command.members) > set(self.group)
        assert not grown or not self.updates_in_flight(), "joined during an update"
        self.group, self.generation = command.members, command.generation

    def check_request(self, request: Request, published: Version) -> None:
        assert request.batch_id not in self.requests
        assert not self.leaves
        self.requests[request.batch_id] = request
        assert self.known[request.runner] == request.incarnation
        under_way = self.unreported.setdefault(
            WorkerKey(request.runner, request.incarnation), set()
        )
        under_way.add(request.batch_id)
        assert len(under_way) <= self.settings.requests_per_runner
        assert request.learner in self.group
        assert request.learner not in self.leaving()
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
        assert not self.leaves
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
            if self.settings.synchronous or share.learner in self.leaving():
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
        """Check that the last request kept bound and waiting batches low."""
        if self.settings.synchronous:
            return
        bound = self.settings.max_open_updates * self.settings.batch_size / max(1, len(self.group))
        asked = [each for each in commands if isinstance(each, Request)]
        ours = [each for each in asked if each.module_id == self.core.module_id]
        for learner, request in {each.learner: each for each in ours}.items():
            batch = self.core.ledger.requested[request.batch_id]
            behind = [each for each in self._open(learner) if each is not batch]
            few = len(behind) < self.settings.max_open_updates
            assert few or sum(each.steps for each in behind) < bound

    def _open(self, learner: str) -> list[OpenBatch]:
        """Requested for this very process, held by it, or in its shares."""
        worker = WorkerKey(learner, self.known[learner])
        ledger = self.core.ledger
        return [
            batch
            for state in (ledger.requested, ledger.held, ledger.updating)
            for batch in state.values()
            if batch.learner == worker
        ]

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
            open_ = self._open(worker_id)
            updating = [each for each in open_ if each.batch_id in ledger.updating]
            assert learner.open_batches == len(open_)
            assert learner.open_steps == sum(batch.steps for batch in open_)
            assert learner.updating_steps == sum(batch.steps for batch in updating)
            assert learner.held_steps == sum(batch.steps for batch in learner.held)
        held = [batch.batch_id for learner in members.values() for batch in learner.held]
        assert sorted(held) == sorted(ledger.held)


class RoundBooks:
    """What the world knows of rounds, over all modules."""

    def __init__(
        self, books: Mapping[str, ModuleBooks], plays: Mapping[WorkerKey, set[str]]
    ) -> None:
        self._books, self._plays = books, plays

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
            self._check_modules(modules, WorkerKey(first.runner, first.incarnation))

    def _check_modules(self, modules: set[str], runner: WorkerKey) -> None:
        """Check that each missing module had a reason to be left out."""
        assert modules <= self._plays[runner]
        for module_id, books in self._books.items():
            excused = books.settings.synchronous or not books.settings.waited_for
            excused = excused or module_id not in self._plays[runner] or books.leaves
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


#: Learners 0 to 3 train the first module, 4 to 7 the second, and those above all modules. A module
#: that is added is trained by those of one of them, too.
LEARNERS_OF_A_MODULE = 4


class World(Processes):
    """A core among fake processes, and its invariants.

    Args:
        settings: of each module.
        events_a_turn: how many events the core is told before it is asked for updates and requests,
            as the driver's loop asks it behind all that came at once.
    """

    def __init__(self, settings: Mapping[str, ModuleSettings], events_a_turn: int = 1) -> None:
        super().__init__(dict(settings))
        self.first = tuple(settings)
        self.added: dict[str, int] = {}  # whose learners train it: the number of one of the first
        self.gone: list[ModuleBooks] = []  # of released modules
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
        """Tell this learner to leave; it ends once no group needs it."""
        worker = self.learners[worker_id].worker
        self.leavers.add(worker)
        for books in self.books.values():
            books.let_go(worker)
        self.pending = [  # it reports no further module to the driver
            each
            for each in self.pending
            if not isinstance(each, LearnerJoined)
            or WorkerKey(each.learner, each.incarnation) != worker
        ]
        self.deliver(LearnerLeaves(*worker))

    def stays(self, worker_id: str) -> bool:
        """Whether this learner exists and is not to leave."""
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
        """Have the first learners train one more module."""
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
            coming = StartNextTurn(key) in self.pending
            if books.core.between_turns and not coming:
                self.pending.append(StartNextTurn(key))
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
            case ReleaseLearner():
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
        """Run until these modules, or all, have N more updates."""
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


C = TypeVar("C")


class OneModule(DriverCore):
    """The core of a run with one module, and its state."""

    @property
    def ledger(self) -> Ledger:
        return self.modules[DEFAULT_MODULE].ledger

    @property
    def generation(self) -> int:
        return self.modules[DEFAULT_MODULE].generation


def one_module(
    settings: ModuleSettings, first_id: int = 1, generation: int = 0, update: int = 0
) -> OneModule:
    return OneModule({DEFAULT_MODULE: ModuleStart(settings, generation, update)}, first_id)


def step(core: DriverCore, event: Event) -> list[Command]:
    """Carry out the driver's loop for one event."""
    return [*core.book(event), *core.issue_updates(), *core.top_up()]


def make(learners: int = 1, **settings: Any) -> OneModule:
    """A core whose group has formed: learner-0, learner-1, … of incarnation "L"."""
    defaults: dict[str, Any] = {"batch_size": 100, "max_open_updates": 2, "num_learners": learners}
    core = one_module(ModuleSettings(**{**defaults, **settings}))
    for index in range(learners):
        step(core, LearnerJoined(f"learner-{index}", "L"))
    return core


def only(kind: type[C], commands: Iterable[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def joined(index: int = 0, steps: int = 50, incarnation: str = "R") -> RunnerJoined:
    """A runner of the one module."""
    return RunnerJoined(f"envrunner-{index}", incarnation, {DEFAULT_MODULE: steps})


def join(core: OneModule, index: int = 0, steps: int = 50) -> list[Request]:
    return only(Request, step(core, joined(index, steps)))


def receipt(request: Request, steps: int = 50) -> SampleReceived:
    return SampleReceived(
        request.batch_id,
        request.runner,
        request.incarnation,
        request.learner,
        steps,
        request.at_least,
        module_id=request.module_id,
    )


def answer(update: IssueUpdate, learner: str, number: int, steps: int = 50) -> UpdateFinished:
    used = tuple(UsedBatch(i, steps, 0) for i in dict(update.shares)[learner])
    return UpdateFinished(update.update_id, learner, "L", Version(update.generation, number), used)
