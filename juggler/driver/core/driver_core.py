"""The driver's core: events in, commands out. No clock, no threads, no input or output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from juggler.driver.core import events
from juggler.driver.core.admission import Admission, Asynchronous, Synchronous
from juggler.driver.core.events import WorkerKey
from juggler.driver.core.ledger import Counters
from juggler.driver.core.module_core import ModuleCore, ModuleStart
from juggler.driver.core.runners import Runners
from juggler.driver.core.state import ModuleSettings, State
from juggler.runtime.episodes.version import Version


class DriverCore:
    """Keeps runners and learners busy, and the books of what they did, module by module.

    Every module has books, a group of learners and a staleness budget of its own. Runners are
    shared: each plays for all modules at once, and is asked in rounds; see `admission`.

    Args:
        modules: what each begins with, by module id; at least one.
        first_id: of batches and updates; a run that goes on passes the `next_id` it had got to.
        together: groups of modules that share parts, and so have the same learners.

    Attributes:
        modules: by module id.
        next_id: of the next batch or update.

    Raises:
        ValueError: the modules differ in what must be the same for all.
    """

    def __init__(
        self,
        modules: Mapping[str, ModuleStart],
        first_id: int = 1,
        together: Iterable[Sequence[str]] = (),
    ) -> None:
        self.next_id = first_id
        shared = _shared_settings([start.settings for start in modules.values()])
        self._runners = Runners(shared.requests_per_runner)
        states = {module_id: start.state() for module_id, start in modules.items()}
        together = [tuple(ids) for ids in together]
        self._admission = _admission(shared, states, self._runners, together)
        self._learners: dict[str, WorkerKey] = {}  # whoever has an id now
        self._gone: set[WorkerKey] = set()  # learners
        self._stopping = False
        self.modules = {
            module_id: ModuleCore(
                module_id,
                start,
                states[module_id],
                self._admission,
                self._runners,
                self._take_id,
            )
            for module_id, start in modules.items()
        }
        shares = {module_id: ids for ids in together for module_id in ids}
        groups = dict.fromkeys(shares.get(module_id, (module_id,)) for module_id in modules)
        self._together = [[self.modules[each] for each in ids] for ids in groups]

    def book(self, event: events.Event) -> list[events.Command]:
        """Book what happened. Returns what has to be sent because of it, in this order.

        Raises:
            ValueError: it names a module that the run does not have, or lacks one.
        """
        match event:
            case events.RunnerJoined():
                self._runner_joined(event)
                return []
            case events.RunnerLeft():
                self._runner_left(WorkerKey(event.runner, event.incarnation), event.not_begun)
                return []
            case events.LearnerJoined():
                return self._learner_joined(event)
            case events.LearnerLeft():
                self._gone.add(WorkerKey(event.learner, event.incarnation))
                return self._book_everywhere(event)
            case events.StopRequested() | events.Finish():
                self._stopping = True
                return self._book_everywhere(event)
            case _:
                return self.module(event.module_id).book(event)

    def issue_updates(self) -> list[events.Command]:
        """Every update that learners can make now, and the groups that are to make them."""
        admitted = [command for group in self._together for command in _admitted(group)]
        return admitted + [
            command for each in self.modules.values() for command in each.issue_updates()
        ]

    def top_up(self) -> list[events.Request]:
        """Requests wherever there is room for more steps."""
        return list(self._requests())

    def _requests(self) -> Iterator[events.Request]:
        while not self._stopping and (asked := self._admission.next_round()) is not None:
            runner, learners = asked
            number, requests = self.next_id, len(learners)
            runner.rounds[number] = requests
            for module_id, learner in learners.items():
                yield self.modules[module_id].request(runner, learner, number, requests)
            self._admission.has_room(runner)

    def module(self, module_id: str) -> ModuleCore:
        """
        Raises:
            ValueError: the run does not have it.
        """
        if module_id not in self.modules:
            known = ", ".join(self.modules)
            raise ValueError(f"there is no module {module_id[:100]!r} in this run: it has {known}")
        return self.modules[module_id]

    # Over all modules.

    @property
    def idle(self) -> bool:
        """No update is in flight."""
        return all(module.idle for module in self.modules.values())

    @property
    def between_turns(self) -> bool:
        """In synchronous mode: updates were made, all are finished, and `Proceed` is awaited."""
        return self.idle and any(module.between_turns for module in self.modules.values())

    @property
    def members(self) -> tuple[str, ...]:
        """The learners of all groups, each once."""
        names = (name for module in self.modules.values() for name in module.members)
        return tuple(dict.fromkeys(names))

    @property
    def weights_version(self) -> Version:
        """The version of the run; with one module, that module's."""
        return Version.of_run(module.weights_version for module in self.modules.values())

    @property
    def updates(self) -> int:
        """That weights have had, over the whole run."""
        return sum(module.weights_version.update for module in self.modules.values())

    @property
    def trained(self) -> int:
        """Live steps that were trained on."""
        return sum(module.ledger.trained for module in self.modules.values())

    @property
    def requests_in_flight(self) -> int:
        return sum(len(module.ledger.requested) for module in self.modules.values())

    @property
    def updates_in_flight(self) -> int:
        return sum(module.updates_in_flight for module in self.modules.values())

    @property
    def held_batches(self) -> int:
        """Batches that wait at learners."""
        return sum(len(module.ledger.held) for module in self.modules.values())

    @property
    def held_steps(self) -> int:
        """Steps in them."""
        return sum(module.held_steps for module in self.modules.values())

    @property
    def missing_learners(self) -> int:
        """How many have yet to come before the first of their group begin."""
        return sum(module.missing_learners for module in self.modules.values())

    @property
    def num_runners(self) -> int:
        return len(self._runners)

    def counters(self) -> Counters:
        """The books of all modules together."""
        return Counters.sum(module.ledger.counters() for module in self.modules.values())

    def _take_id(self) -> int:
        taken = self.next_id
        self.next_id += 1
        return taken

    def _runner_joined(self, event: events.RunnerJoined) -> None:
        if event.steps_per_request.keys() != self.modules.keys():
            told, known = ", ".join(event.steps_per_request), ", ".join(self.modules)
            raise ValueError(f"{event.runner} plays for {told[:100]}; the run's modules: {known}")
        worker = WorkerKey(event.runner, event.incarnation)
        if self._runners.knew(worker):
            return
        if (before := self._runners.named(event.runner)) is not None:  # it is gone
            self._runner_left(before.worker)
        self._admission.has_room(self._runners.join(worker, event.steps_per_request))

    def _learner_joined(self, event: events.LearnerJoined) -> list[events.Command]:
        module, worker = self.module(event.module_id), WorkerKey(event.learner, event.incarnation)
        if worker in self._gone:
            return []
        before = self._learners.get(event.learner, worker)
        self._learners[event.learner] = worker
        commands: list[events.Command] = []
        if before != worker:  # it is gone, with all the modules that it had
            commands += self.book(events.LearnerLeft(*before, "replaced"))
        return commands + module.book(event)

    def _book_everywhere(self, event: events.OfEveryModule) -> list[events.Command]:
        return [command for each in self.modules.values() for command in each.book(event)]

    def _runner_left(self, worker: WorkerKey, not_begun: frozenset[int] = frozenset()) -> None:
        if (runner := self._runners.leave(worker)) is not None:
            self._admission.left(runner)
            for module in self.modules.values():
                module.lose_runner(worker, not_begun)


def _admitted(modules: Sequence[ModuleCore]) -> list[events.Command]:
    """Let in the learners that wait for these modules, which share parts, to all of them at once.

    Else updates of a module that they are not in yet would change the parts at the others alone.
    """
    if len({module.admissible for module in modules}) > 1:
        return []
    return [command for module in modules for command in module.admit()]


def _shared_settings(settings: list[ModuleSettings]) -> ModuleSettings:
    """
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


def _admission(
    settings: ModuleSettings,
    states: Mapping[str, State],
    runners: Runners,
    together: Iterable[Sequence[str]],
) -> Admission:
    if settings.synchronous:
        return Synchronous(states, runners, settings.num_runners, together)
    return Asynchronous(states, runners)
