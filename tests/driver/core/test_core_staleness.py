"""How old batches get, and what an event costs: the core among workers with scripted delays."""

from __future__ import annotations

import heapq
import time
from collections import deque
from itertools import count
from random import Random

import pytest
from support.core_steps import joined, one_module, step

from juggler.driver.core.events import (
    Arrived,
    Command,
    Event,
    IssueUpdate,
    LearnerJoined,
    Request,
    SampleReceived,
    UpdateFinished,
    UsedBatch,
)
from juggler.driver.core.staleness import StalenessBudget
from juggler.driver.core.state import ModuleSettings
from juggler.runtime.episodes.version import Version

STEPS = 32  # of every batch


class Simulation:
    """Runners and learners that take their time. Time is a number here, nothing waits.

    Args:
        sample_seconds: what a runner needs for one batch, give or take `jitter` of it.
        update_seconds: what the learners need for one update.
        message_seconds: at most so long is any message or any weights on the way.
        steps: of every batch.
    """

    def __init__(
        self,
        settings: ModuleSettings,
        runners: int,
        sample_seconds: float,
        update_seconds: float,
        message_seconds: float,
        jitter: float,
        seed: int,
        steps: int = STEPS,
    ) -> None:
        self.steps = steps
        self.core = one_module(settings)
        self.sample_seconds = sample_seconds
        self.update_seconds = update_seconds
        self.message_seconds = message_seconds
        self.jitter = jitter
        self.random = Random(seed)
        self.now = 0.0
        self.busy_seconds = 0.0
        self.staleness: list[int] = []
        self._agenda: list[tuple[float, int, str, object]] = []
        self._order = count()
        self._requests: dict[str, deque[Request]] = {}  # in line at a runner
        self._acting: dict[str, int] = {}  # the update whose weights a runner has got
        self._acted: dict[int, int] = {}  # by batch: the update whose weights acted
        self._updates: deque[IssueUpdate] = deque()
        self._made = 0  # updates so far
        self._published = 0  # the newest of them whose weights runners get
        self._weights_interval = settings.weights_interval
        for index in range(settings.num_learners):
            self._tell(LearnerJoined(f"learner-{index}", "L"))
        for index in range(runners):
            self._requests[f"envrunner-{index}"] = deque()
            self._acting[f"envrunner-{index}"] = 0
            self._tell(joined(index, steps))

    def run(self, updates: int) -> None:
        while self._made < updates:
            self.now, _, what, about = heapq.heappop(self._agenda)
            getattr(self, f"_{what}")(about)

    def _at(self, delay: float, what: str, about: object) -> None:
        heapq.heappush(self._agenda, (self.now + delay, next(self._order), what, about))

    def _message(self) -> float:
        return self.random.uniform(0.1, 1.0) * self.message_seconds

    def _tell(self, event: Event) -> None:
        for command in step(self.core, event):
            self._at(self._message(), "obey", command)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Request):
            assert command.at_least.update <= self._published, "the runner would wait for ever"
            self._requests[command.runner].append(command)
            if len(self._requests[command.runner]) == 1:
                self._start_sampling(command.runner)
        elif isinstance(command, IssueUpdate):
            self._updates.append(command)
            if len(self._updates) == 1:
                self._start_update()

    def _start_sampling(self, runner: str) -> None:
        request = self._requests[runner][0]
        self._acted[request.batch_id] = self._acting[runner]
        factor = self.random.uniform(1 - self.jitter, 1 + self.jitter)
        self._at(factor * self.sample_seconds, "sampled", request)

    def _sampled(self, request: Request) -> None:
        batch_id, version = request.batch_id, Version(1, self._acted[request.batch_id])
        arrival = Arrived(request.learner, "L", batch_id, self.steps)
        receipt = SampleReceived(
            batch_id, request.runner, "R", request.learner, self.steps, version
        )
        self._at(self._message(), "tell", arrival)
        self._at(self._message(), "tell", receipt)
        self._requests[request.runner].popleft()
        if self._requests[request.runner]:
            self._start_sampling(request.runner)

    def _start_update(self) -> None:
        for share in self._updates[0].shares:
            self.staleness += [self._made - self._acted[i] for i in share.batch_ids]
        self.busy_seconds += self.update_seconds
        self._at(self.update_seconds, "updated", self._updates[0])

    def _updated(self, update: IssueUpdate) -> None:
        self._made += 1
        if self._made % self._weights_interval == 0:
            self._published = self._made
            for runner in self._acting:
                self._at(self._message(), "weights", (runner, self._made))
        for learner, batch_ids in update.shares:
            used = tuple(UsedBatch(batch_id, self.steps, 0) for batch_id in batch_ids)
            version = Version(1, self._made)
            answer = UpdateFinished(update.update_id, learner, "L", version, used)
            self._at(self._message(), "tell", answer)
        self._updates.popleft()
        if self._updates:
            self._start_update()

    def _weights(self, about: tuple[str, int]) -> None:
        runner, update = about
        self._acting[runner] = max(self._acting[runner], update)


