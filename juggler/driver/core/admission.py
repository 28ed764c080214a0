"""When a request may go out, to whom, and when an update: what sets the two modes apart."""

from __future__ import annotations

from collections import deque
from itertools import cycle
from typing import Protocol

from juggler.driver.core.group import Learner, worker_order
from juggler.driver.core.ledger import Batch
from juggler.driver.core.state import Runner, State


class Admission(Protocol):
    """Asked after every event, while the group has members: first for updates, then for requests.

    `next_update` and `next_request` are asked again until they give None.
    """

    def has_room(self, runner: Runner) -> None:
        """A runner joined or one of its requests came to an end."""

    def left(self, runner: Runner) -> None:
        """A runner is gone."""

    def next_update(self) -> dict[str, list[Batch]] | None:
        """Every member's share of an update, by rank."""

    def next_request(self) -> tuple[Runner, Learner] | None:
        """Who shall sample a batch, and for which learner."""


class Line:
    """Runners that may get a request, each once, served in turn."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._runners: deque[Runner] = deque()

    def join(self, runner: Runner) -> None:
        """Go to the end of the line, unless its cap is used up or it stands in line already."""
        cap = self._state.settings.requests_per_runner
        if not runner.in_line and len(runner.requested) < cap:
            runner.in_line = True
            self._runners.append(runner)

    def next(self) -> Runner | None:
        while self._runners:
            runner = self._runners.popleft()
            runner.in_line = False
            # Whoever left in the meantime still stands in the line.
            if self._state.runners.get(runner.worker.worker_id) is runner:
                return runner
        return None


class Asynchronous:
    """Requests are always in the air, so many that nothing gets older than it may.

    A learner of k consumes batch_size / k steps in each update, in order of arrival. While fewer
    than max_open_updates times as many are open for it, a further batch waits for
    max_open_updates - 1 updates at most. The bound is kept for each learner, not for their sum: a
    sum that is used up by the batches of one learner would leave another short of its share, and
    the run would stand.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._line = Line(state)

    def has_room(self, runner: Runner) -> None:
        self._line.join(runner)

    def left(self, runner: Runner) -> None:
        """Nothing to do: the line skips it."""

    def next_update(self) -> dict[str, list[Batch]] | None:
        settings, members = self._state.settings, self._state.group.members
        if len(self._state.updates) >= settings.max_updates_in_flight:
            return None
        share = settings.batch_size / len(members)
        if any(learner.held_steps < share for learner in members.values()):
            return None
        return {worker_id: _take(learner, share) for worker_id, learner in members.items()}

    def next_request(self) -> tuple[Runner, Learner] | None:
        settings, members = self._state.settings, self._state.group.members
        learner = min(members.values(), key=_open_steps)
        if learner.open_steps >= settings.max_open_updates * settings.batch_size / len(members):
            return None
        runner = self._line.next()
        return None if runner is None else (runner, learner)


class Synchronous:
    """Sample, wait for all, update, wait. Nothing depends on who is faster.

    A round asks the runners in order of their index, again and again, until all were asked once
    and the requests add up to batch_size. When every request was reported or lost, one update
    takes all batches, ordered by runner and then by request. If by then a learner has not got a
    single step, its share of the round is asked for anew. Behind each update the core waits for
    `Proceed`: the driver looks there whether the run is to stop, and takes checkpoints.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._line = Line(state)
        # By runner: the learners of those requests of the round that have not gone out yet.
        self._plan: dict[str, deque[Learner]] = {}
        self._begun = False  # who joins when must not change the first rounds

    def has_room(self, runner: Runner) -> None:
        if runner.worker.worker_id in self._plan:
            self._line.join(runner)

    def left(self, runner: Runner) -> None:
        self._plan.pop(runner.worker.worker_id, None)

    def next_update(self) -> dict[str, list[Batch]] | None:
        members = self._state.group.members
        if self._under_way() or not all(learner.held_steps for learner in members.values()):
            return None
        return {
            worker_id: sorted(_take_all(learner), key=_runner_and_sequence)
            for worker_id, learner in members.items()
        }

    def next_request(self) -> tuple[Runner, Learner] | None:
        self._begun = self._begun or len(self._state.runners) >= self._state.settings.num_runners
        if self._begun and not self._under_way():
            self._plan_round()
        runner = self._line.next()
        if runner is None:
            return None
        planned = self._plan[runner.worker.worker_id]
        learner = planned.popleft()
        if not planned:
            del self._plan[runner.worker.worker_id]
        members = self._state.group.members
        if members.get(learner.worker.worker_id) is not learner:  # it is gone
            learner = min(members.values(), key=_open_steps)
        return runner, learner

    def _under_way(self) -> bool:
        return bool(self._plan or self._state.ledger.requested or self._state.updates)

    def _plan_round(self) -> None:
        state = self._state
        members = state.group.members
        runners = [state.runners[name] for name in sorted(state.runners, key=worker_order)]
        planned = {learner: 0 for learner in members.values() if not learner.held_steps}
        goal = state.settings.batch_size * len(planned) / len(members)
        for requests, runner in enumerate(cycle(runners)):
            if requests >= max(len(runners), len(planned)) and sum(planned.values()) >= goal:
                break
            learner = min(planned, key=planned.__getitem__)
            planned[learner] += runner.steps_per_request
            self._plan.setdefault(runner.worker.worker_id, deque()).append(learner)
        for runner in runners:
            self._line.join(runner)


def _open_steps(learner: Learner) -> int:
    return learner.open_steps


def _runner_and_sequence(batch: Batch) -> tuple[tuple[str, int], int]:
    return worker_order(batch.runner.worker_id), batch.batch_id


def _take(learner: Learner, steps: float) -> list[Batch]:
    """The oldest batches that it holds, until they have so many steps."""
    share: list[Batch] = []
    taken = 0
    while taken < steps:
        batch = learner.take()
        share.append(batch)
        taken += batch.steps
    return share


def _take_all(learner: Learner) -> list[Batch]:
    return [learner.take() for _ in range(len(learner.held))]
