"""The driver core in asynchronous mode: what it asks of runners, and how it books their answers."""

from __future__ import annotations

from collections import Counter

import pytest
from support.core_world import answer, join, make, one_module, only, receipt, step

from juggler.driver.core.core_state import ModuleSettings
from juggler.driver.core.events import (
    BatchArrived,
    Command,
    IssueUpdate,
    LearnerJoined,
    Request,
    RunnerJoined,
    SampleReceived,
)
from juggler.runtime.episodes.version import Version

# Requests.


def test_scarce_requests_go_around_all_runners() -> None:
    core = make(batch_size=50, max_open_updates=1)
    pending = [request for index in range(5) for request in join(core, index)]
    asked: Counter[str] = Counter()
    for number in range(100):
        (request,) = pending
        asked[request.runner] += 1
        (update,) = step(core, receipt(request))
        assert isinstance(update, IssueUpdate)
        pending = only(Request, step(core, answer(update, "learner-0", number)))
    assert len(asked) == 5
    assert max(asked.values()) - min(asked.values()) <= 2


def test_requests_are_spread_evenly_over_the_learners() -> None:
    requests = join(make(learners=2, requests_per_runner=10))
    assert Counter(request.learner for request in requests) == {"learner-0": 2, "learner-1": 2}


def test_a_bound_that_one_learner_uses_up_does_not_starve_the_other() -> None:
    # 34 + 34 + 34 steps are more than max_open_updates * batch_size, and leave one learner with 34
    # of the 50 steps of its share.
    core = make(learners=2, batch_size=100, max_open_updates=1, requests_per_runner=10)
    commands: list[Command] = []
    for request in join(core, steps=34):
        commands += step(core, receipt(request, steps=34))
    assert len(only(IssueUpdate, commands)) == 1


def test_ids_go_on_above_those_of_an_earlier_run() -> None:
    core = one_module(
        ModuleSettings(batch_size=100, max_open_updates=2), first_id=40, generation=7, update=9
    )
    step(core, LearnerJoined("learner-0", "L"))
    first, _ = join(core)
    assert (first.batch_id, first.generation, first.at_least) == (40, 8, Version(7, 8))
    assert core.weights_version == Version(7, 9)


def test_a_request_asks_for_weights_at_most_one_update_behind_the_newest() -> None:
    core = make(batch_size=50, max_open_updates=1, requests_per_runner=1)
    (request,) = join(core)
    assert request.at_least == Version(0, 0)
    for number in range(1, 4):
        (update,) = only(IssueUpdate, step(core, receipt(request)))
        (request,) = only(Request, step(core, answer(update, "learner-0", number)))
        assert request.at_least == Version(1, number - 1)


# Reports.


def test_a_report_that_makes_no_sense_is_refused_before_it_gets_to_the_core() -> None:
    with pytest.raises(ValueError, match="'bored'"):
        SampleReceived(1, "envrunner-0", "R", "learner-0", 5, Version(0, 0), "bored")
    with pytest.raises(ValueError, match="-1"):
        BatchArrived("learner-0", "L", 1, -1)
    with pytest.raises(ValueError, match="must be at least 1"):
        RunnerJoined("envrunner-0", "R", {"default": 0})