OPEN, SECONDS = [1, 2, 4], [0.02, 0.2, 1.0]


@pytest.mark.parametrize("learners", [1, 2, 3])
@pytest.mark.parametrize("max_open_updates", OPEN)
@pytest.mark.parametrize("update_seconds", SECONDS)
def test_in_a_healthy_run_nothing_gets_staler_than_it_may(
    learners: int, max_open_updates: int, update_seconds: float
) -> None:
    """Whether the runners are the bottleneck, the learners, or neither."""
    # How often there are new weights goes round, and meets each pair of the others.
    seed = (learners + OPEN.index(max_open_updates) + SECONDS.index(update_seconds)) % 3
    weights_interval = (1, 2, 5)[seed]
    simulation = Simulation(
        ModuleSettings(
            batch_size=384,
            max_open_updates=max_open_updates,
            num_learners=learners,
            weights_interval=weights_interval,
        ),
        runners=8,
        sample_seconds=0.1,
        update_seconds=update_seconds,
        message_seconds=0.005,
        jitter=0.3,
        seed=seed,
    )
    simulation.run(updates=60)
    simulation.core.ledger.check()
    assert max(simulation.staleness) <= max_open_updates + weights_interval - 1


@pytest.mark.parametrize("learners", [1, 2, 3])
@pytest.mark.parametrize("max_staleness", [2, 6])
@pytest.mark.parametrize("steps", [250, 400, 1600])
@pytest.mark.parametrize("update_seconds", SECONDS)
def test_batches_that_are_updates_by_themselves_get_no_staler_than_they_may(
    learners: int, max_staleness: int, steps: int, update_seconds: float
) -> None:
    """Half of what is allowed is open, and others overtake a runner that is held up."""
    budget = StalenessBudget.of(max_staleness, 1, synchronous=False)
    simulation = Simulation(
        ModuleSettings(batch_size=384, max_open_updates=budget.open_updates, num_learners=learners),
        runners=8,
        sample_seconds=0.1,
        update_seconds=update_seconds,
        message_seconds=0.005,
        jitter=0.3,
        seed=learners,
        steps=steps,
    )
    simulation.run(updates=200)
    simulation.core.ledger.check()
    assert max(simulation.staleness) <= budget.drop_after


@pytest.mark.parametrize("learners", [1, 2, 3])
def test_runners_and_learners_work_side_by_side_however_large_batches_are(learners: int) -> None:
    """Each would be busy for half of the time if they waited for each other."""
    simulation = Simulation(
        ModuleSettings(batch_size=384, max_open_updates=3, num_learners=learners),
        runners=learners,
        sample_seconds=0.1,
        update_seconds=0.1,
        message_seconds=0.005,
        jitter=0.1,
        seed=0,
        steps=1600,
    )
    simulation.run(updates=100)
    assert simulation.busy_seconds / simulation.now > 0.85


def test_a_slow_learner_never_waits_for_batches() -> None:
    simulation = Simulation(
        ModuleSettings(batch_size=256, max_open_updates=2),
        runners=8,
        sample_seconds=0.1,
        update_seconds=0.4,
        message_seconds=0.005,
        jitter=0.3,
        seed=0,
    )
    simulation.run(updates=200)
    assert simulation.busy_seconds / simulation.now > 0.97


def book_receipts(runners: int, receipts: int) -> float:
    """CPU seconds for one receipt and the commands that follow, updates included."""
    core = one_module(ModuleSettings(batch_size=64 * STEPS, max_open_updates=1 + runners // 16))
    pending: deque[Command] = deque(step(core, LearnerJoined("learner-0", "L")))
    for index in range(runners):
        pending.extend(step(core, joined(index, STEPS)))
    booked, started = 0, time.process_time()
    while booked < receipts:
        command = pending.popleft()
        if isinstance(command, Request):
            batch_id, learner, version = command.batch_id, command.learner, command.at_least
            arrival = Arrived(learner, "L", batch_id, STEPS)
            receipt = SampleReceived(batch_id, command.runner, "R", learner, STEPS, version)
            pending.extend(step(core, arrival))
            pending.extend(step(core, receipt))
            booked += 1
        elif isinstance(command, IssueUpdate):
            used = tuple(UsedBatch(batch_id, STEPS, 0) for batch_id in command.shares[0].batch_ids)
            version = Version(1, command.update_id)
            answer = UpdateFinished(command.update_id, "learner-0", "L", version, used)
            pending.extend(step(core, answer))
    core.ledger.check()
    assert core.num_runners == runners
    return (time.process_time() - started) / booked


def test_the_cost_of_a_receipt_does_not_grow_with_the_number_of_runners() -> None:
    few = min(book_receipts(16, 2000) for _ in range(5))
    many = min(book_receipts(256, 2000) for _ in range(5))
    assert many < 1 / 5000
    assert many < 3 * few  # a scan of all runners or batches would make it 16 times
