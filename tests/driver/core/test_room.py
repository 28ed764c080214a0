"""How many batches may be open at once, small ones and those that are updates by themselves."""

from __future__ import annotations

from random import Random

import pytest
from support.core_steps import answer, join, make, one_module, only, receipt, step

from juggler.driver.core.events import IssueUpdate, LearnerJoined, Request
from juggler.driver.core.room import Room
from juggler.driver.core.state import ModuleSettings


@pytest.mark.parametrize(
    ("steps", "learners", "batches"),
    [(50, 1, 6), (60, 1, 5), (99, 1, 4), (100, 1, 3), (5000, 1, 3), (60, 2, 6), (20, 2, 16)],
)
def test_small_batches_fill_updates_together_and_a_large_one_is_an_update(
    steps: int, learners: int, batches: int
) -> None:
    assert Room(updates=3, batch_size=100, learners=learners).batches(steps) == batches
    core = make(learners=learners, max_open_updates=3, requests_per_runner=100)
    assert len(join(core, steps=steps)) == batches, "admission keeps the same rule"


def test_as_many_batches_as_updates_may_wait_are_open_however_large_they_are() -> None:
    core = make(batch_size=100, max_open_updates=3)
    first, _ = join(core, 0, steps=400)
    assert len(join(core, 1, steps=400)) == 1
    (update,) = step(core, receipt(first, steps=400))
    assert isinstance(update, IssueUpdate), "and nothing is asked for before it is trained on"
    assert len(only(Request, step(core, answer(update, "learner-0", 1, steps=400)))) == 1


def test_no_batch_waits_for_more_updates_than_may_be_open() -> None:
    random = Random(0)
    for _ in range(100):
        learners, most = random.randint(1, 3), random.randint(1, 4)
        settings = ModuleSettings(batch_size=100, max_open_updates=most, num_learners=learners)
        core = one_module(settings)
        for index in range(learners):
            step(core, LearnerJoined(f"learner-{index}", "L"))
        commands = []
        for index in range(12):
            commands += join(core, index, steps=random.choice((10, 40, 90, 150, 400)))
        ahead: dict[str, list[int]] = {}
        for request in commands:
            assert isinstance(request, Request)
            sizes = ahead.setdefault(request.learner, [])
            assert _updates_of(sizes, 100 / learners) < most
            sizes.append(core.ledger.requested[request.batch_id].steps)


def _updates_of(sizes: list[int], share: float) -> int:
    """That take so many batches one after the other, whole ones each time."""
    updates, taken = 0, 0.0
    for size in sizes:
        taken += size
        if taken >= share:
            updates, taken = updates + 1, 0.0
    return updates
