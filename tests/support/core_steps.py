"""Short ways to bring a driver core somewhere, event by event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    Command,
    Event,
    IssueUpdate,
    LearnerJoined,
    Request,
    RunnerJoined,
    SampleReceived,
    UpdateFinished,
    UsedBatch,
)
from juggler.driver.core.ledger import Ledger
from juggler.driver.core.state import ModuleSettings, ModuleStart
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version

C = TypeVar("C")


class OneModule(DriverCore):
    """The core of a run with one module, with what tests read of that module."""

    @property
    def ledger(self) -> Ledger:
        return self.modules[DEFAULT_MODULE].ledger

    @property
    def generation(self) -> int:
        return self.modules[DEFAULT_MODULE].generation


def one_module(
    settings: ModuleSettings, first_id: int = 1, generation: int = 0, update: int = 0
) -> OneModule:
    return OneModule({DEFAULT_MODULE: ModuleStart(settings, generation, update)}, first_id)


def step(core: DriverCore, event: Event) -> list[Command]:
    """What the driver's loop does for an event: all commands, in the order of the loop."""
    return [*core.book(event), *core.issue_updates(), *core.top_up()]


def make(learners: int = 1, **settings: Any) -> OneModule:
    """A core whose group has formed: learner-0, learner-1, … of incarnation "L"."""
    defaults: dict[str, Any] = {"batch_size": 100, "max_open_updates": 2, "num_learners": learners}
    core = one_module(ModuleSettings(**{**defaults, **settings}))
    for index in range(learners):
        step(core, LearnerJoined(f"learner-{index}", "L"))
    return core


def only(kind: type[C], commands: Iterable[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def joined(index: int = 0, steps: int = 50, incarnation: str = "R") -> RunnerJoined:
    """A runner of the one module."""
    return RunnerJoined(f"envrunner-{index}", incarnation, {DEFAULT_MODULE: steps})


def join(core: OneModule, index: int = 0, steps: int = 50, incarnation: str = "R") -> list[Request]:
    return only(Request, step(core, joined(index, steps, incarnation)))


def receipt(request: Request, steps: int = 50, dropped: str = "") -> SampleReceived:
    return SampleReceived(
        request.batch_id,
        request.runner,
        request.incarnation,
        request.learner,
        steps,
        request.at_least,
        dropped,
        module_id=request.module_id,
    )


def answer(update: IssueUpdate, learner: str, number: int, steps: int = 50) -> UpdateFinished:
    used = tuple(UsedBatch(i, steps, 0) for i in dict(update.shares)[learner])
    return UpdateFinished(update.update_id, learner, "L", Version(update.generation, number), used)
