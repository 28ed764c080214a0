"""The driver core in asynchronous mode, rule by rule; and what both modes share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

from juggler.driver.core import DriverCore
from juggler.driver.events import (
    Arrived,
    Command,
    Discard,
    Finish,
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    LearnerLeft,
    Request,
    RunnerJoined,
    RunnerLeft,
    SampleFailed,
    SampleReceived,
    Share,
    StopRequested,
    UpdateFailed,
    UpdateFinished,
    UsedBatch,
    Version,
)
from juggler.driver.state import CoreSettings

C = TypeVar("C")


def make(learners: int = 1, **settings: Any) -> DriverCore:
    """A core whose group has formed: learner-0, learner-1, … of incarnation "L"."""
    defaults: dict[str, Any] = {"batch_size": 100, "max_staleness": 2, "num_learners": learners}
    core = DriverCore(CoreSettings(**{**defaults, **settings}))
    for index in range(learners):
        core.handle(LearnerJoined(f"learner-{index}", "L"))
    return core


def only(kind: type[C], commands: Iterable[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def join(
    core: DriverCore, index: int = 0, steps: int = 50, incarnation: str = "R"
) -> list[Request]:
    return only(Request, core.handle(RunnerJoined(f"envrunner-{index}", incarnation, steps)))


def receipt(request: Request, steps: int = 50, dropped: str = "") -> SampleReceived:
    return SampleReceived(
        request.batch_id,
        request.runner,
        request.incarnation,
        request.learner,
        steps,
        request.at_least,
        dropped,
    )


def answer(update: IssueUpdate, learner: str, number: int, steps: int = 50) -> UpdateFinished:
    used = tuple(UsedBatch(i, steps, 0) for i in dict(update.shares)[learner])
    return UpdateFinished(update.update_id, learner, "L", Version(update.generation, number), used)


# Requests.


def test_nothing_is_requested_before_there_is_a_learner() -> None:
    core = DriverCore(CoreSettings(batch_size=100, max_staleness=2))
    assert join(core) == []
    commands = core.handle(LearnerJoined("learner-0", "L"))
    assert commands[0] == FormGroup(1, ("learner-0",))
    assert len(only(Request, commands)) == 2


def test_a_runner_gets_requests_up_to_its_cap() -> None:
    requests = join(make(requests_per_runner=3, max_staleness=10))
    assert [request.batch_id for request in requests] == [1, 2, 3]
    assert requests[0] == Request("envrunner-0", "R", 1, "learner-0", 1, Version(0, 0))


def test_a_reported_request_makes_room_for_the_next() -> None:
    core = make(max_staleness=10)
    first, _ = join(core)
    assert len(only(Request, core.handle(receipt(first)))) == 1


def test_the_learners_report_makes_room_as_well() -> None:
    core = make(max_staleness=10)
    first, _ = join(core)
    assert len(only(Request, core.handle(Arrived("learner-0", "L", first.batch_id, 50)))) == 1
    assert core.handle(receipt(first)) == []


def test_requests_stop_where_max_staleness_updates_are_open() -> None:
    core = make(batch_size=100, max_staleness=2, requests_per_runner=10)
    assert len(join(core, steps=60)) == 4  # 180 open < 200: one more
    assert join(core, index=1) == []


def test_one_request_goes_out_however_large_it_is() -> None:
    assert len(join(make(batch_size=10, max_staleness=1), steps=5000)) == 1


def test_fewer_live_steps_than_estimated_let_more_requests_out() -> None:
    core = make(batch_size=100, max_staleness=1, requests_per_runner=4)
    first, _ = join(core, steps=50)
    assert len(only(Request, core.handle(receipt(first, steps=20)))) == 1


def test_steps_in_an_update_still_count_as_open() -> None:
    core = make(batch_size=100, max_staleness=1)
    first, second = join(core)
    core.handle(receipt(first))
    (update,) = core.handle(receipt(second))
    assert isinstance(update, IssueUpdate)
    assert len(core.handle(answer(update, "learner-0", 1))) == 2


def test_scarce_requests_go_around_all_runners() -> None:
    core = make(batch_size=50, max_staleness=1)
    pending = [request for index in range(5) for request in join(core, index)]
    asked: Counter[str] = Counter()
    for number in range(100):
        (request,) = pending
        asked[request.runner] += 1
        (update,) = core.handle(receipt(request))
        assert isinstance(update, IssueUpdate)
        pending = only(Request, core.handle(answer(update, "learner-0", number)))
    assert len(asked) == 5
    assert max(asked.values()) - min(asked.values()) <= 2


def test_requests_are_spread_evenly_over_the_learners() -> None:
    requests = join(make(learners=2, requests_per_runner=10))
    assert Counter(request.learner for request in requests) == {"learner-0": 2, "learner-1": 2}


def test_a_bound_that_one_learner_uses_up_does_not_starve_the_other() -> None:
    # 34 + 34 + 34 steps are more than max_staleness * batch_size, and leave one learner with 34 of
    # the 50 steps of its share.
    core = make(learners=2, batch_size=100, max_staleness=1, requests_per_runner=10)
    commands: list[Command] = []
    for request in join(core, steps=34):
        commands += core.handle(receipt(request, steps=34))
    assert len(only(IssueUpdate, commands)) == 1


def test_a_runner_that_cannot_sample_gives_its_request_back() -> None:
    core = make()
    first, _ = join(core)
    (again,) = core.handle(SampleFailed(first.batch_id, "envrunner-0", "R"))
    assert isinstance(again, Request)
    assert again.batch_id not in (1, 2)
    assert core.ledger.sampled == core.ledger.lost_unreported == 0


def test_ids_go_on_above_those_of_an_earlier_run() -> None:
    core = DriverCore(
        CoreSettings(batch_size=100, max_staleness=2), first_id=40, generation=7, update=9
    )
    core.handle(LearnerJoined("learner-0", "L"))
    first, _ = join(core)
    assert (first.batch_id, first.generation, first.at_least) == (40, 8, Version(7, 0))
    assert core.weights_version == Version(7, 9)
    assert core.next_id == 42


# Reports.


def test_a_receipt_with_a_reason_is_sampled_and_dropped() -> None:
    core = make()
    first, _ = join(core)
    core.handle(receipt(first, steps=30, dropped="refused"))
    assert core.ledger.sampled == core.ledger.dropped["refused"] == 30
    assert core.held_steps == 0


def test_a_batch_that_arrives_after_it_was_dropped_is_discarded() -> None:
    core = make()
    first, _ = join(core)
    core.handle(receipt(first, dropped="learner_lost"))
    commands = core.handle(Arrived("learner-0", "L", first.batch_id, 50))
    assert only(Discard, commands) == [Discard("learner-0", (first.batch_id,))]
    assert core.ledger.sampled == 50


def test_a_batch_that_arrived_stays_though_its_runner_thinks_it_lost() -> None:
    core = make()
    first, _ = join(core)
    core.handle(Arrived("learner-0", "L", first.batch_id, 50))
    core.handle(receipt(first, dropped="learner_lost"))
    assert core.held_steps == 50
    assert sum(core.ledger.dropped.values()) == 0


def test_a_batch_at_another_learner_than_asked_is_discarded() -> None:
    core = make(learners=2)
    first, _ = join(core)
    assert first.learner == "learner-0"
    commands = core.handle(Arrived("learner-1", "L", first.batch_id, 50))
    assert only(Discard, commands) == [Discard("learner-1", (first.batch_id,))]
    assert core.ledger.dropped["learner_lost"] == 50


def test_a_batch_that_two_learners_got_stays_with_the_right_one() -> None:
    core = make(learners=2)
    first, _ = join(core)
    core.handle(Arrived("learner-0", "L", first.batch_id, 50))
    commands = core.handle(Arrived("learner-1", "L", first.batch_id, 50))
    assert commands == [Discard("learner-1", (first.batch_id,))]
    assert core.held_steps == 50


def test_reports_of_a_dead_incarnation_are_ignored() -> None:
    core = make()
    first, second = join(core)
    join(core, incarnation="R2")
    assert core.handle(receipt(first)) == []
    core.handle(SampleFailed(second.batch_id, "envrunner-0", "R"))
    core.handle(RunnerLeft("envrunner-0", "R", "killed"))
    assert core.ignored_events == 3
    assert core.num_runners == 1
    assert core.ledger.sampled == 0


def test_a_runner_that_is_gone_does_not_come_back_by_an_old_message() -> None:
    core = make()
    join(core)
    core.handle(RunnerLeft("envrunner-0", "R", "killed"))
    assert join(core) == []
    assert core.num_runners == 0


def test_a_join_told_twice_changes_nothing() -> None:
    core = make()
    join(core)
    assert join(core) == []
    assert core.handle(LearnerJoined("learner-0", "L")) == []
    assert (core.generation, core.requests_in_flight) == (1, 2)


def test_requests_of_a_dead_runner_are_lost_unreported() -> None:
    core = make()
    join(core)
    core.handle(RunnerLeft("envrunner-0", "R", "killed"))
    assert core.ledger.lost_unreported == 100
    assert core.requests_in_flight == 0
    assert len(join(core, index=1)) == 2


def test_a_dead_runners_batch_that_arrives_late_is_trained_on_all_the_same() -> None:
    core = make(batch_size=50)
    first, _ = join(core)
    core.handle(RunnerLeft("envrunner-0", "R", "killed"))
    (update,) = core.handle(Arrived("learner-0", "L", first.batch_id, 50))
    assert isinstance(update, IssueUpdate)
    assert update.shares == (Share("learner-0", (first.batch_id,)),)
    assert (core.ledger.sampled, core.ledger.lost_unreported) == (50, 50)


def test_a_report_that_makes_no_sense_is_refused_before_it_gets_to_the_core() -> None:
    with pytest.raises(ValueError, match="for the reason 'bored'"):
        SampleReceived(1, "envrunner-0", "R", "learner-0", 5, Version(0, 0), "bored")
    with pytest.raises(ValueError, match="-1 live steps"):
        Arrived("learner-0", "L", 1, -1)
    with pytest.raises(ValueError, match="must be at least 1"):
        RunnerJoined("envrunner-0", "R", 0)


# Updates.


def test_an_update_takes_the_oldest_batches_until_the_share_is_reached() -> None:
    core = make(batch_size=100, max_staleness=3, requests_per_runner=6, max_updates_in_flight=1)
    requests = join(core)
    (update,) = [c for r in requests[1::-1] for c in only(IssueUpdate, core.handle(receipt(r)))]
    assert update.shares == (Share("learner-0", (2, 1)),)
    assert update.generation == 1
    assert core.updates_in_flight == 1


def test_an_update_waits_until_every_learner_holds_its_share() -> None:
    core = make(learners=2, batch_size=100)
    requests = join(core) + join(core, index=1)
    of_first = [r for r in requests if r.learner == "learner-0"]
    of_second = [r for r in requests if r.learner == "learner-1"]
    assert [c for r in of_first for c in only(IssueUpdate, core.handle(receipt(r)))] == []
    (update,) = only(IssueUpdate, core.handle(receipt(of_second[0])))
    assert update.shares == (
        Share("learner-0", (of_first[0].batch_id,)),
        Share("learner-1", (of_second[0].batch_id,)),
    )


def test_no_more_updates_are_in_flight_than_allowed() -> None:
    core = make(batch_size=50, max_staleness=4, requests_per_runner=4, max_updates_in_flight=2)
    updates = [u for r in join(core) for u in only(IssueUpdate, core.handle(receipt(r)))]
    assert len(updates) == core.updates_in_flight == 2
    assert len(only(IssueUpdate, core.handle(answer(updates[0], "learner-0", 1)))) == 1


def two_updates_apart() -> tuple[DriverCore, IssueUpdate]:
    """Two learners, and an update that both have to answer."""
    core = make(learners=2, batch_size=100, max_staleness=1)
    requests = join(core)
    (update,) = [u for r in requests for u in only(IssueUpdate, core.handle(receipt(r)))]
    return core, update


def test_an_update_is_closed_when_all_of_its_learners_answered() -> None:
    core, update = two_updates_apart()
    core.handle(answer(update, "learner-0", 1))
    assert not core.idle
    core.handle(answer(update, "learner-1", 1))
    assert core.idle
    assert core.ledger.trained == 100
    assert core.weights_version == Version(1, 1)


def test_an_answer_told_twice_is_booked_once() -> None:
    core, update = two_updates_apart()
    core.handle(answer(update, "learner-0", 1))
    core.handle(answer(update, "learner-0", 1))
    assert (core.ledger.trained, core.ledger.duplicates) == (50, 1)
    assert not core.idle


def test_the_weights_version_never_goes_back() -> None:
    core, update = two_updates_apart()
    core.handle(answer(update, "learner-0", 5))
    core.handle(answer(update, "learner-1", 4))
    assert core.weights_version == Version(1, 5)


def test_the_share_of_a_failed_update_is_dropped_and_not_used_again() -> None:
    core, update = two_updates_apart()
    commands = core.handle(UpdateFailed(update.update_id, "learner-0", "L", "a peer is gone"))
    assert only(Discard, commands) == [Discard("learner-0", update.shares[0].batch_ids)]
    core.handle(answer(update, "learner-1", 1))
    assert (core.ledger.trained, core.ledger.dropped["learner_lost"]) == (50, 50)


# Membership.


def test_the_first_group_forms_when_all_learners_are_there() -> None:
    core = DriverCore(CoreSettings(batch_size=100, max_staleness=2, num_learners=3))
    assert core.handle(LearnerJoined("learner-10", "L")) == []
    assert core.handle(LearnerJoined("learner-2", "L")) == []
    assert core.handle(LearnerLeft("learner-2", "L", "killed")) == []
    assert core.handle(LearnerJoined("learner-0", "L")) == []
    commands = core.handle(LearnerJoined("learner-2", "M"))
    assert commands == [FormGroup(1, ("learner-0", "learner-2", "learner-10"))]
    assert not core.no_learner


def test_a_learner_that_joins_later_waits_until_no_update_is_in_flight() -> None:
    core = make(batch_size=50, max_staleness=4, requests_per_runner=4)
    first, second, third, _ = join(core)
    updates = only(IssueUpdate, core.handle(receipt(first)) + core.handle(receipt(second)))
    assert core.handle(LearnerJoined("learner-1", "L")) == []
    assert only(IssueUpdate, core.handle(receipt(third))) == []
    assert only(FormGroup, core.handle(answer(updates[0], "learner-0", 1))) == []
    commands = core.handle(answer(updates[1], "learner-0", 2))
    assert commands[0] == FormGroup(2, ("learner-0", "learner-1"))
    # The batch that learner-0 holds from the older generation is still good there.
    (mine,) = [r for r in only(Request, commands) if r.learner == "learner-1"][:1]
    (update,) = only(IssueUpdate, core.handle(receipt(mine)))
    assert update.shares[0] == Share("learner-0", (third.batch_id,))
    assert update.generation == 2


def test_a_lost_learners_batches_are_dropped_and_the_others_form_a_group_at_once() -> None:
    core, update = two_updates_apart()
    commands = core.handle(LearnerLeft("learner-0", "L", "killed"))
    assert only(FormGroup, commands) == [FormGroup(2, ("learner-1",))]
    assert core.ledger.dropped["learner_lost"] == 50
    assert not core.idle  # learner-1 has not answered
    core.handle(answer(update, "learner-1", 1))
    assert core.idle
    core.handle(answer(update, "learner-0", 1))
    assert core.ledger.trained == 50


def test_a_batch_for_a_lost_learner_is_dropped_when_its_runner_reports_it() -> None:
    core = make(learners=2)
    first, _ = join(core)
    core.handle(LearnerLeft("learner-0", "L", "killed"))
    assert core.requests_in_flight >= 2
    core.handle(receipt(first))
    assert core.ledger.dropped["learner_lost"] == 50


def test_a_batch_for_the_earlier_process_of_a_learner_is_not_for_the_new_one() -> None:
    core = make(learners=2)
    first, _ = join(core)
    commands = core.handle(LearnerJoined("learner-0", "M"))
    assert only(FormGroup, commands) == [
        FormGroup(2, ("learner-1",)),
        FormGroup(3, ("learner-1", "learner-0")),
    ]
    commands = core.handle(Arrived("learner-0", "M", first.batch_id, 50))
    assert only(Discard, commands) == [Discard("learner-0", (first.batch_id,))]
    assert core.ledger.dropped["learner_lost"] == 50


def test_without_the_last_learner_nothing_is_asked_for_any_more() -> None:
    core = make()
    first, _ = join(core)
    assert core.handle(LearnerLeft("learner-0", "L", "killed")) == []
    assert core.no_learner
    assert core.handle(receipt(first)) == []
    # A newcomer has none of the weights: such a run goes on from its checkpoint.
    assert core.handle(LearnerJoined("learner-0", "M")) == []
    assert core.no_learner


# The end.


def test_after_a_stop_nothing_is_asked_for_and_what_is_under_way_is_booked() -> None:
    core = make(batch_size=50)
    first, second = join(core)
    (update, *_) = only(IssueUpdate, core.handle(receipt(first)))
    assert core.handle(StopRequested()) == []
    assert core.handle(receipt(second)) == []
    assert not core.idle
    assert core.handle(answer(update, "learner-0", 1)) == []
    assert core.idle
    assert (core.ledger.trained, core.held_steps) == (50, 50)


def test_the_end_closes_everything_and_hears_nothing_more() -> None:
    core = make(batch_size=50, max_staleness=3, requests_per_runner=3)
    first, second, _ = join(core)
    core.handle(receipt(first))
    core.handle(StopRequested())
    core.handle(receipt(second))
    assert core.handle(Finish()) == []
    counters = core.ledger.counters()
    assert (counters.sampled, counters.dropped["shutdown"]) == (100, 100)
    assert (core.idle, core.requests_in_flight, counters.in_flight) == (True, 0, 0)
    assert core.handle(Arrived("learner-0", "L", 3, 50)) == []
    assert core.ledger.counters() == counters


def test_the_views_tell_what_is_going_on() -> None:
    core = make(learners=2)
    first, second = join(core)
    join(core, index=1)
    core.handle(receipt(first))
    core.handle(receipt(second, steps=30, dropped="nonfinite"))
    assert core.members == ("learner-0", "learner-1")
    assert core.num_runners == 2
    assert core.requests_in_flight == 3
    assert core.held_steps == 50
    assert core.batches_booked == {"envrunner-0": 2, "envrunner-1": 0}


@pytest.mark.parametrize("name", ["batch_size", "max_staleness", "requests_per_runner"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0: must be at least 1"):
        CoreSettings(**{"batch_size": 1, "max_staleness": 1, name: 0})
