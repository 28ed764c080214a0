"""The driver core of a run that is to end after so many steps: nothing is made in vain."""

from __future__ import annotations

from random import Random

import pytest
from support.core_steps import answer, joined, only, receipt, step

from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    Command,
    Event,
    IssueUpdate,
    LearnerJoined,
    Request,
    RunnerJoined,
    UpdateFailed,
    UpdateFinished,
    UsedBatch,
)
from juggler.driver.core.ledger import Counters
from juggler.driver.core.state import ModuleSettings, ModuleStart
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version


def stopping(stop_steps: int, start: ModuleStart | None = None) -> DriverCore:
    """A core with a learner and a runner whose batches have 50 of the 100 steps of an update."""
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
    lost = UpdateFailed(update.update_id, "learner-0", "L", "lost")
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


class Lossy:
    """A run whose processes take their time, and lose a tenth of the batches and of what updates
    were to train on: up to three learners of up to two modules, and batches of any size."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.stop_steps = random.randint(1, 3000)
        self.pending: list[Command] = []
        self.made = 0
        names = ["a", "b"][: random.randint(1, 2)]
        settings = ModuleSettings(
            batch_size=random.choice((30, 100, 200)),
            max_open_updates=random.randint(1, 4),
            max_updates_in_flight=random.randint(1, 3),
            num_learners=random.randint(1, 3),
        )
        starts = {key: ModuleStart(settings) for key in names}
        self.core = DriverCore(starts, stop_steps=self.stop_steps)
        for key in names:
            for index in range(settings.num_learners):
                self._tell(LearnerJoined(f"learner-{key}{index}", "L", key))
        self.sizes = {key: random.choice((7, 60, 500)) for key in names}
        for index in range(random.randint(1, 5)):
            self._tell(RunnerJoined(f"envrunner-{index}", "R", self.sizes))

    def run(self) -> None:
        while not self.core.trained_enough:
            assert self.pending, "nobody has anything to do, and the run never ends"
            command = self.pending.pop(self.random.randrange(len(self.pending)))
            if isinstance(command, Request):
                live = self.random.randint(0, self.sizes[command.module_id])
                self._tell(receipt(command, live, self._lost()))
            elif isinstance(command, IssueUpdate):
                self._make(command)
            self.core.counters().check()

    def _tell(self, event: Event) -> None:
        core = self.core
        self.pending += core.book(event)
        under_way = core.trained + self._updating()
        updates = core.issue_updates()
        for update in only(IssueUpdate, updates):
            first = not core.has_updated and core.updates_in_flight == 1
            assert under_way < self.stop_steps or first, "an update in vain"
            held = core.modules[update.module_id].ledger.updating
            under_way += sum(held[i].steps for _, ids in update.shares for i in ids)
        self.pending += [*updates, *core.top_up()]

    def _updating(self) -> int:
        ledgers = [module.ledger for module in self.core.modules.values()]
        return sum(batch.steps for each in ledgers for batch in each.updating.values())

    def _make(self, update: IssueUpdate) -> None:
        self.made += 1
        steps = self.core.modules[update.module_id].ledger.updating
        version = Version(update.generation, self.made)
        for learner, ids in update.shares:
            used = tuple(UsedBatch(i, steps[i].steps, 0, self._lost()) for i in ids)
            name = update.module_id
            self._tell(UpdateFinished(update.update_id, learner, "L", version, used, name))

    def _lost(self) -> str:
        return "stale" if self.random.random() < 0.1 else ""


@pytest.mark.parametrize("seed", range(60))
def test_every_run_gets_to_its_last_step_and_ends_there_whatever_is_lost(seed: int) -> None:
    Lossy(seed).run()
