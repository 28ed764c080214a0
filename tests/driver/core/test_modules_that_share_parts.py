"""The driver core with modules that share parts: who joins them when, and turns."""

from __future__ import annotations

from typing import Any

from support.core_steps import only, step

from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    LearnerLeft,
    Proceed,
    Request,
    RunnerJoined,
    SampleReceived,
    UpdateFinished,
    UsedBatch,
)
from juggler.driver.core.state import ModuleSettings, ModuleStart
from juggler.runtime.episodes.version import Version

NAMES = ("blue", "red", "third")


def make(**settings: Any) -> DriverCore:
    """Three modules, of which two share parts; learner-0 has all of them."""
    start = ModuleStart(ModuleSettings(batch_size=100, max_open_updates=2, **settings))
    core = DriverCore(dict.fromkeys(NAMES, start), 1, [("blue", "red"), ("third",)])
    for module_id in NAMES:
        step(core, LearnerJoined("learner-0", "L", module_id))
    return core


def join(core: DriverCore, **steps: int) -> list[Request]:
    plays = {**dict.fromkeys(NAMES, 100), **steps}
    return only(Request, step(core, RunnerJoined("envrunner-0", "R", plays)))


def receipt(request: Request, steps: int = 100) -> SampleReceived:
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
    core = make()
    assert core.members == ("learner-0",)
    assert step(core, LearnerJoined("learner-1", "L", "blue")) == []
    assert core.module("blue").members == ("learner-0",), "red has not got it yet"
    formed = only(FormGroup, step(core, LearnerJoined("learner-1", "L", "red")))
    assert [(each.module_id, each.members) for each in formed] == [
        ("blue", ("learner-0", "learner-1")),
        ("red", ("learner-0", "learner-1")),
    ]


def test_it_is_let_in_between_updates_of_all_and_updates_follow_behind() -> None:
    core = make(max_updates_in_flight=1)
    requests = join(core)
    (update,) = only(IssueUpdate, step(core, receipt(requests[1])))
    assert update.module_id == "red"
    step(core, LearnerJoined("learner-1", "L", "blue"))
    assert step(core, LearnerJoined("learner-1", "L", "red")) == [], "red is in an update"
    assert only(IssueUpdate, step(core, receipt(requests[0]))) == [], "blue waits for both"
    formed = only(FormGroup, answer(core, update))
    assert [each.module_id for each in formed] == ["blue", "red"]


def test_a_learner_that_leaves_while_it_waits_holds_up_nobody() -> None:
    core = make()
    requests = join(core)
    step(core, LearnerJoined("learner-1", "L", "blue"))
    assert only(IssueUpdate, step(core, receipt(requests[0]))) == []
    (update,) = only(IssueUpdate, step(core, LearnerLeft("learner-1", "L", "gone")))
    assert update.module_id == "blue"


def test_in_a_turn_all_who_share_parts_make_an_update_or_none_does() -> None:
    core = make(synchronous=True)
    blue, red, third = join(core)
    assert [each.module_id for each in (blue, red, third)] == list(NAMES)
    step(core, receipt(blue))
    step(core, receipt(red, steps=0))  # no row of it was complete
    commands = step(core, receipt(third))
    (alone,) = only(IssueUpdate, commands)
    assert alone.module_id == "third"
    answer(core, alone)
    for module_id in NAMES:
        core.book(Proceed(module_id))
    requests = only(Request, [*core.issue_updates(), *core.top_up()])
    assert [each.module_id for each in requests] == ["red", "third"]
    step(core, receipt(requests[1]))
    updates = only(IssueUpdate, step(core, receipt(requests[0])))
    assert [each.module_id for each in updates] == list(NAMES)
    assert [len(each.shares[0].batch_ids) for each in updates] == [1, 2, 1]


def test_in_a_turn_nobody_makes_an_update_while_a_learner_waits_for_one_of_them() -> None:
    core = make(synchronous=True)
    requests = join(core)
    step(core, LearnerJoined("learner-1", "L", "blue"))
    commands = [each for request in requests for each in step(core, receipt(request))]
    assert [each.module_id for each in only(IssueUpdate, commands)] == ["third"]
    formed = step(core, LearnerJoined("learner-1", "L", "red"))
    assert [each.module_id for each in only(FormGroup, formed)] == ["blue", "red"]
