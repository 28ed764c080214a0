"""What a world of fake processes knows of a driver core from messages, and what must hold."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from juggler.driver.core.events import (
    Arrived,
    Command,
    Event,
    FormGroup,
    IssueUpdate,
    LeftGroup,
    PeersMet,
    Request,
    SampleFailed,
    SampleReceived,
    TrainingEnds,
    UnheardUpdate,
    UpdateFailed,
    UpdateFinished,
    WorkerKey,
)
from juggler.driver.core.group import worker_order
from juggler.driver.core.ledger import Batch
from juggler.driver.core.module_core import ModuleCore
from juggler.runtime.episodes.version import Version
from support.core_fakes import FakeLearner


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
        self.ignored: set[WorkerKey] = set()  # of these, those that are in no group any more

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
            case Arrived():
                worker = WorkerKey(event.learner, event.incarnation)
                is_known = self.known.get(event.learner) == event.incarnation
                if is_known and worker not in self.ignored:
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

    def let_go(self, worker: WorkerKey) -> None:
        """This learner is to leave. One that is no member yet does not become one."""
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

    def check_left(self, command: LeftGroup) -> None:
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
        """The last request for a learner found less than its part of the bound open, or fewer
        batches than updates may wait."""
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

    def _open(self, learner: str) -> list[Batch]:
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
        """A module is left out if it has no learners, has enough, or need not be waited for; or if
        the runner does not have it, or it leaves."""
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
