"""The driver core with several modules: whom an event concerns, and who shares what."""

from __future__ import annotations

from typing import Any

import pytest
from support.core_world import only, receipt, step

from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    Arrived,
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    LearnerLeft,
    Proceed,
    Request,
    RunnerJoined,
    RunnerLeft,
    SampleReceived,
    UpdateFinished,
    UsedBatch,
)
from juggler.driver.core.room import StalenessBudget
from juggler.driver.core.state import ModuleSettings, ModuleStart
from juggler.runtime.episodes.version import Version


def make(**update: int) -> DriverCore:
    """A core of the modules "blue" and "red", with a learner each; keys: updates they have had."""
    settings = ModuleSettings(batch_size=100, max_open_updates=2)
    modules = {name: ModuleStart(settings, 1, update.get(name, 0)) for name in ("blue", "red")}
    core = DriverCore(modules, first_id=10)
    for module_id in modules:
        told = step(core, LearnerJoined(f"learner-{module_id}", "L", module_id))
        assert told == [FormGroup(2, (f"learner-{module_id}",), module_id)]
    return core


def join(core: DriverCore, steps: int = 50) -> list[Request]:
    plays = {"blue": steps, "red": steps}
    return only(Request, step(core, RunnerJoined("envrunner-0", "R", plays)))


def test_modules_take_turns_in_asking_a_runner_and_no_id_is_given_twice() -> None:
    requests = join(make())
    assert [request.module_id for request in requests] == ["blue", "red", "blue", "red"]
    assert [request.batch_id for request in requests] == [10, 11, 12, 13]
    assert [request.learner for request in requests[:2]] == ["learner-blue", "learner-red"]


def test_each_module_asks_for_weights_of_its_own_version() -> None:
    blue, red, *_ = join(make(blue=7, red=3))
    assert (blue.at_least, red.at_least) == (Version(1, 6), Version(1, 2))


def test_a_batch_counts_for_its_module_alone_and_in_the_sum() -> None:
    core = make()
    blue, _, other_blue, _ = join(core)
    assert only(IssueUpdate, step(core, receipt(blue))) == []
    (update,) = only(IssueUpdate, step(core, receipt(other_blue)))
    assert (update.module_id, update.generation) == ("blue", 2)
    assert core.modules["blue"].ledger.sampled == core.counters().sampled == 100
    assert core.modules["red"].ledger.sampled == 0
    assert (core.updates_in_flight, core.idle, core.modules["red"].idle) == (1, False, True)


def test_a_runner_that_leaves_is_gone_for_every_module() -> None:
    core = make()
    join(core)
    step(core, RunnerLeft("envrunner-0", "R", "killed"))
    assert core.num_runners == 0
    assert [each.ledger.lost_unreported for each in core.modules.values()] == [100, 100]
    assert core.counters().lost_unreported == 200


def test_what_a_process_that_trains_two_modules_held_is_lost_to_both() -> None:
    core = make()
    for module_id in core.modules:
        step(core, LearnerJoined("learner-both", "M", module_id))
    assert core.members == ("learner-blue", "learner-both", "learner-red")
    for request in join(core):
        step(core, receipt(request))
    step(core, LearnerLeft("learner-both", "M", "killed"))
    assert core.members == ("learner-blue", "learner-red")
    assert all(each.ledger.dropped["learner_lost"] for each in core.modules.values())


def test_a_module_that_the_run_does_not_have_is_refused_and_nothing_is_booked() -> None:
    core = make()
    with pytest.raises(ValueError, match="'green'"):
        core.book(Arrived("learner-red", "L", 10, 50, "green"))
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


# The driver core with modules that share parts: who joins them when, and turns.


NAMES = ("blue", "red", "third")


def make_of_modules_that_share_parts(**settings: Any) -> DriverCore:
    """Three modules, of which two share parts; learner-0 has all of them."""
    start = ModuleStart(ModuleSettings(batch_size=100, max_open_updates=2, **settings))
    core = DriverCore(dict.fromkeys(NAMES, start), 1, [("blue", "red"), ("third",)])
    for module_id in NAMES:
        step(core, LearnerJoined("learner-0", "L", module_id))
    return core


def join_of_modules_that_share_parts(core: DriverCore, **steps: int) -> list[Request]:
    plays = {**dict.fromkeys(NAMES, 100), **steps}
    return only(Request, step(core, RunnerJoined("envrunner-0", "R", plays)))


