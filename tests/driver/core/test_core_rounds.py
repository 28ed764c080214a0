"""The driver core with several modules: rounds, who takes part in them, and what ends them."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from support.core_world import only, receipt, step

from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    Command,
    IssueUpdate,
    LearnerJoined,
    LearnerLeft,
    Proceed,
    Request,
    RunnerJoined,
    RunnerLeft,
    SampleFailed,
    SampleReceived,
    UpdateFinished,
    UsedBatch,
)
from juggler.driver.core.state import ModuleSettings, ModuleStart
from juggler.runtime.episodes.version import Version

BOTH = ("blue", "red")


def make(
    red: dict[str, Any] | None = None, learners: tuple[str, ...] = BOTH, **both: Any
) -> DriverCore:
    """A core of two modules.

    Args:
        red: settings of the second module alone.
        learners: modules whose learner, "learner-blue" or "learner-red", is there.
        both: settings of both.
    """
    settings: dict[str, Any] = {"batch_size": 100, "max_open_updates": 2, **both}
    core = DriverCore(
        {
            "blue": ModuleStart(ModuleSettings(**settings)),
            "red": ModuleStart(ModuleSettings(**{**settings, **(red or {})})),
        }
    )
    for module_id in learners:
        step(core, LearnerJoined(f"learner-{module_id}", "L", module_id))
    return core


def join(core: DriverCore, index: int = 0, blue: int = 50, red: int = 50) -> list[Request]:
    steps = {"blue": blue, "red": red}
    return only(Request, step(core, RunnerJoined(f"envrunner-{index}", "R", steps)))


def finish(core: DriverCore, update: IssueUpdate, number: int) -> list[Command]:
    (share,) = update.shares
    updating = core.modules[update.module_id].ledger.updating
    used = tuple(UsedBatch(i, updating[i].steps, 0) for i in share.batch_ids)
    version = Version(update.generation, number)
    finished = UpdateFinished(
        update.update_id, share.learner, "L", version, used, module_id=update.module_id
    )
    return step(core, finished)


def modules_by_round(requests: list[Request]) -> list[tuple[str, ...]]:
    rounds = groupby(requests, key=lambda request: request.round or request.batch_id)
    return [tuple(request.module_id for request in together) for _, together in rounds]


def test_a_round_is_one_request_for_each_module_to_one_runner() -> None:
    requests = join(make())
    assert modules_by_round(requests) == [BOTH, BOTH]
    assert [request.round for request in requests] == [1, 1, 3, 3]
    assert {request.requests_in_round for request in requests} == {2}


def test_a_runner_gets_its_next_round_only_when_all_of_one_is_reported() -> None:
    core = make(requests_per_runner=1)
    blue, red = join(core)
    assert step(core, receipt(blue, 50)) == []
    assert modules_by_round(only(Request, step(core, receipt(red, 0)))) == [BOTH]


def test_a_request_that_failed_ends_its_part_of_the_round() -> None:
    core = make(requests_per_runner=1)
    blue, red = join(core)
    assert step(core, SampleFailed(blue.batch_id, "envrunner-0", "R", "blue")) == []
    assert step(core, SampleFailed(blue.batch_id, "envrunner-0", "R", "blue")) == [], "a duplicate"
    assert modules_by_round(only(Request, step(core, receipt(red, 50)))) == [BOTH]


def test_a_runner_that_leaves_in_the_middle_of_a_round_loses_what_it_has_not_reported() -> None:
    core = make(requests_per_runner=1)
    blue, red = join(core)
    step(core, receipt(blue, 30))
    step(core, RunnerLeft("envrunner-0", "R", "killed"))
    assert core.modules["blue"].ledger.lost_unreported == 0
    assert core.modules["red"].ledger.lost_unreported == 50
    step(core, receipt(red, 50))
    assert core.counters().sampled == 30
    core.counters().check()


def test_a_module_that_has_no_room_holds_up_the_round() -> None:
    # Blue has room for 200 steps, red for 100.
    core = make(red={"batch_size": 50}, requests_per_runner=8)
    assert modules_by_round(join(core)) == [BOTH, BOTH]


def test_a_module_that_is_not_waited_for_is_left_out_while_it_has_no_room() -> None:
    core = make(red={"batch_size": 50, "waited_for": False}, requests_per_runner=8)
    requests = join(core)
    assert modules_by_round(requests) == [BOTH, BOTH, ("blue",), ("blue",)]
    assert [request.round for request in requests if request.module_id == "red"] == [1, 3]
    assert [request.round for request in requests[4:]] == [0, 0], "rounds of their own"
    commands = [each for request in requests for each in step(core, receipt(request, 50))]
    red = next(each for each in only(IssueUpdate, commands) if each.module_id == "red")
    finish(core, red, number=1)
    assert core.modules["red"].ledger.trained == 50
    # There is room again.
    blue = next(each for each in only(IssueUpdate, commands) if each.module_id == "blue")
    again = only(Request, finish(core, blue, number=1))
    assert modules_by_round(again) == [BOTH, ("blue",)]


def test_only_a_module_that_is_not_waited_for_never_holds_up_others() -> None:
    core = make(red={"batch_size": 1, "waited_for": False}, requests_per_runner=1)
    requests, made = join(core), 0
    while made < 20:  # red's learner never answers
        commands = [each for request in requests for each in step(core, receipt(request, 50))]
        for update in only(IssueUpdate, commands):
            if update.module_id == "blue":
                made += 1
                commands += finish(core, update, made)
        requests = only(Request, commands)
    assert core.modules["red"].ledger.in_flight <= 150, "two updates, and what waits for a third"


def test_a_module_whose_learners_are_all_gone_is_left_out_until_they_are_back() -> None:
    core = make(requests_per_runner=1)
    requests = join(core)
    step(core, LearnerLeft("learner-red", "L", "killed"))
    commands = [each for request in requests for each in step(core, receipt(request, 50))]
    (alone,) = only(Request, commands)
    assert (alone.module_id, alone.round, alone.requests_in_round) == ("blue", 0, 0)
    step(core, LearnerJoined("learner-red", "M", "red"))
    assert modules_by_round(only(Request, step(core, receipt(alone, 50)))) == [BOTH]


def test_no_round_goes_out_until_every_module_that_is_waited_for_has_learners() -> None:
    core = make(learners=("blue",))
    assert join(core) == []
    commands = step(core, LearnerJoined("learner-red", "L", "red"))
    assert set(modules_by_round(only(Request, commands))) == {BOTH}
    core = make(red={"waited_for": False}, learners=("blue",))
    assert set(modules_by_round(join(core))) == {("blue",)}


def test_a_module_that_fills_slowly_holds_up_nobody() -> None:
    """Of a game in which it rarely acts: its bound is given back with each receipt."""
    core = make(requests_per_runner=1)
    requests, made = join(core), dict.fromkeys(BOTH, 0)
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


def test_the_room_that_counts_is_that_of_each_module() -> None:
    requests = join(make(requests_per_runner=8), blue=100, red=10)
    assert modules_by_round(requests) == [BOTH, BOTH], "blue's budget is 200 steps"


@pytest.mark.parametrize("name", ["synchronous", "requests_per_runner", "num_runners"])
def test_what_is_the_same_for_all_modules_may_not_differ(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}"):
        make(red={name: 5}, learners=())


def test_a_runner_that_does_not_play_for_every_module_is_refused() -> None:
    core = make()
    with pytest.raises(ValueError, match="envrunner-0"):
        core.book(RunnerJoined("envrunner-0", "R", {"blue": 50}))
    assert core.num_runners == 0


# -- synchronous ----------------------------------------------------------------------------------


def test_a_synchronous_turn_asks_for_each_module_until_it_has_enough() -> None:
    core = make(red={"batch_size": 60}, synchronous=True, requests_per_runner=8)
    assert modules_by_round(join(core, blue=25, red=25)) == [BOTH, BOTH, BOTH, ("blue",)]


def test_every_module_updates_behind_a_synchronous_turn_and_waits_for_proceed() -> None:
    core = make(synchronous=True)
    requests = join(core)
    first, *others = requests
    commands = [each for request in others for each in step(core, receipt(request, 50))]
    assert commands == [], "one request is still out"
    updates = only(IssueUpdate, step(core, receipt(first, 50)))
    assert [update.module_id for update in updates] == list(BOTH)
    assert finish(core, updates[1], number=1) == []
    assert not core.between_turns, "the other one's update is still made"
    assert finish(core, updates[0], number=1) == []
    assert core.between_turns
    assert step(core, Proceed("blue")) == []
    assert modules_by_round(only(Request, step(core, Proceed("red")))) == [BOTH, BOTH]


def test_a_module_that_got_nothing_takes_part_in_the_next_synchronous_turn() -> None:
    core = make(synchronous=True)
    commands = [each for request in join(core) for each in step(core, _only_blue(request))]
    (update,) = only(IssueUpdate, commands)
    assert update.module_id == "blue"
    finish(core, update, number=1)
    assert core.between_turns, "it does not wait for red"
    requests = only(Request, step(core, Proceed("blue")))
    assert modules_by_round(requests) == [BOTH, BOTH]


def test_a_synchronous_turn_that_brought_nothing_at_all_is_followed_by_another() -> None:
    core = make(synchronous=True)
    commands = [each for request in join(core) for each in step(core, receipt(request, 0))]
    assert modules_by_round(only(Request, commands)) == [BOTH, BOTH]


def test_the_first_synchronous_turn_waits_for_every_modules_learners() -> None:
    core = make(synchronous=True, learners=("blue",))
    assert join(core) == []
    commands = step(core, LearnerJoined("learner-red", "L", "red"))
    assert modules_by_round(only(Request, commands)) == [BOTH, BOTH]


def _only_blue(request: Request) -> SampleReceived:
    return receipt(request, 50 if request.module_id == "blue" else 0)
