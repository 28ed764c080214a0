"""Short ways to bring a driver core somewhere, event by event."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any, TypeVar

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
from juggler.driver.core.module_core import ModuleCore, ModuleStart
from juggler.driver.core.state import ModuleSettings
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version

C = TypeVar("C")


def module_core(
    settings: ModuleSettings, first_id: int = 1, generation: int = 0, update: int = 0
) -> ModuleCore:
    """One module's core, as a `DriverCore` makes it."""
    start = ModuleStart(settings, generation, update)
    return ModuleCore(DEFAULT_MODULE, start, count(first_id).__next__)


def step(core: ModuleCore, event: Event) -> list[Command]:
    """What the driver's loop does for an event: all commands, in the order of the loop."""
    return [*core.book(event), *core.issue_updates(), *core.requests()]


def make(learners: int = 1, **settings: Any) -> ModuleCore:
    """A core whose group has formed: learner-0, learner-1, … of incarnation "L"."""
    defaults: dict[str, Any] = {"batch_size": 100, "max_open_updates": 2, "num_learners": learners}
    core = module_core(ModuleSettings(**{**defaults, **settings}))
    for index in range(learners):
        step(core, LearnerJoined(f"learner-{index}", "L"))
    return core


def only(kind: type[C], commands: Iterable[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def join(
    core: ModuleCore, index: int = 0, steps: int = 50, incarnation: str = "R"
) -> list[Request]:
    return only(Request, step(core, RunnerJoined(f"envrunner-{index}", incarnation, steps)))


def receipt(request: Request, steps: int = 50, dropped: str = "") -> SampleReceived:
    return SampleReceived(
        request.batch_id,
        request.runner,
        request.incarnation,
        request.learner,
        steps,
        request.at_least,
        dropped,
    )


def answer(update: IssueUpdate, learner: str, number: int, steps: int = 50) -> UpdateFinished:
    used = tuple(UsedBatch(i, steps, 0) for i in dict(update.shares)[learner])
    return UpdateFinished(update.update_id, learner, "L", Version(update.generation, number), used)
