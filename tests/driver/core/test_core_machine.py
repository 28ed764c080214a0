"""The driver core among workers that die, join and answer late."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.core_world import LEARNERS_OF_A_MODULE, World

from juggler.driver.core.core_state import ModuleSettings
from juggler.driver.core.events import (
    Finish,
    IssueUpdate,
    PeersMet,
    RebuildGroup,
    Request,
    StartWithFewer,
    StopRequested,
)

_FEW = st.integers(0, 3)
_ANY = st.integers(0, 10_000)
_SHARES = st.sampled_from([0.0, 0.5, 1.0, 1.0])  # of a request's steps that turn out to be live


class CoreMachine(RuleBasedStateMachine):
    """Asynchronous; a subclass makes it synchronous."""

    synchronous = False

    @initialize(
        batch_size=st.sampled_from([1, 12, 30]),
        max_open_updates=st.integers(1, 3),
        cap=st.integers(1, 3),
        updates=st.integers(1, 2),
        interval=st.integers(1, 3),
        learners=st.integers(1, 3),
        modules=st.integers(1, 2),
        waited_for=st.booleans(),
        events=st.integers(1, 3),
        steps=st.lists(st.integers(1, 16), min_size=1, max_size=3),
    )
    def begin(
        self,
        batch_size: int,
        max_open_updates: int,
        cap: int,
        updates: int,
        interval: int,
        learners: int,
        modules: int,
        waited_for: bool,
        events: int,
        steps: list[int],
    ) -> None:
        settings = ModuleSettings(
            batch_size=batch_size,
            max_open_updates=max_open_updates,
            requests_per_runner=cap,
            max_updates_in_flight=updates,
            weights_interval=1 if self.synchronous else interval,
            num_learners=learners,
            synchronous=self.synchronous,
        )
        # The second module's updates come at another pace than the first one's.
        other = replace(
            settings,
            batch_size=2 * batch_size,
            num_learners=1 + learners % 3,
            waited_for=waited_for,
        )
        self.world = World(dict([("first", settings), ("second", other)][:modules]), events)
        for index, count in enumerate(steps):
            self.world.start_runner(index, count)
        for first, each in self._first_learners():
            for index in range(each.num_learners):
                self.world.start_learner(first + index)

    def _first_learners(self) -> list[tuple[int, ModuleSettings]]:
        """Of each module: the index of its first learner, and its settings."""
        return [
            (LEARNERS_OF_A_MODULE * number, self.world.settings[module_id])
            for number, module_id in enumerate(self.world.first)
        ]

    @rule(index=_FEW, steps=st.integers(1, 16))
    def a_runner_joins(self, index: int, steps: int) -> None:
        if f"envrunner-{index}" in self.world.runners:
            self.world.kill(f"envrunner-{index}", survivors=index)
        self.world.start_runner(index, steps)

    @rule(which=st.integers(0, 9))
    def a_learner_joins(self, which: int) -> None:
        index = which % (LEARNERS_OF_A_MODULE * len(self.world.first) + 2)
        if f"learner-{index}" not in self.world.learners:
            self.world.start_learner(index)

    @rule(which=_ANY, survivors=_FEW)
    def a_runner_dies(self, which: int, survivors: int) -> None:
        if self.world.runners:
            self.world.kill(_pick(self.world.runners, which), survivors)

    @rule(which=_ANY, survivors=_FEW, again=st.booleans())
    def a_learner_dies(self, which: int, survivors: int, again: bool) -> None:
        if self.world.learners:
            worker_id = _pick(self.world.learners, which)
            self.world.kill(worker_id, survivors)
            if again:
                self.world.start_learner(int(worker_id[-1]))

    @rule(which=_ANY)
    def a_learner_is_to_leave(self, which: int) -> None:
        if self.world.learners and not self.synchronous:
            self.world.let_go(_pick(self.world.learners, which))

    @rule(which=_ANY, survivors=_FEW, again=st.booleans())
    def a_learner_is_cut_off(self, which: int, survivors: int, again: bool) -> None:
        if self.world.learners:
            worker_id = _pick(self.world.learners, which)
            self.world.lose(worker_id, survivors)
            if again:
                self.world.start_learner(int(worker_id[-1]))

    @rule(module=_ANY)
    def those_that_are_late_are_waited_for_no_longer(self, module: int) -> None:
        self.world.deliver(StartWithFewer(_pick(self.world.books, module)))

    @rule(number=_FEW)
    def a_module_is_added(self, number: int) -> None:
        if not self.synchronous and len(self.world.added) < 2:
            self.world.add_module(number % len(self.world.first))

    @rule(module=_ANY)
    def a_module_that_was_added_is_removed(self, module: int) -> None:
        if self.world.added:
            self.world.remove_module(_pick(self.world.added, module))

    @rule(past=st.integers(0, 1), module=_ANY)
    def learners_lose_each_other(self, past: int, module: int) -> None:
        module_id = _pick(self.world.books, module)
        generation = self.world.books[module_id].generation
        self.world.deliver(RebuildGroup(max(0, generation - past), module_id))

    @rule(module=_ANY)
    def learners_meet(self, module: int) -> None:
        module_id = _pick(self.world.books, module)
        books = self.world.books[module_id]
        update = books.core.weights_version.update
        self.world.deliver(PeersMet(books.generation, update, module_id))

    @rule(
        which=_ANY,
        share=_SHARES,
        outcome=st.sampled_from(["sent", "sent", "sent", "failed", "refused", "learner_lost"]),
    )
    def a_runner_samples(self, which: int, share: float, outcome: str) -> None:
        busy = [name for name, runner in self.world.runners.items() if runner.requests]
        if busy:
            worker_id = _pick(busy, which)
            self.world.sample(worker_id, share, outcome)

    @rule(which=_ANY, outcome=st.sampled_from(["stale", "nonfinite", "forgotten", "failed"]))
    def a_learner_works_with_trouble(self, which: int, outcome: str) -> None:
        busy = [name for name, learner in self.world.learners.items() if learner.commands]
        if busy:
            self.world.work(_pick(busy, which), outcome)

    @rule(share=_SHARES)
    def everybody_works(self, share: float) -> None:
        for worker_id, runner in self.world.runners.items():
            while runner.requests:
                self.world.sample(worker_id, share, "sent")
        for worker_id, learner in self.world.learners.items():
            while learner.commands:
                self.world.work(worker_id, "trained")

    @rule(order=st.randoms(), late=_FEW)
    def messages_come(self, order: Random, late: int) -> None:
        order.shuffle(self.world.pending)
        while len(self.world.pending) > late:
            self.world.deliver_next()
            self.world.check()

    @rule(order=st.randoms(), turns=_FEW)
    def a_while_goes_by(self, order: Random, turns: int) -> None:
        for _ in range(turns):
            self.everybody_works(1.0)
            self.messages_come(order, late=1)

    @rule(which=_ANY)
    def a_message_comes_again(self, which: int) -> None:
        self.world.duplicate(which)

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Continue without faults from any state, to the end of the run."""
        if not hasattr(self, "world"):
            return
        world = self.world
        if not world.runners:
            world.start_runner(0, 5)
        while world.pending:
            world.deliver_next()
        world.turn()
        for (first, each), module_id in zip(self._first_learners(), world.first, strict=True):
            books = [world.books[module_id]]
            books += [
                world.books[key] for key, n in world.added.items() if world.first[n] == module_id
            ]
            for index in range(first, first + each.num_learners):
                if not all(b.group for b in books) and not world.stays(f"learner-{index}"):
                    world.start_learner(index)
                    world.turn()
        staying = [key for key, books in world.books.items() if not books.leaves]
        world.run(until_updates=5, modules=staying)
        for module_id in list(world.added):
            world.remove_module(module_id)
        world.run(until_updates=3, modules=world.first)
        assert not any(books.leaving() for books in world.books.values()), "it could have left"
        assert not world.added, "a worker to be released is not settled"
        _others_go_on_without_the_first(world)
        _end(world)


