"""The driver core: requests, rounds, updates, learners, books, and ages."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from itertools import count, groupby
from random import Random
from typing import Any

import pytest
from support.core_world import (
    OneModule,
    answer,
    join,
    joined,
    make,
    one_module,
    only,
    receipt,
    step,
)

from juggler.driver.core.core_state import ModuleSettings, ModuleStart
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    BatchArrived,
    Command,
    Event,
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    LearnerLeaves,
    LearnerLeft,
    PeersMet,
    RebuildGroup,
    ReleaseLearner,
    Request,
    RunnerJoined,
    RunnerLeft,
    SampleFailed,
    SampleReceived,
    StartNextTurn,
    UnreportedUpdate,
    UpdateAborted,
    UpdateFinished,
    UpdateShare,
    UsedBatch,
    WorkerKey,
)
from juggler.driver.core.ledger import Counters, Ledger, LedgerError, OpenBatch
from juggler.driver.core.staleness import OpenBatchLimit, StalenessBudget
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version

BOTH = ("blue", "red")


def make_two(
    red: dict[str, Any] | None = None,
    learners: tuple[str, ...] = BOTH,
    **both: Any,
) -> DriverCore:
    """A core of two modules, of generation 1.

    Args:
        red: settings of the second module alone.
        learners: modules whose learner, "learner-blue" or "learner-red", is there.
        both: settings of both.
    """
    settings: dict[str, Any] = {"batch_size": 100, "max_open_updates": 2, **both}
    kinds = zip(BOTH, (settings, {**settings, **(red or {})}), strict=True)
    core = DriverCore({name: ModuleStart(ModuleSettings(**own), 1) for name, own in kinds})
    for module_id in learners:
        told = step(core, LearnerJoined(f"learner-{module_id}", "L", module_id))
        assert told[0] == FormGroup(2, (f"learner-{module_id}",), module_id)
    return core


def join_two(core: DriverCore) -> list[Request]:
    return only(Request, step(core, RunnerJoined("envrunner-0", "R", dict.fromkeys(BOTH, 50))))


def test_a_module_that_the_run_does_not_have_is_refused_and_nothing_is_booked() -> None:
    core = make_two()
    with pytest.raises(ValueError, match="'green'"):
        core.book(BatchArrived("learner-red", "L", 10, 50, "green"))
    assert core.counters().sampled == 0


@pytest.mark.parametrize(
    ("max_staleness", "interval", "synchronous", "budget"),
    [
        (6, 1, False, StalenessBudget(drop_after=6, open_updates=3, row_age=3)),
        (6, 3, False, StalenessBudget(drop_after=6, open_updates=2, row_age=3)),
        (1, 1, False, StalenessBudget(drop_after=1, open_updates=1, row_age=1)),
        (6, 1, True, StalenessBudget(drop_after=6, open_updates=3, row_age=0)),
    ],
)
def test_half_of_the_staleness_is_for_the_queue(
    max_staleness: int, interval: int, synchronous: bool, budget: StalenessBudget
) -> None:
    assert StalenessBudget.of(max_staleness, interval, synchronous=synchronous) == budget


# The driver core with modules that share parts: which learners join them when, and turns.


NAMES = ("blue", "red", "third")


def make_sharing(**settings: Any) -> DriverCore:
    """Three modules, of which two share parts; learner-0 has all of them."""
    start = ModuleStart(ModuleSettings(batch_size=100, max_open_updates=2, **settings))
    core = DriverCore(dict.fromkeys(NAMES, start), 1, [("blue", "red"), ("third",)])
    for module_id in NAMES:
        step(core, LearnerJoined("learner-0", "L", module_id))
    return core


def join_sharing(core: DriverCore, **steps: int) -> list[Request]:
    plays = {**dict.fromkeys(NAMES, 100), **steps}
    return only(Request, step(core, RunnerJoined("envrunner-0", "R", plays)))


def test_a_learner_that_leaves_while_it_waits_holds_up_nobody() -> None:
    core = make_sharing()
    requests = join_sharing(core)
    step(core, LearnerJoined("learner-1", "L", "blue"))
    assert only(IssueUpdate, step(core, receipt(requests[0], 100))) == []
    (update,) = only(IssueUpdate, step(core, LearnerLeft("learner-1", "L", "gone")))
    assert update.module_id == "blue"


def test_in_a_turn_nobody_makes_an_update_while_a_learner_waits_for_one_of_them() -> None:
    core = make_sharing(synchronous=True)
    requests = join_sharing(core)
    step(core, LearnerJoined("learner-1", "L", "blue"))
    commands = [each for request in requests for each in step(core, receipt(request, 100))]
    assert [each.module_id for each in only(IssueUpdate, commands)] == ["third"]
    formed = step(core, LearnerJoined("learner-1", "L", "red"))
    assert [each.module_id for each in only(FormGroup, formed)] == ["blue", "red"]


# The driver core in synchronous mode: sample, wait for all, update, wait.


def start(
    runners: int, steps: int, batch_size: int = 100, learners: int = 1, cap: int = 4
) -> tuple[OneModule, list[Request]]:
    """A core and its first round."""
    core = one_module(
        ModuleSettings(
            batch_size=batch_size,
            max_open_updates=1,
            requests_per_runner=cap,
            num_learners=learners,
            synchronous=True,
        )
    )
    for index in range(runners):
        step(core, joined(index, steps))
    commands: list[Command] = []
    for index in range(learners):
        commands += step(core, LearnerJoined(f"learner-{index}", "L"))
    return core, only(Request, commands)


def deliver(core: OneModule, requests: list[Request], steps: int) -> list[Command]:
    return [command for r in requests for command in step(core, receipt(r, steps))]


def finish(core: DriverCore, update: IssueUpdate, number: int) -> list[Command]:
    commands: list[Command] = []
    module_id, version = update.module_id, Version(update.generation, number)
    updating = core.modules[module_id].ledger.updating
    for learner, batch_ids in update.shares:
        used = tuple(UsedBatch(i, updating[i].steps, 0) for i in batch_ids)
        told = UpdateFinished(update.update_id, learner, "L", version, used, module_id=module_id)
        commands += step(core, told)
    return commands


def test_a_runner_gets_the_rest_of_its_round_when_it_has_room() -> None:
    core, requests = start(runners=1, steps=30, batch_size=100, cap=2)
    assert len(requests) == 2
    (third,) = step(core, receipt(requests[0], 30))
    (fourth,) = step(core, receipt(requests[1], 30))
    assert isinstance(third, Request)
    assert isinstance(fourth, Request)
    assert step(core, receipt(third, 30)) == []
    (update,) = step(core, receipt(fourth, 30))
    assert isinstance(update, IssueUpdate)
    assert update.shares == (UpdateShare("learner-0", (1, 2, 3, 4)),)


def test_the_order_of_arrival_does_not_matter() -> None:
    updates = []
    for seed in range(10):
        core, requests = start(runners=3, steps=20, batch_size=200, learners=2)
        random.Random(seed).shuffle(requests)
        updates.append(deliver(core, requests, 20))
    assert all(len(commands) == 1 for commands in updates)
    assert all(commands == updates[0] for commands in updates)


def test_nothing_is_asked_for_between_two_turns() -> None:
    core, requests = start(runners=2, steps=50)
    assert not core.between_turns
    (update,) = deliver(core, requests, 50)
    assert isinstance(update, IssueUpdate)
    assert not core.between_turns
    assert finish(core, update, number=1) == []
    assert core.between_turns
    assert step(core, RunnerLeft("envrunner-1", "R", "killed")) == []
    assert step(core, joined(1, 50, "R2")) == []
    assert [type(command) for command in step(core, StartNextTurn())] == [Request, Request]
    assert not core.between_turns


# The driver core in asynchronous mode: what it asks of runners, and how it books their answers.


def test_scarce_requests_go_around_all_runners() -> None:
    core = make(batch_size=50, max_open_updates=1)
    pending = [request for index in range(5) for request in join(core, index)]
    asked: Counter[str] = Counter()
    for number in range(100):
        (request,) = pending
        asked[request.runner] += 1
        (update,) = step(core, receipt(request))
        assert isinstance(update, IssueUpdate)
        pending = only(Request, step(core, answer(update, "learner-0", number)))
    assert len(asked) == 5
    assert max(asked.values()) - min(asked.values()) <= 2


def test_requests_are_spread_evenly_over_the_learners() -> None:
    requests = join(make(learners=2, requests_per_runner=10))
    assert Counter(request.learner for request in requests) == {"learner-0": 2, "learner-1": 2}


def test_ids_go_on_above_those_of_an_earlier_run() -> None:
    core = one_module(
        ModuleSettings(batch_size=100, max_open_updates=2), first_id=40, generation=7, update=9
    )
    step(core, LearnerJoined("learner-0", "L"))
    first, _ = join(core)
    assert (first.batch_id, first.generation, first.at_least) == (40, 8, Version(7, 8))
    assert core.weights_version == Version(7, 9)


def test_a_report_that_makes_no_sense_is_refused_before_it_gets_to_the_core() -> None:
    with pytest.raises(ValueError, match="'bored'"):
        SampleReceived(1, "envrunner-0", "R", "learner-0", 5, Version(0, 0), "bored")
    with pytest.raises(ValueError, match="-1"):
        BatchArrived("learner-0", "L", 1, -1)
    with pytest.raises(ValueError, match="must be at least 1"):
        RunnerJoined("envrunner-0", "R", {"default": 0})


def two_updates_apart() -> tuple[OneModule, IssueUpdate]:
    """Two learners, and an update that both have to answer."""
    core = make(learners=2, batch_size=100, max_open_updates=1)
    requests = join(core)
    (update,) = [u for r in requests for u in only(IssueUpdate, step(core, receipt(r)))]
    return core, update


def test_a_learner_that_is_back_with_its_weights_tells_what_it_had_trained_on() -> None:
    core, update = two_updates_apart()
    unheard = answer(update, "learner-0", 1)
    step(core, LearnerLeft("learner-0", "L", "cut off"))
    step(core, LearnerLeft("learner-1", "L", "cut off"))
    assert core.ledger.dropped["learner_lost"] == 100
    kept = UnreportedUpdate("learner-0", unheard.version, unheard.used)
    for _ in range(2):  # it may have told before, and been cut off again
        step(core, kept)
        assert (core.ledger.trained, core.ledger.dropped["learner_lost"]) == (50, 50)
    assert core.weights_version == Version(1, 1)
    core.ledger.check()


def test_learners_that_begin_again_from_older_weights_say_so_when_they_meet() -> None:
    core = make()
    join(core)
    step(core, PeersMet(1, 7))
    assert core.weights_version == (1, 7)
    step(core, LearnerLeft("learner-0", "L", "killed"))
    step(core, LearnerJoined("learner-0", "M"))
    step(core, PeersMet(2, 5))
    assert core.weights_version == (2, 5)
    step(core, PeersMet(1, 7))
    assert core.weights_version == (2, 5), "late news of an earlier group"


def test_learners_that_lost_each_other_meet_again_under_another_generation() -> None:
    core = make(learners=2)
    join(core)
    assert step(core, RebuildGroup(0)) == []
    assert only(FormGroup, step(core, RebuildGroup(1))) == [
        FormGroup(2, ("learner-0", "learner-1"))
    ]
    assert only(FormGroup, step(core, RebuildGroup(1))) == [], "that generation is over"


# Learners that leave, since fewer are wanted.


def leave(core: OneModule, index: int = 1) -> list[object]:
    return list(step(core, LearnerLeaves(f"learner-{index}", "L")))


def of(learner: int, requests: list[Request]) -> list[Request]:
    return [each for each in requests if each.learner == f"learner-{learner}"]


def test_the_last_learner_stays_until_another_one_has_its_weights() -> None:
    core = make(learners=1, batch_size=50, max_open_updates=2)
    assert leave(core, 0) == []
    requests = join(core)
    assert of(0, requests), "it goes on meanwhile"
    (issued,) = only(IssueUpdate, step(core, receipt(requests[0])))
    assert only(ReleaseLearner, step(core, answer(issued, "learner-0", 1))) == []
    told = step(core, LearnerJoined("learner-1", "L"))
    assert only(FormGroup, told) == [FormGroup(2, ("learner-0", "learner-1"))]
    for batch in list(core.ledger.requested.values()):
        if batch.learner.worker_id == "learner-0":
            step(core, SampleFailed(batch.batch_id, *batch.runner))
    assert core.members == ("learner-0", "learner-1"), "they have not met"
    assert step(core, PeersMet(1, 0)) == [], "another group met"
    told = step(core, PeersMet(2, 1))
    assert only(ReleaseLearner, told) == [ReleaseLearner("learner-0")]
    assert only(FormGroup, told) == [FormGroup(3, ("learner-1",))]


@pytest.mark.parametrize("name", ["batch_size", "max_open_updates", "requests_per_runner"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0"):
        ModuleSettings(**{"batch_size": 1, "max_open_updates": 1, name: 0})


# The driver's books, transition by transition.


RUNNER = WorkerKey("envrunner-0", "a")
LEARNER = WorkerKey("learner-0", "b")


def requested(ledger: Ledger, batch_id: int, steps: int = 10) -> OpenBatch:
    batch = OpenBatch(batch_id, RUNNER, LEARNER, steps)
    ledger.request(batch)
    return batch


def updating(ledger: Ledger, batch_id: int, live_steps: int) -> OpenBatch:
    batch = requested(ledger, batch_id)
    ledger.hold(batch, live_steps)
    ledger.use(batch)
    return batch


def test_steps_too_old_for_any_batch_are_sampled_and_dropped() -> None:
    ledger = Ledger()
    ledger.hold(requested(ledger, 1), live_steps=7)
    ledger.drop_unbatched(5)
    assert (ledger.sampled, ledger.in_flight, ledger.dropped["stale"]) == (12, 7, 5)
    ledger.check()


def test_steps_in_flight_at_a_checkpoint_are_dropped_as_restart_by_the_run_that_goes_on() -> None:
    before = Ledger()
    before.train(updating(before, 1, live_steps=5))
    updating(before, 2, live_steps=6)
    before.lose(requested(before, 3, steps=10))
    after = Ledger.restore(before.counters())
    assert (after.sampled, after.trained, after.dropped["restart"]) == (11, 5, 6)
    assert (after.in_flight, after.lost_unreported) == (0, 10)
    after.check()


def test_check_notices_a_step_in_no_place() -> None:
    ledger = Ledger()
    ledger.hold(requested(ledger, 1), live_steps=7)
    del ledger.held[1]
    with pytest.raises(LedgerError):
        ledger.check()


# Rounds: which runners take part in them, and what ends them.


def modules_by_round(requests: list[Request]) -> list[tuple[str, ...]]:
    rounds = groupby(requests, key=lambda request: request.round or request.batch_id)
    return [tuple(request.module_id for request in together) for _, together in rounds]


def test_no_round_goes_out_until_every_module_that_is_waited_for_has_learners() -> None:
    core = make_two(learners=("blue",))
    assert join_two(core) == []
    commands = step(core, LearnerJoined("learner-red", "L", "red"))
    assert set(modules_by_round(only(Request, commands))) == {BOTH}
    core = make_two(red={"waited_for": False}, learners=("blue",))
    assert set(modules_by_round(join_two(core))) == {("blue",)}


def test_a_module_that_fills_slowly_holds_up_nobody() -> None:
    """A module that rarely acts: each receipt gives its bound back."""
    core = make_two(requests_per_runner=1)
    requests, made = join_two(core), dict.fromkeys(BOTH, 0)
    for _ in range(400):
        commands: list[Command] = []
        for request in requests:
            commands += step(core, receipt(request, 50 if request.module_id == "blue" else 1))
        updates = only(IssueUpdate, commands)
        while updates:
            made[updates[0].module_id] += 1
            told = finish(core, updates[0], made[updates[0].module_id])
            commands += told
            updates = updates[1:] + only(IssueUpdate, told)
        requests = only(Request, commands)
    assert made["blue"] >= 190
    assert made["red"] == 4


@pytest.mark.parametrize("name", ["synchronous", "requests_per_runner", "num_runners"])
def test_what_is_the_same_for_all_modules_may_not_differ(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}"):
        make_two(red={name: 5}, learners=())


def test_a_runner_that_does_not_play_for_every_module_is_refused() -> None:
    core = make_two()
    with pytest.raises(ValueError, match="envrunner-0"):
        core.book(RunnerJoined("envrunner-0", "R", {"blue": 50}))
    assert core.num_runners == 0


def test_the_first_synchronous_turn_waits_for_every_modules_learners() -> None:
    core = make_two(synchronous=True, learners=("blue",))
    assert join_two(core) == []
    commands = step(core, LearnerJoined("learner-red", "L", "red"))
    assert modules_by_round(only(Request, commands)) == [BOTH, BOTH]


def test_every_round_of_a_synchronous_turn_is_for_all_modules() -> None:
    """Otherwise steps of a module with enough would be lost, uncounted."""
    core = make_two(red={"batch_size": 50}, synchronous=True)
    assert modules_by_round(join_two(core)) == [BOTH, BOTH]


# Ages of batches: the core among workers with scripted delays.


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
