"""The driver core in asynchronous mode: what it asks of runners, and how it books their answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from support.core_world import answer, join, make, one_module, only, receipt, step

from juggler.driver.core.events import (
    Arrived,
    Command,
    Discard,
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    Request,
    RunnerJoined,
    RunnerLeft,
    SampleFailed,
    SampleReceived,
    Share,
)
from juggler.driver.core.state import ModuleSettings
from juggler.runtime.episodes.version import Version

# Requests.


def test_nothing_is_requested_before_there_is_a_learner() -> None:
    core = one_module(ModuleSettings(batch_size=100, max_open_updates=2))
    assert join(core) == []
    commands = step(core, LearnerJoined("learner-0", "L"))
    assert commands[0] == FormGroup(1, ("learner-0",))
    assert len(only(Request, commands)) == 2


def test_a_runner_gets_requests_up_to_its_cap() -> None:
    requests = join(make(requests_per_runner=3, max_open_updates=10))
    assert [request.batch_id for request in requests] == [1, 2, 3]
    assert requests[0] == Request("envrunner-0", "R", 1, "learner-0", 1, Version(0, 0))


def test_requests_stop_where_max_open_updates_updates_are_open() -> None:
    core = make(batch_size=100, max_open_updates=2, requests_per_runner=10)
    assert len(join(core, steps=60)) == 4  # 180 open < 200: one more
    assert join(core, index=1) == []


def test_one_request_goes_out_however_large_it_is() -> None:
    assert len(join(make(batch_size=10, max_open_updates=1), steps=5000)) == 1


def test_steps_in_an_update_still_count_as_open() -> None:
    core = make(batch_size=100, max_open_updates=1)
    first, second = join(core)
    step(core, receipt(first))
    (update,) = step(core, receipt(second))
    assert isinstance(update, IssueUpdate)
    assert len(step(core, answer(update, "learner-0", 1))) == 2


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


def test_a_runner_that_cannot_sample_gives_its_request_back() -> None:
    core = make()
    first, _ = join(core)
    (again,) = step(core, SampleFailed(first.batch_id, "envrunner-0", "R"))
    assert isinstance(again, Request)
    assert again.batch_id not in (1, 2)
    assert core.ledger.sampled == core.ledger.lost_unreported == 0


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


def test_a_request_asks_for_the_newest_weights_that_runners_got_by_the_update_before() -> None:
    core = make(batch_size=50, max_open_updates=1, requests_per_runner=1, weights_interval=3)
    (request,) = join(core)
    asked = []
    for number in range(1, 9):
        (update,) = only(IssueUpdate, step(core, receipt(request)))
        (request,) = only(Request, step(core, answer(update, "learner-0", number)))
        asked.append(request.at_least)
    assert asked == [Version(1, update) for update in (0, 0, 0, 3, 3, 3, 6, 6)]


# Reports.


def test_a_receipt_with_a_reason_is_sampled_and_dropped() -> None:
    core = make()
    first, _ = join(core)
    step(core, receipt(first, steps=30, dropped="refused"))
    assert core.ledger.sampled == core.ledger.dropped["refused"] == 30
    assert core.held_steps == 0


def test_a_batch_that_arrives_after_it_was_dropped_is_discarded() -> None:
    core = make()
    first, _ = join(core)
    step(core, receipt(first, dropped="learner_lost"))
    commands = step(core, Arrived("learner-0", "L", first.batch_id, 50))
    assert only(Discard, commands) == [Discard("learner-0", (first.batch_id,))]
    assert core.ledger.sampled == 50


def test_a_batch_that_arrived_stays_though_its_runner_thinks_it_lost() -> None:
    core = make()
    first, _ = join(core)
    step(core, Arrived("learner-0", "L", first.batch_id, 50))
    step(core, receipt(first, dropped="learner_lost"))
    assert core.held_steps == 50
    assert sum(core.ledger.dropped.values()) == 0


def test_a_receipt_from_another_learner_than_asked_means_that_the_batch_is_lost() -> None:
    core = make(learners=2)
    first, _ = join(core)
    step(core, receipt(replace(first, learner="learner-1")))
    assert core.ledger.sampled == core.ledger.dropped["learner_lost"] == 50


def test_a_batch_that_two_learners_got_stays_with_the_right_one() -> None:
    core = make(learners=2)
    first, _ = join(core)
    step(core, Arrived("learner-0", "L", first.batch_id, 50))
    commands = step(core, Arrived("learner-1", "L", first.batch_id, 50))
    assert commands == [Discard("learner-1", (first.batch_id,))]
    assert core.held_steps == 50


def test_reports_of_a_dead_incarnation_are_ignored() -> None:
    core = make()
    first, second = join(core)
    join(core, incarnation="R2")
    assert step(core, receipt(first)) == []
    step(core, SampleFailed(second.batch_id, "envrunner-0", "R"))
    step(core, RunnerLeft("envrunner-0", "R", "killed"))
    assert core.num_runners == 1
    assert core.ledger.sampled == 0


def test_requests_of_a_dead_runner_are_lost_unreported() -> None:
    core = make()
    join(core)
    step(core, RunnerLeft("envrunner-0", "R", "killed"))
    assert core.ledger.lost_unreported == 100
    assert not core.ledger.requested
    assert len(join(core, index=1)) == 2


def test_requests_that_a_runner_had_not_begun_when_it_left_are_not_lost() -> None:
    core = make()
    first, second = join(core)
    step(core, RunnerLeft("envrunner-0", "R", "terminated", frozenset({second.batch_id})))
    assert core.ledger.lost_unreported == 50
    assert core.ledger.unreported.keys() == {first.batch_id}
    assert not core.ledger.requested
    assert len(join(core, index=1)) == 2, "what was open for the first is free again"


def test_a_dead_runners_batch_that_arrives_late_is_trained_on_all_the_same() -> None:
    core = make(batch_size=50)
    first, _ = join(core)
    step(core, RunnerLeft("envrunner-0", "R", "killed"))
    (update,) = step(core, Arrived("learner-0", "L", first.batch_id, 50))
    assert isinstance(update, IssueUpdate)
    assert update.shares == (Share("learner-0", (first.batch_id,)),)
    assert (core.ledger.sampled, core.ledger.lost_unreported) == (50, 50)


def test_a_report_that_makes_no_sense_is_refused_before_it_gets_to_the_core() -> None:
    with pytest.raises(ValueError, match="'bored'"):
        SampleReceived(1, "envrunner-0", "R", "learner-0", 5, Version(0, 0), "bored")
    with pytest.raises(ValueError, match="-1"):
        Arrived("learner-0", "L", 1, -1)
    with pytest.raises(ValueError, match="must be at least 1"):
        RunnerJoined("envrunner-0", "R", {"default": 0})
