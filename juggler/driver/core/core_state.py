"""The state of one module in the driver's core, and its beginning."""

from __future__ import annotations

from dataclasses import dataclass, field

from juggler.driver.core.group import Group
from juggler.driver.core.ledger import Counters, Ledger, OpenBatch
from juggler.runtime.episodes.version import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSettings:
    """Limits on the requests and updates of one module."""

    batch_size: int
    """Live steps in one update, over all learners of the group."""

    max_open_updates: int
    """Number of updates for which batches may be open at once (see `OpenBatchLimit`).
    Asynchronous mode only."""

    requests_per_runner: int = 2
    """Maximum number of rounds of one runner that are not reported in full. The same for all
    modules."""

    max_updates_in_flight: int = 2
    """Maximum number of updates in flight. Asynchronous mode only; synchronous mode has 1."""

    weights_interval: int = 1
    """Runners receive the weights of every update whose number is a multiple of it. In synchronous
    mode they receive the weights of every update."""

    num_learners: int = 1
    """Number of learners that the first group waits for, unless `StartWithFewer` comes."""

    synchronous: bool = False
    """Sample, wait for all, update, wait. The same for all modules."""

    num_runners: int = 1
    """Number of runners that the first turn waits for. Synchronous mode only; the same for
    all modules."""

    waited_for: bool = True
    """Whether sampling stops for all modules while this module has no room for more steps. False:
    sampling continues, and steps of this module are not collected. Asynchronous mode only."""

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


def shared_settings(settings: list[ModuleSettings]) -> ModuleSettings:
    """Return the settings that all modules have in common.

    Raises:
        ValueError: the modules differ in what must be the same for all.
    """
    first, *others = settings
    for name in ("synchronous", "requests_per_runner", "num_runners"):
        for other in others:
            if getattr(other, name) != getattr(first, name):
                raise ValueError(
                    f"{name} is {getattr(first, name)} for one module and {getattr(other, name)} "
                    "for another: must be the same for all modules"
                )
    return first


@dataclass(slots=True)
class CoreModuleState:
    """The state of one module, which admission reads.

    Attributes:
        updates: by update id, the shares of learners that have not answered yet.
        between_turns: in synchronous mode, an update is finished, and `StartNextTurn` is awaited.
        has_begun: its first group of learners has formed.
        late: it was added during training; the run does not wait for its first group.
    """

    settings: ModuleSettings
    group: Group
    ledger: Ledger
    updates: dict[int, dict[str, list[OpenBatch]]] = field(default_factory=dict)
    between_turns: bool = False
    has_begun: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class ModuleStart:
    """What one module of a run begins with.

    Attributes:
        settings: bounds its requests and updates.
        generation: of its learner group before the first one of this run.
        update: with `generation`, the minimum version of its learners' first weights.
        counters: its books so far; None: new ones.
        late: it is added during training; the run does not wait for its first group.
    """

    settings: ModuleSettings
    generation: int = 0
    update: int = 0
    counters: Counters | None = None
    late: bool = False

    def state(self) -> CoreModuleState:
        """Make the state that the module's core and admission update."""
        ledger = Ledger() if self.counters is None else Ledger.restore(self.counters)
        group = Group(self.settings.num_learners, self.generation)
        return CoreModuleState(self.settings, group, ledger, late=self.late)


@dataclass(frozen=True, slots=True)
class RemovedModules:
    """The sum over modules that are no longer trained.

    Attributes:
        counters: their books, in which nothing is in flight.
        version: the sums of the versions of their weights, which the run's version still counts.
    """

    counters: Counters = field(default_factory=lambda: Counters.sum([]))
    version: Version = field(default_factory=lambda: Version(0, 0))

    def and_of(self, counters: Counters, version: Version) -> RemovedModules:
        """Add one more module, whose steps in flight are lost."""
        restored = Ledger.restore(counters).counters()
        versions = self.version, version
        return RemovedModules(Counters.sum([self.counters, restored]), Version.of_run(versions))