def _others_go_on_without_the_first(world: World) -> None:
    """All learners of one module die; other modules do not notice."""
    first, *others = world.books
    if not others:
        return
    for worker_id, learner in list(world.learners.items()):
        if first in learner.versions:
            world.kill(worker_id, survivors=0)
    while world.pending:
        world.deliver_next()
    for number, module_id in enumerate(others, start=1):
        if not world.books[module_id].group:  # learners of both modules were its last
            world.start_learner(number * LEARNERS_OF_A_MODULE)
    made = world.books[first].updates_closed()
    world.run(until_updates=5, modules=others)
    assert (
        world.books[first].updates_closed() - made <= world.settings[first].max_updates_in_flight
    ), "the ones in flight when it died"


def _end(world: World) -> None:
    commands = world.deliver(StopRequested())
    while world.pending or any(w.commands for w in world.learners.values()):
        while world.pending:
            commands += world.deliver(world.pending.pop())
        commands += world.turn()
        for worker_id, learner in world.learners.items():
            while learner.commands:
                world.work(worker_id, "trained")
    assert not any(isinstance(command, Request | IssueUpdate) for command in commands)
    assert world.core.idle
    world.check()
    for learner in world.learners.values():
        held = {i for key in learner.versions for i in world.core.modules[key].ledger.held}
        assert learner.batches.keys() <= held, "kept for nothing"
    assert world.core.book(Finish()) == []
    for books in world.books.values():
        counters = books.core.ledger.counters()
        assert counters.in_flight == 0
        assert counters.sampled == counters.trained + sum(counters.dropped.values())
        assert counters.trained == books.trained


