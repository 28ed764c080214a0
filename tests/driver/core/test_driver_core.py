"""The driver core: requests, rounds, updates, learners, and its books."""

from __future__ import annotations

import random
from collections import Counter
from itertools import groupby
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
    UpdateFinished,
    UpdateShare,
    UsedBatch,
    WorkerKey,
)
from juggler.driver.core.ledger import Ledger, LedgerError, OpenBatch
from juggler.driver.core.staleness import StalenessBudget
from juggler.runtime.episodes.version import Version

BOTH = ("blue", "red")


def make_two(
    red: dict[str, Any] | None = None,
    learners: tuple[str, ...] = BOTH,
    updates: tuple[int, int] = (0, 0),
    **both: Any,
) -> DriverCore:
    """A core of two modules, of generation 1.

    Args:
        red: settings of the second module alone.
        learners: modules whose learner, "learner-blue" or "learner-red", is there.
        updates: that each module has had.
        both: settings of both.
    """
    settings: dict[str, Any] = {"batch_size": 100, "max_open_updates": 2, **both}
    kinds = zip(BOTH, (settings, {**settings, **(red or {})}), updates, strict=True)
    core = DriverCore(
        {name: ModuleStart(ModuleSettings(**own), 1, update) for name, own, update in kinds}
    )
    for module_id in learners:
        told = step(core, LearnerJoined(f"learner-{module_id}", "L", module_id))
        assert told[0] == FormGroup(2, (f"learner-{module_id}",), module_id)
    return core


def join_two(core: DriverCore) -> list[Request]:
    return only(Request, step(core, RunnerJoined("envrunner-0", "R", dict.fromkeys(BOTH, 50))))


def test_each_module_asks_for_weights_of_its_own_version() -> None:
    blue, red, *_ = join_two(make_two(updates=(7, 3)))
    assert (blue.at_least, red.at_least) == (Version(1, 6), Version(1, 2))


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


# Requests.


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


def test_a_bound_that_one_learner_uses_up_does_not_starve_the_other() -> None:
    # 34 + 34 + 34 steps are more than max_open_updates * batch_size, and leave one learner with 34
    # of the 50 steps of its share.
    core = make(learners=2, batch_size=100, max_open_updates=1, requests_per_runner=10)
    commands: list[Command] = []
    for request in join(core, steps=34):
        commands += step(core, receipt(request, steps=34))
    assert len(only(IssueUpdate, commands)) == 1


def test_ids_go_on_above_those_of_an_earlier_run() -> None:
    core = one_module(
        ModuleSettings(batch_size=100, max_open_updates=2), first_id=40, generation=7, update=9
    )
    step(core, LearnerJoined("learner-0", "L"))
    first, _ = join(core)
    assert (first.batch_id, first.generation, first.at_least) == (40, 8, Version(7, 8))
    assert core.weights_version == Version(7, 9)


def test_a_request_asks_for_weights_at_most_one_update_behind_the_newest() -> None:
    core = make(batch_size=50, max_open_updates=1, requests_per_runner=1)
    (request,) = join(core)
    assert request.at_least == Version(0, 0)
    for number in range(1, 4):
        (update,) = only(IssueUpdate, step(core, receipt(request)))
        (request,) = only(Request, step(core, answer(update, "learner-0", number)))
        assert request.at_least == Version(1, number - 1)


# Reports.


def test_a_report_that_makes_no_sense_is_refused_before_it_gets_to_the_core() -> None:
    with pytest.raises(ValueError, match="'bored'"):
        SampleReceived(1, "envrunner-0", "R", "learner-0", 5, Version(0, 0), "bored")
    with pytest.raises(ValueError, match="-1"):
        BatchArrived("learner-0", "L", 1, -1)
    with pytest.raises(ValueError, match="must be at least 1"):
        RunnerJoined("envrunner-0", "R", {"default": 0})


# The driver core in asynchronous mode: updates, the learner group, and the end of a run.


# Updates.


def test_an_update_waits_until_every_learner_holds_its_share() -> None:
    core = make(learners=2, batch_size=100)
    requests = join(core) + join(core, index=1)
    of_first = [r for r in requests if r.learner == "learner-0"]
    of_second = [r for r in requests if r.learner == "learner-1"]
    assert [c for r in of_first for c in only(IssueUpdate, step(core, receipt(r)))] == []
    (update,) = only(IssueUpdate, step(core, receipt(of_second[0])))
    assert update.shares == (
        UpdateShare("learner-0", (of_first[0].batch_id,)),
        UpdateShare("learner-1", (of_second[0].batch_id,)),
    )


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


# Membership.


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


# The end.


@pytest.mark.parametrize("name", ["batch_size", "max_open_updates", "requests_per_runner"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0"):
        ModuleSettings(**{"batch_size": 1, "max_open_updates": 1, name: 0})


# Learners that leave, since fewer are wanted: what was asked for them is trained on first.


def two_with_requests(**settings: int) -> tuple[OneModule, list[Request]]:
    """Learners that have met, with requests of 50 steps each."""
    core = make(learners=2, batch_size=100, max_open_updates=2, **settings)
    step(core, PeersMet(core.generation, 0))
    return core, join(core, index=0) + join(core, index=1)


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


def test_who_waits_to_join_does_so_no_more_when_it_is_to_leave() -> None:
    core, requests = two_with_requests()
    for each in (of(0, requests)[0], of(1, requests)[0]):
        step(core, receipt(each))
    assert not core.idle
    step(core, LearnerJoined("learner-2", "L"))
    assert leave(core, 2) == []
    assert leave(core, 3) == []
    told = step(core, LearnerJoined("learner-3", "L"))
    assert only(FormGroup, told) == [], "no leaving learner joins"
    assert core.members == ("learner-0", "learner-1")
    assert not core.modules["default"].admissible


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
