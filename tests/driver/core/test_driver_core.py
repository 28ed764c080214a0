"""The driver core with several modules: whom an event concerns, and who shares what."""

from __future__ import annotations

import pytest
from support.core_steps import only, receipt, step

from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    Arrived,
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    LearnerLeft,
    Request,
    RunnerJoined,
    RunnerLeft,
)
from juggler.driver.core.staleness import StalenessBudget
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
    with pytest.raises(ValueError, match="there is no module 'green' in this run: it has blue, re"):
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
