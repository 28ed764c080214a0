"""The driver core with several modules: whom an event concerns, and who shares what."""

from __future__ import annotations

from typing import Any

import pytest
from support.core_world import only, receipt, step

from juggler.driver.core.core_state import ModuleSettings, ModuleStart
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    BatchArrived,
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    LearnerLeft,
    Request,
    RunnerJoined,
)
from juggler.driver.core.staleness import StalenessBudget
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


def test_each_module_asks_for_weights_of_its_own_version() -> None:
    blue, red, *_ = join(make(blue=7, red=3))
    assert (blue.at_least, red.at_least) == (Version(1, 6), Version(1, 2))


def test_a_module_that_the_run_does_not_have_is_refused_and_nothing_is_booked() -> None:
    core = make()
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


# The driver core with modules that share parts: who joins them when, and turns.


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
