"""The driver's core: events in, commands out, without clock, threads or I/O."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from juggler.driver.core import events
from juggler.driver.core.admission import Admission, Asynchronous, Synchronous
from juggler.driver.core.core_state import ModuleStart, RemovedModules, shared_settings
from juggler.driver.core.events import WorkerKey
from juggler.driver.core.ledger import Counters
from juggler.driver.core.module_core import ModuleCore
from juggler.driver.core.runners import Runners
from juggler.runtime.episodes.version import Version


class DriverCore:
    """Keeps runners and learners busy, and keeps the books of every module.

    Every module has books, its group of learners and its staleness budget. Runners are shared:
    each plays for all modules at once, and is asked in rounds; see `admission`. In asynchronous
    mode, modules may come and go: `add`, then `TrainingEnds` and `forget`.

    Args:
        modules: what each begins with, by module id; at least one.
        first_id: of batches and updates; a resumed run passes its former `next_id`.
        together: groups of modules that share parts, and so have the same learners.
        past: books of modules that were trained before.
        stop_steps: number of steps to train on; None: no limit.

    Attributes:
        modules: by module id.
        next_id: of the next batch or update.
        past: books of removed modules.
        updates_before: updates of the weights when this process began.

    Raises:
        ValueError: the modules differ in what must be the same for all.
    """

    def __init__(
        self,
        modules: Mapping[str, ModuleStart],
        first_id: int = 1,
        together: Iterable[Sequence[str]] = (),
        past: RemovedModules | None = None,
        stop_steps: int | None = None,
    ) -> None:
        self.next_id = first_id
        self.past = past or RemovedModules()
        self._shared = shared_settings([start.settings for start in modules.values()])
        self._runners = Runners(self._shared.requests_per_runner)
        self._states = {module_id: start.state() for module_id, start in modules.items()}
        together = [tuple(ids) for ids in together]
        self._stop_steps = stop_steps
        self._admission: Admission
        if (shared := self._shared).synchronous:
            self._admission = Synchronous(self._states, self._runners, shared.num_runners, together)
        else:
            self._admission = Asynchronous(self._states, self._runners, self._steps_left)
        # Late reports name incarnations and modules that are gone.
        self._learners: dict[str, WorkerKey] = {}  # the current incarnation, by id
        self._gone: set[WorkerKey] = set()  # learners that are gone, or were asked to leave
        self._forgotten: set[str] = set()  # modules
        self._stopping = False
        self.modules = {
            module_id: self._module_core(module_id, start) for module_id, start in modules.items()
        }
        shares = {module_id: ids for ids in together for module_id in ids}
        groups = dict.fromkeys(shares.get(module_id, (module_id,)) for module_id in modules)
        self._together = [[self.modules[each] for each in ids] for ids in groups]
        self.updates_before = self.updates

    def add(self, module_id: str, start: ModuleStart) -> None:
        """Train another module from now on.

        Runners take part when `RunnerPlays` reports that they have the module.

        Raises:
            ValueError: the run has or had a module of this id, it is synchronous, or the module
                differs in what must be the same for all.
        """
        if module_id in self.modules or module_id in self._forgotten:
            raise ValueError(f"a module {module_id!r} is or was in this run: use a new id")
        if self._shared.synchronous:
            raise ValueError("modules of a synchronous run have to be there from its start")
        shared_settings([self._shared, start.settings])
        self._states[module_id] = start.state()
        self.modules[module_id] = self._module_core(module_id, start)
        self._together.append([self.modules[module_id]])

    def forget(self, module_id: str) -> None:
        """Close the books of a settled module.

        Later reports of it are ignored.
        """
        module = self.modules.pop(module_id)
        module.book(events.Finish())
        self.past = self.past.and_of(module.ledger.counters(), module.weights_version)
        self._forgotten.add(module_id)
        for group in self._together:
            group[:] = [each for each in group if each is not module]
        self._together = [group for group in self._together if group]
        for runner in self._runners.in_order():
            runner.steps.pop(module_id, None)

    def past_and(self, beside: Container[str]) -> RemovedModules:
        """Return the books of removed modules, and of modules not among these."""
        past = self.past
        for module_id, module in self.modules.items():
            if module_id not in beside:
                past = past.and_of(module.ledger.counters(), module.weights_version)
        return past

    def book(self, event: events.Event) -> list[events.Command]:
        """Book an event, and return the commands to send, in order.

        Raises:
            ValueError: it names a module that the run has never had.
        """
        match event:
            case events.RunnerPlays():
                self._runner_plays(event)
                return []
            case events.RunnerJoined():
                self._runner_joined(event)
                return []
            case events.RunnerLeft():
                self._runner_left(WorkerKey(event.runner, event.incarnation), event.not_begun)
                return []
            case events.LearnerJoined():
                return self._learner_joined(event)
            # A process may host several modules, so all of them learn about it.
            case events.LearnerLeaves() | events.LearnerLeft():
                self._gone.add(WorkerKey(event.learner, event.incarnation))
                return self._book_everywhere(event)
            case events.StopRequested() | events.Finish():
                self._stopping = True
                return self._book_everywhere(event)
            case _ if event.module_id in self._forgotten:
                return []
            case _:
                if isinstance(event, events.TrainingEnds):
                    self._states.pop(event.module_id, None)  # no further requests
                return self.module(event.module_id).book(event)

    def issue_updates(self) -> list[events.Command]:
        """Issue all updates that learners can make now, with changes of groups."""
        modules = self.modules.values()
        admitted = [command for group in self._together for command in _admitted(group)]
        parted = [command for each in modules for command in each.remove_leaving()]
        updates = [command for each in modules for command in each.issue_updates()]
        return admitted + parted + updates

    def top_up(self) -> list[events.Request]:
        """Return requests for all the room there is."""
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
        """Return a module that the run trains.

        Raises:
            ValueError: the run does not have it.
        """
        if module_id not in self.modules:
            known = ", ".join(self.modules)
            raise ValueError(f"there is no module {module_id[:100]!r} in this run: it has {known}")
        return self.modules[module_id]

    def in_checkpoints(self, needed: Container[str] = ()) -> list[ModuleCore]:
        """The modules whose states belong in a checkpoint.

        They are all but added modules that had no learner yet, and modules whose training has
        ended.

        Args:
            needed: modules to include although their training has ended, while they have learners.
        """
        found = []
        for module_id, module in self.modules.items():
            state = self._states.get(module_id)
            if state is None:
                has_state = module_id in needed and bool(module.members)
            else:
                has_state = state.has_begun or not state.late
            if has_state:
                found.append(module)
        return found

    @property
    def settled(self) -> list[str]:
        """The modules whose training has ended, with nothing in flight."""
        return [
            module_id
            for module_id, module in self.modules.items()
            if module_id not in self._states and module.idle and not module.ledger.requested
        ]

    # Over all modules.

    @property
    def idle(self) -> bool:
        """No update is in flight."""
        return all(module.idle for module in self.modules.values())

    @property
    def between_turns(self) -> bool:
        """In synchronous mode: all updates are finished, and `StartNextTurn` is awaited."""
        return self.idle and any(module.between_turns for module in self.modules.values())

    @property
    def members(self) -> tuple[str, ...]:
        """The learners of all groups, each once."""
        names = (name for module in self.modules.values() for name in module.members)
        return tuple(dict.fromkeys(names))

    @property
    def weights_version(self) -> Version:
        """The version of the run; with one module, that module's."""
        versions = [module.weights_version for module in self.modules.values()]
        return Version.of_run([*versions, self.past.version])

    @property
    def updates(self) -> int:
        """Number of updates over the whole run."""
        return self.weights_version.update

    @property
    def trained(self) -> int:
        """Live steps that were trained on."""
        now = sum(module.ledger.trained for module in self.modules.values())
        return now + self.past.counters.trained

    @property
    def has_updated(self) -> bool:
        """Whether weights are newer than when this process began."""
        return self.updates > self.updates_before

    @property
    def trained_enough(self) -> bool:
        """Whether `stop_steps` is reached.

        A resumed run makes an update first: workers that wait for weights learn from it that they
        may leave.
        """
        enough = self._stop_steps is not None and self.trained >= self._stop_steps
        return enough and self.has_updated

    def _steps_left(self) -> float:
        """Number of steps to train on that no update has yet."""
        if self._stop_steps is None:
            return math.inf
        updating = sum(module.updating_steps for module in self.modules.values())
        left = self._stop_steps - self.trained - updating
        return left if left > 0 or self.has_updated or not self.idle else 1

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
        """Live steps in the held batches."""
        return sum(module.held_steps for module in self.modules.values())

    @property
    def missing_learners(self) -> int:
        """Number of learners that first groups still wait for."""
        return sum(module.missing_learners for module in self.modules.values())

    @property
    def num_runners(self) -> int:
        return len(self._runners)

    def counters(self) -> Counters:
        """The books of all modules together."""
        now = [module.ledger.counters() for module in self.modules.values()]
        return Counters.sum([*now, self.past.counters])

    def _module_core(self, module_id: str, start: ModuleStart) -> ModuleCore:
        state = self._states[module_id]
        return ModuleCore(module_id, start, state, self._admission, self._runners, self._take_id)

    def _take_id(self) -> int:
        taken = self.next_id
        self.next_id += 1
        return taken

    def _runner_joined(self, event: events.RunnerJoined) -> None:
        offered, known = event.steps_per_request, {*self.modules, *self._forgotten}
        at_first = {key for key, state in self._states.items() if not state.late}
        if not at_first <= offered.keys() <= known:
            plays, ours = ", ".join(offered), ", ".join(self.modules)
            raise ValueError(f"{event.runner} plays for {plays[:100]}; the run's modules: {ours}")
        worker = WorkerKey(event.runner, event.incarnation)
        if self._runners.has_seen(worker):
            return
        if (before := self._runners.named(event.runner)) is not None:  # it is gone
            self._runner_left(before.worker)
        has = {key: steps for key, steps in offered.items() if key in self.modules}
        self._admission.has_room(self._runners.join(worker, has))

    def _runner_plays(self, event: events.RunnerPlays) -> None:
        runner = self._runners.find(WorkerKey(event.runner, event.incarnation))
        if runner is not None and event.module_id in self.modules:
            runner.steps[event.module_id] = event.steps_per_request
            self._admission.has_room(runner)

    def _learner_joined(self, event: events.LearnerJoined) -> list[events.Command]:
        worker = WorkerKey(event.learner, event.incarnation)
        if worker in self._gone or event.module_id in self._forgotten:
            return []
        module = self.module(event.module_id)
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
    """Admit the learners that wait for these modules, which share parts.

    They join all of the modules at once. Otherwise an update of a module that they have not joined
    would change the shared parts at the other learners only.
    """
    if len({module.admissible for module in modules}) > 1:
        return []
    return [command for module in modules for command in module.admit()]
