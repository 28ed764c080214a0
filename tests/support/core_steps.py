"""Short ways to bring a driver core somewhere, event by event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import (
    Command,
    IssueUpdate,
    LearnerJoined,
    Request,
    RunnerJoined,
    SampleReceived,
    UpdateFinished,
    UsedBatch,
)
from juggler.driver.core.state import CoreSettings
from juggler.runtime.episodes.version import Version

C = TypeVar("C")


def make(learners: int = 1, **settings: Any) -> DriverCore:
    """A core whose group has formed: learner-0, learner-1, … of incarnation "L"."""
    defaults: dict[str, Any] = {"batch_size": 100, "max_open_updates": 2, "num_learners": learners}
    core = DriverCore(CoreSettings(**{**defaults, **settings}))
    for index in range(learners):
        core.handle(LearnerJoined(f"learner-{index}", "L"))
    return core


def only(kind: type[C], commands: Iterable[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def join(
    core: DriverCore, index: int = 0, steps: int = 50, incarnation: str = "R"
) -> list[Request]:
    return only(Request, core.handle(RunnerJoined(f"envrunner-{index}", incarnation, steps)))


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
