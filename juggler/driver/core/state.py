"""What the driver's core knows of one module."""

from __future__ import annotations

from dataclasses import dataclass, field

from juggler.driver.core.group import Group
from juggler.driver.core.ledger import Batch, Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSettings:
    """What bounds the requests and updates of one module."""

    batch_size: int
    """Live steps in one update, over all learners of the group."""

    max_open_updates: int
    """How many updates' worth of steps may be open at once. Asynchronous mode only."""

    requests_per_runner: int = 2
    """Rounds of requests that one runner may have and that are not reported in full. The same for
    all modules."""

    max_updates_in_flight: int = 2
    """Updates issued and not finished. Asynchronous mode only; the synchronous one has 1."""

    weights_interval: int = 1
    """Runners get the weights of updates whose numbers are multiples of it. In synchronous mode
    they get those of all."""

    num_learners: int = 1
    """The first group forms when so many have joined, or upon `BeginWithFewer`."""

    synchronous: bool = False
    """Sample, wait for all, update, wait. The same for all modules."""

    num_runners: int = 1
    """The first turn begins when so many runners have joined. Synchronous mode only; the same for
    all modules."""

    waited_for: bool = True
    """While this module has no room for more steps, no module asks for any. False: others ask
    without it, and the steps that it acts meanwhile are not recorded. Asynchronous mode only."""

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "max_open_updates",
            "requests_per_runner",
            "max_updates_in_flight",
            "weights_interval",
            "num_learners",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")


@dataclass(slots=True)
class State:
    """
    Attributes:
        updates: by update id, the shares of those learners that have not answered yet.
        between_turns: in synchronous mode, behind an update; `Proceed` ends it.
        has_begun: its first group of learners has formed.
    """

    settings: ModuleSettings
    group: Group
    ledger: Ledger
    updates: dict[int, dict[str, list[Batch]]] = field(default_factory=dict)
    between_turns: bool = False
    has_begun: bool = False
