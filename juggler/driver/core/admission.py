"""Decides when requests and updates may go out, in both modes.

An EnvRunner plays for all modules at once. So requests go out in rounds: one request for each
module that takes part, all of them to the same EnvRunner, which plays once and answers each. A
module takes part while its group has members. A round goes out only once every module in it has
room: no request waits for another module's room, so modules cannot wait for each other in a circle.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from juggler.driver.core.core_state import CoreModuleState
from juggler.driver.core.group import GroupMember, worker_order
from juggler.driver.core.ledger import OpenBatch
from juggler.driver.core.runners import Runner, Runners
from juggler.driver.core.staleness import OpenBatchLimit


class Round(NamedTuple):
    """The EnvRunner that samples, and the learner of each module."""

    runner: Runner
    learners: Mapping[str, GroupMember]


class Admission(Protocol):
    """Decides on updates and rounds, after every event.

    `next_update` is called for each module, then `next_round`; each again until it returns None.
    """

    def has_room(self, runner: Runner) -> None:
        """A runner joined, or one of its rounds began or ended."""

    def left(self, runner: Runner) -> None:
        """A runner is gone."""

    def next_update(self, module: CoreModuleState) -> dict[str, list[OpenBatch]] | None:
        """Return the share of every member, by rank; None: not now."""

    def next_round(self) -> Round | None:
        """The next requests that may go out."""


class Asynchronous:
    """Keeps requests in flight, limited so that no batch becomes too old.

    A learner of k consumes batch_size / k steps in each update, or one larger batch, in order of
    arrival. While what is open for it is less than max_open_updates updates (see
    `OpenBatchLimit`), a further batch waits for max_open_updates - 1 updates at most. The bound is
    kept for each learner, not for their sum: if the batches of one learner used up a sum, another
    would have too little for its share, and the run would stop. Once everything requested is
    reported, each module either has room or can make an update, independently of the others.

    With `stop_steps`, the run makes no more updates than needed, and requests no more than one
    module could need for them.

    Leaving learners get no further requests. Updates use the batches that they still hold, at most
    a share each time, and wait for their open requests.

    Args:
        modules: by module id, in the order in which a round asks for them. They may come and go.
        runners: EnvRunners that may be asked.
        steps_left: returns the number of steps still to train on that are in no update yet.
    """

    def __init__(
        self,
        modules: Mapping[str, CoreModuleState],
        runners: Runners,
        steps_left: Callable[[], float],
    ) -> None:
        self._modules = modules
        self._runners = runners
        self._steps_left = steps_left

    def has_room(self, runner: Runner) -> None:
        self._runners.enqueue(runner)

    def left(self, runner: Runner) -> None:
        """Do nothing: the queue skips it."""

    def next_update(self, module: CoreModuleState) -> dict[str, list[OpenBatch]] | None:
        settings, members = module.settings, module.group.members
        if len(module.updates) >= settings.max_updates_in_flight or self._steps_left() <= 0:
            return None
        share = settings.batch_size / len(members)
        if any(learner.held_steps < share for learner in module.group.staying):
            return None
        if not all(learner.held_steps for learner in module.group.leaving):
            return None
        return {worker_id: _pop_steps(learner, share) for worker_id, learner in members.items()}

    def next_round(self) -> Round | None:
        if (left := self._steps_left()) <= 0:
            return None
        learners: dict[str, GroupMember] = {}
        for module_id, module in self._modules.items():
            settings, members = module.settings, module.group.members
            if not members:
                if settings.waited_for and not module.has_begun and not module.late:
                    return None
                continue
            learner = min(module.group.staying, key=_open_steps)
            if _has_room(module, learner) and _is_needed(module, learner, left):
                learners[module_id] = learner
            elif settings.waited_for:
                return None
        return self._round_with_room(learners) if learners else None

    def _round_with_room(self, learners: Mapping[str, GroupMember]) -> Round | None:
        """Assign the round to the first queued runner with these modules.

        A runner gets a new module some time after the run does.
        """
        passed_over: list[Runner] = []
        found: Round | None = None
        while found is None and (runner := self._runners.dequeue()) is not None:
            has = {key: learner for key, learner in learners.items() if key in runner.steps}
            if has:
                found = Round(runner, has)
            else:
                passed_over.append(runner)
        for each in passed_over:
            self._runners.enqueue(each)
        return found


class Synchronous:
    """Samples, waits for all, updates, waits: speed changes no result.

    A turn asks the runners in order of their index, again and again, until all were asked once
    and the requests add up to every module's batch_size. Each round is for all modules, since the
    agents of all of them act in it. When every request was reported or lost, each module whose
    learners all have something makes one update of all batches, ordered by runner and then by
    request. A module with too little keeps what it has for the next turn.
    Modules that share parts make their updates in the same turn: each waits until all can. After
    updates the core waits for `StartNextTurn`: the driver checks then whether the run should stop,
    and takes checkpoints. If no module could make an update, the next turn begins at once.

    Args:
        modules: by module id, in the order in which a round asks for them.
        runners: EnvRunners that may be asked.
        num_runners: number of runners that the first turn waits for; every module's group, too.
        together: groups of modules that share parts.
    """

    def __init__(
        self,
        modules: Mapping[str, CoreModuleState],
        runners: Runners,
        num_runners: int,
        together: Iterable[Sequence[str]] = (),
    ) -> None:
        self._modules = modules
        self._runners = runners
        self._num_runners = num_runners
        self._together = [[modules[module_id] for module_id in ids] for ids in together]
        # By runner: for rounds of the turn that have not gone out yet, the learners by module.
        self._plan: dict[str, deque[dict[str, GroupMember]]] = {}
        self._begun = False  # the order of joining must not change the first turns

    def has_room(self, runner: Runner) -> None:
        if runner.worker.worker_id in self._plan:
            self._runners.enqueue(runner)

    def left(self, runner: Runner) -> None:
        self._plan.pop(runner.worker.worker_id, None)

    def next_update(self, module: CoreModuleState) -> dict[str, list[OpenBatch]] | None:
        members = module.group.members
        if self._sampling() or module.updates or module.between_turns:
            return None
        groups = (group for group in self._together if any(each is module for each in group))
        if not all(each.updates or _has_enough(each) for each in next(groups, [module])):
            return None
        return {
            worker_id: sorted(_pop_all(learner), key=_runner_and_sequence)
            for worker_id, learner in members.items()
        }

    def next_round(self) -> Round | None:
        if not self._begun:
            enough = len(self._runners) >= self._num_runners
            self._begun = enough and all(each.has_begun for each in self._modules.values())
        if self._begun and not self._sampling() and not self._updating():
            self._plan_turn()
        while (runner := self._runners.dequeue()) is not None:
            planned = self._plan[runner.worker.worker_id]
            learners = self._still_there(planned.popleft())
            if not planned:
                del self._plan[runner.worker.worker_id]
            if learners:
                return Round(runner, learners)
            self.has_room(runner)
        return None

    def _sampling(self) -> bool:
        return bool(self._plan) or any(each.ledger.requested for each in self._modules.values())

    def _updating(self) -> bool:
        return any(each.updates or each.between_turns for each in self._modules.values())

    def _plan_turn(self) -> None:
        runners = self._runners.in_order()
        shares = [
            _ModuleTurn(module_id, each)
            for module_id, each in self._modules.items()
            if each.group.members
        ]
        for asked in count() if runners else ():
            if not any(share.is_short(asked, len(runners)) for share in shares):
                break
            runner = runners[asked % len(runners)]
            learners = {share.module_id: share.assign(runner) for share in shares}
            self._plan.setdefault(runner.worker.worker_id, deque()).append(learners)
        for runner in runners:
            self.has_room(runner)

    def _still_there(self, planned: Mapping[str, GroupMember]) -> dict[str, GroupMember]:
        """Replace learners that are gone; leave out modules without learners."""
        learners: dict[str, GroupMember] = {}
        for module_id, learner in planned.items():
            members = self._modules[module_id].group.members
            if members.get(learner.worker.worker_id) is learner:
                learners[module_id] = learner
            elif members:
                learners[module_id] = min(members.values(), key=_open_steps)
        return learners


class _ModuleTurn:
    """One module's share of a turn that is being planned."""

    def __init__(self, module_id: str, module: CoreModuleState) -> None:
        self.module_id = module_id
        members = module.group.members.values()
        self._planned = {learner: learner.held_steps for learner in members}
        self._lack = sum(not learner.held_steps for learner in members)
        self._goal = module.settings.batch_size

    def is_short(self, asked: int, runners: int) -> bool:
        """Whether the module needs round number `asked` of this turn."""
        if not self._lack:
            return False
        return asked < max(runners, self._lack) or sum(self._planned.values()) < self._goal

    def assign(self, runner: Runner) -> GroupMember:
        """The learner that gets the runner's next batch."""
        learner = min(self._planned, key=self._planned.__getitem__)
        self._planned[learner] += runner.steps[self.module_id]
        return learner


