"""Ages of batches: the core among workers with scripted delays."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from random import Random

import pytest
from support.core_world import answer, join, joined, make, one_module, only, receipt, step

from juggler.driver.core.core_state import ModuleSettings, ModuleStart
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    BatchArrived,
    Command,
    Event,
    IssueUpdate,
    LearnerJoined,
    Request,
    RunnerJoined,
    SampleReceived,
    UpdateAborted,
    UpdateFinished,
    UsedBatch,
)
from juggler.driver.core.ledger import Counters
from juggler.driver.core.staleness import OpenBatchLimit
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version

STEPS = 32  # of every batch


class Simulation:
    """Runners and learners with delays in simulated time.

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
        arrival = BatchArrived(request.learner, "L", batch_id, self.steps)
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


@pytest.mark.parametrize(
    ("learners", "runners", "batch_size", "steps", "update_seconds", "busy"),
    [(1, 8, 256, STEPS, 0.4, 0.97), *((n, n, 384, 1600, 0.1, 0.85) for n in (1, 2, 3))],
)
def test_runners_and_learners_work_side_by_side_however_large_batches_are(
    learners: int, runners: int, batch_size: int, steps: int, update_seconds: float, busy: float
) -> None:
    """A slow learner never waits for batches: both sides stay busy."""
    open_updates = 2 if steps == STEPS else 3
    simulation = Simulation(
        ModuleSettings(batch_size=batch_size, max_open_updates=open_updates, num_learners=learners),
        runners=runners,
        sample_seconds=0.1,
        update_seconds=update_seconds,
        message_seconds=0.005,
        jitter=0.3 if steps == STEPS else 0.1,
        seed=0,
        steps=steps,
    )
    simulation.run(updates=100)
    assert simulation.busy_seconds / simulation.now > busy
    # Others overtake a runner that is held up.
    assert max(simulation.staleness) <= 2 * open_updates


# The driver core of a run that ends after N steps: nothing is sampled in vain.


def stopping(stop_steps: int, start: ModuleStart | None = None) -> DriverCore:
    """A core with a learner, a runner and half-filled updates."""
    start = start or ModuleStart(ModuleSettings(batch_size=100, max_open_updates=4))
    core = DriverCore({DEFAULT_MODULE: start}, stop_steps=stop_steps)
    step(core, LearnerJoined("learner-0", "L"))
    return core


def all_asked(core: DriverCore) -> list[Request]:
    """By four runners that join, of which each could have two requests."""
    return [each for index in range(4) for each in only(Request, step(core, joined(index)))]


@pytest.mark.parametrize(("stop_steps", "requests"), [(1, 2), (100, 2), (101, 4), (10_000, 8)])
def test_no_more_is_asked_for_than_the_last_updates_take(stop_steps: int, requests: int) -> None:
    assert len(all_asked(stopping(stop_steps))) == requests


def test_no_update_is_made_while_those_in_flight_are_enough() -> None:
    core = stopping(150)
    commands = [each for request in all_asked(core) for each in step(core, receipt(request))]
    updates = only(IssueUpdate, commands)
    assert len(updates) == 2
    assert not core.held_steps
    step(core, answer(updates[0], "learner-0", 1))
    assert not core.trained_enough
    assert step(core, answer(updates[1], "learner-0", 2)) == []
    assert core.trained_enough


def test_what_turns_out_not_to_be_trained_on_is_made_up_for() -> None:
    core = stopping(100)
    commands = [each for request in all_asked(core) for each in step(core, receipt(request))]
    (update,) = commands
    assert isinstance(update, IssueUpdate)
    lost = UpdateAborted(update.update_id, "learner-0", "L", "lost")
    assert len(only(Request, step(core, lost))) == 2
    assert core.trained == 0


def test_a_run_that_goes_on_behind_its_last_step_makes_one_update() -> None:
    books = Counters(sampled=500, trained=500, dropped={}, in_flight=0, lost_unreported=0)
    settings = ModuleSettings(batch_size=100, max_open_updates=4)
    core = stopping(200, ModuleStart(settings, generation=1, update=5, counters=books))
    assert not core.trained_enough
    requests = all_asked(core)
    assert len(requests) == 2
    commands = [each for request in requests for each in step(core, receipt(request))]
    (update,) = commands
    assert isinstance(update, IssueUpdate)
    assert step(core, answer(update, "learner-0", 6)) == []
    assert core.trained_enough


def test_steps_of_all_modules_count() -> None:
    settings = ModuleSettings(batch_size=100, max_open_updates=4)
    core = DriverCore({key: ModuleStart(settings) for key in ("a", "b")}, stop_steps=150)
    for key in ("a", "b"):
        step(core, LearnerJoined(f"learner-{key}", "L", key))
    commands = step(core, RunnerJoined("envrunner-0", "R", {"a": 100, "b": 100}))
    done = [each for one in only(Request, commands) for each in step(core, receipt(one, 100))]
    assert sorted(each.module_id for each in only(IssueUpdate, done)) == ["a", "b"]
    assert core.held_steps == 200, "what came of the second round is in no update"


# How many batches may be open at once, small ones and ones that are a whole update each.


@pytest.mark.parametrize(
    ("steps", "learners", "batches"),
    [(50, 1, 6), (60, 1, 5), (99, 1, 4), (100, 1, 3), (5000, 1, 3), (60, 2, 6), (20, 2, 16)],
)
def test_small_batches_fill_updates_together_and_a_large_one_is_an_update(
    steps: int, learners: int, batches: int
) -> None:
    assert OpenBatchLimit(updates=3, batch_size=100, learners=learners).batches(steps) == batches
    core = make(learners=learners, max_open_updates=3, requests_per_runner=100)
    assert len(join(core, steps=steps)) == batches, "admission keeps the same rule"


def test_as_many_batches_as_updates_may_wait_are_open_however_large_they_are() -> None:
    core = make(batch_size=100, max_open_updates=3)
    first, _ = join(core, 0, steps=400)
    assert len(join(core, 1, steps=400)) == 1
    (update,) = step(core, receipt(first, steps=400))
    assert isinstance(update, IssueUpdate), "and nothing is asked for before it is trained on"
    assert len(only(Request, step(core, answer(update, "learner-0", 1, steps=400)))) == 1