def receipt_of_modules_that_share_parts(request: Request, steps: int = 100) -> SampleReceived:
    return SampleReceived(
        request.batch_id,
        request.runner,
        request.incarnation,
        request.learner,
        steps,
        request.at_least,
        module_id=request.module_id,
    )


def answer(core: DriverCore, update: IssueUpdate) -> list[Any]:
    commands = []
    for share in update.shares:
        used = tuple(UsedBatch(batch_id, 100, 0, "") for batch_id in share.batch_ids)
        before = core.module(update.module_id).weights_version
        version = Version(update.generation, before.update + 1)
        event = UpdateFinished(
            update.update_id, share.learner, "L", version, used, update.module_id
        )
        commands += step(core, event)
    return commands


def test_a_learner_is_let_in_to_all_modules_that_share_parts_at_once() -> None:
    core = make_of_modules_that_share_parts()
    assert core.members == ("learner-0",)
    assert step(core, LearnerJoined("learner-1", "L", "blue")) == []
    assert core.module("blue").members == ("learner-0",), "red has not got it yet"
    formed = only(FormGroup, step(core, LearnerJoined("learner-1", "L", "red")))
    assert [(each.module_id, each.members) for each in formed] == [
        ("blue", ("learner-0", "learner-1")),
        ("red", ("learner-0", "learner-1")),
    ]


def test_it_is_let_in_between_updates_of_all_and_updates_follow_behind() -> None:
    core = make_of_modules_that_share_parts(max_updates_in_flight=1)
    requests = join_of_modules_that_share_parts(core)
    (update,) = only(IssueUpdate, step(core, receipt_of_modules_that_share_parts(requests[1])))
    assert update.module_id == "red"
    step(core, LearnerJoined("learner-1", "L", "blue"))
    assert step(core, LearnerJoined("learner-1", "L", "red")) == [], "red is in an update"
    assert only(IssueUpdate, step(core, receipt_of_modules_that_share_parts(requests[0]))) == [], (
        "blue waits for both"
    )
    formed = only(FormGroup, answer(core, update))
    assert [each.module_id for each in formed] == ["blue", "red"]


def test_a_learner_that_leaves_while_it_waits_holds_up_nobody() -> None:
    core = make_of_modules_that_share_parts()
    requests = join_of_modules_that_share_parts(core)
    step(core, LearnerJoined("learner-1", "L", "blue"))
    assert only(IssueUpdate, step(core, receipt_of_modules_that_share_parts(requests[0]))) == []
    (update,) = only(IssueUpdate, step(core, LearnerLeft("learner-1", "L", "gone")))
    assert update.module_id == "blue"


def test_in_a_turn_all_who_share_parts_make_an_update_or_none_does() -> None:
    core = make_of_modules_that_share_parts(synchronous=True)
    blue, red, third = join_of_modules_that_share_parts(core)
    assert [each.module_id for each in (blue, red, third)] == list(NAMES)
    step(core, receipt_of_modules_that_share_parts(blue))
    step(core, receipt_of_modules_that_share_parts(red, steps=0))  # no row of it was complete
    commands = step(core, receipt_of_modules_that_share_parts(third))
    (alone,) = only(IssueUpdate, commands)
    assert alone.module_id == "third"
    answer(core, alone)
    for module_id in NAMES:
        core.book(Proceed(module_id))
    requests = only(Request, [*core.issue_updates(), *core.top_up()])
    assert [each.module_id for each in requests] == ["red", "third"]
    step(core, receipt_of_modules_that_share_parts(requests[1]))
    updates = only(IssueUpdate, step(core, receipt_of_modules_that_share_parts(requests[0])))
    assert [each.module_id for each in updates] == list(NAMES)
    assert [len(each.shares[0].batch_ids) for each in updates] == [1, 2, 1]


def test_in_a_turn_nobody_makes_an_update_while_a_learner_waits_for_one_of_them() -> None:
    core = make_of_modules_that_share_parts(synchronous=True)
    requests = join_of_modules_that_share_parts(core)
    step(core, LearnerJoined("learner-1", "L", "blue"))
    commands = [
        each
        for request in requests
        for each in step(core, receipt_of_modules_that_share_parts(request))
    ]
    assert [each.module_id for each in only(IssueUpdate, commands)] == ["third"]
    formed = step(core, LearnerJoined("learner-1", "L", "red"))
    assert [each.module_id for each in only(FormGroup, formed)] == ["blue", "red"]