def _pick(names: Iterable[str], which: int) -> str:
    ordered = sorted(names)
    return ordered[which % len(ordered)]


class SynchronousMachine(CoreMachine):
    synchronous = True


TestAsynchronousCore = CoreMachine.TestCase
TestSynchronousCore = SynchronousMachine.TestCase
# Few: Hypothesis takes ten times as long for a step as the storms below, and is here for what it
# shrinks, and for runs that have hardly begun.
TestAsynchronousCore.settings = TestSynchronousCore.settings = settings(
    max_examples=30, stateful_step_count=40
)


@pytest.mark.parametrize("machine_type", [CoreMachine, SynchronousMachine])
@pytest.mark.parametrize(
    "seed",  # the first ten have every number of learners with every number of modules
    [*range(10), *(pytest.param(n, marks=[pytest.mark.long]) for n in range(10, 30))],
)
def test_the_books_balance_through_a_long_storm(machine_type: type[CoreMachine], seed: int) -> None:
    """Longer than hypothesis's runs, with mostly healthy traffic."""
    random = Random(seed)
    machine = machine_type()
    machine.begin(
        batch_size=random.choice([1, 12, 30]),
        max_open_updates=random.randint(1, 3),
        cap=random.randint(1, 3),
        updates=random.randint(1, 2),
        interval=random.randint(1, 3),
        learners=1 + seed % 3,
        modules=1 + seed % 2,
        waited_for=random.random() < 0.5,
        events=random.randint(1, 3),
        steps=[random.randint(1, 16) for _ in range(random.randint(1, 3))],
    )
    for _ in range(400):
        which, few = random.randrange(10_000), random.randrange(4)
        share = random.choice([0.0, 0.5, 1.0, 1.0])
        traffic: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (machine.everybody_works, (share,)),
            (machine.messages_come, (random, few)),
            (machine.a_while_goes_by, (random, few)),
            (machine.a_message_comes_again, (which,)),
        ]
        faults: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (machine.a_runner_joins, (few, 1 + which % 16)),
            (machine.a_runner_dies, (which, few)),
            (machine.a_runner_samples, (which, share, "sent")),
            (machine.a_runner_samples, (which, share, "failed")),
            (machine.a_runner_samples, (which, share, "refused")),
            (machine.a_learner_joins, (which % 10,)),
            (machine.a_module_is_added, (few,)),
            (machine.a_module_that_was_added_is_removed, (which,)),
            (machine.a_learner_dies, (which, few, which % 2 == 0)),
            (machine.a_learner_is_to_leave, (which,)),
            (machine.a_learner_is_cut_off, (which, few, which % 2 == 0)),
            (machine.a_learner_works_with_trouble, (which, "stale")),
            (machine.a_learner_works_with_trouble, (which, "forgotten")),
            (machine.a_learner_works_with_trouble, (which, "failed")),
        ]
        action, arguments = random.choice(traffic if random.random() < 0.7 else faults)
        action(*arguments)
        machine.the_books_balance()
    machine.teardown()
