"""The driver core with several modules: rounds, who takes part in them, and what ends them."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from support.core_world import only, receipt, step

from juggler.driver.core.core_state import ModuleSettings, ModuleStart
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    Command,
    IssueUpdate,
    LearnerJoined,
    Request,
    RunnerJoined,
    UpdateFinished,
    UsedBatch,
)
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


def test_the_first_synchronous_turn_waits_for_every_modules_learners() -> None:
    core = make(synchronous=True, learners=("blue",))
    assert join(core) == []
    commands = step(core, LearnerJoined("learner-red", "L", "red"))
    assert modules_by_round(only(Request, commands)) == [BOTH, BOTH]