def _has_enough(module: CoreModuleState) -> bool:
    """Whether all learners hold batches, and none waits to join."""
    members, joiners = module.group.members.values(), module.group.joiners
    return bool(members) and not joiners and all(learner.held_steps for learner in members)


def _has_room(module: CoreModuleState, learner: GroupMember) -> bool:
    settings = module.settings
    room = OpenBatchLimit(settings.max_open_updates, settings.batch_size, len(module.group.members))
    return room.is_left(learner.open_batches, learner.open_steps)


def _is_needed(module: CoreModuleState, learner: GroupMember, left: float) -> bool:
    """Whether the remaining updates can use more than this learner already has.

    Steps that it holds and steps that were requested for it both count. `left` is the number of
    steps that the run still trains on.
    """
    batch_size = module.settings.batch_size
    to_come = learner.open_steps - learner.updating_steps
    return left == math.inf or (
        to_come * len(module.group.members) < batch_size * math.ceil(left / batch_size)
    )


def _open_steps(learner: GroupMember) -> int:
    return learner.open_steps


def _runner_and_sequence(batch: OpenBatch) -> tuple[tuple[str, int], int]:
    return worker_order(batch.runner.worker_id), batch.batch_id


def _pop_steps(learner: GroupMember, steps: float) -> list[OpenBatch]:
    """Take its oldest batches, up to `steps` steps."""
    share: list[OpenBatch] = []
    taken = 0
    while taken < steps and learner.held:
        batch = learner.pop()
        share.append(batch)
        taken += batch.steps
    return share


def _pop_all(learner: GroupMember) -> list[OpenBatch]:
    return [learner.pop() for _ in range(len(learner.held))]
