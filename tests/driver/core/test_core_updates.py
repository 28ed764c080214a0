"""The driver core in asynchronous mode: updates, the learner group, and the end of a run."""

from __future__ import annotations

import pytest
from support.core_world import OneModule, answer, join, make, one_module, only, receipt, step

from juggler.driver.core.events import (
    Arrived,
    BeginWithFewer,
    Discard,
    Finish,
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    LearnerLeft,
    MeetAgain,
    PeersMet,
    Request,
    Share,
    StopRequested,
    UnreportedUpdate,
    UpdateFailed,
)
from juggler.driver.core.state import ModuleSettings
from juggler.runtime.episodes.version import Version

# Updates.


def test_an_update_takes_the_oldest_batches_until_the_share_is_reached() -> None:
    core = make(batch_size=100, max_open_updates=3, requests_per_runner=6, max_updates_in_flight=1)
    requests = join(core)
    (update,) = [c for r in requests[1::-1] for c in only(IssueUpdate, step(core, receipt(r)))]
    assert update.shares == (Share("learner-0", (2, 1)),)
    assert update.generation == 1
    assert not core.idle


def test_an_update_waits_until_every_learner_holds_its_share() -> None:
    core = make(learners=2, batch_size=100)
    requests = join(core) + join(core, index=1)
    of_first = [r for r in requests if r.learner == "learner-0"]
    of_second = [r for r in requests if r.learner == "learner-1"]
    assert [c for r in of_first for c in only(IssueUpdate, step(core, receipt(r)))] == []
    (update,) = only(IssueUpdate, step(core, receipt(of_second[0])))
    assert update.shares == (
        Share("learner-0", (of_first[0].batch_id,)),
        Share("learner-1", (of_second[0].batch_id,)),
    )


def test_no_more_updates_are_in_flight_than_allowed() -> None:
    core = make(batch_size=50, max_open_updates=4, requests_per_runner=4, max_updates_in_flight=2)
    updates = [u for r in join(core) for u in only(IssueUpdate, step(core, receipt(r)))]
    assert len(updates) == 2
    assert len(only(IssueUpdate, step(core, answer(updates[0], "learner-0", 1)))) == 1


def two_updates_apart() -> tuple[OneModule, IssueUpdate]:
    """Two learners, and an update that both have to answer."""
    core = make(learners=2, batch_size=100, max_open_updates=1)
    requests = join(core)
    (update,) = [u for r in requests for u in only(IssueUpdate, step(core, receipt(r)))]
    return core, update


def test_an_update_is_closed_when_all_of_its_learners_answered() -> None:
    core, update = two_updates_apart()
    step(core, answer(update, "learner-0", 1))
    assert not core.idle
    step(core, answer(update, "learner-1", 1))
    assert core.idle
    assert core.ledger.trained == 100
    assert core.weights_version == Version(1, 1)


def test_a_learner_that_is_back_with_its_weights_tells_what_it_had_trained_on() -> None:
    core, update = two_updates_apart()
    unheard = answer(update, "learner-0", 1)
    step(core, LearnerLeft("learner-0", "L", "cut off"))
    step(core, LearnerLeft("learner-1", "L", "cut off"))
    assert core.ledger.dropped["learner_lost"] == 100
    kept = UnreportedUpdate("learner-0", unheard.version, unheard.used)
    for _ in range(2):  # it may have told before, and been cut off again
        step(core, kept)
        assert (core.ledger.trained, core.ledger.dropped["learner_lost"]) == (50, 50)
    assert core.weights_version == Version(1, 1)
    core.ledger.check()


def test_what_a_learner_kept_counts_for_nothing_where_the_group_went_on_without_it() -> None:
    core, update = two_updates_apart()
    unheard = answer(update, "learner-0", 1)
    step(core, LearnerLeft("learner-0", "L", "cut off"))
    step(core, PeersMet(2, 0))
    step(core, UnreportedUpdate("learner-0", Version(1, 0), unheard.used))
    assert core.ledger.trained == 0


def test_an_answer_told_twice_is_booked_once() -> None:
    core, update = two_updates_apart()
    step(core, answer(update, "learner-0", 1))
    step(core, answer(update, "learner-0", 1))
    assert core.ledger.trained == 50
    assert not core.idle


def test_the_weights_version_never_goes_back() -> None:
    core, update = two_updates_apart()
    step(core, answer(update, "learner-0", 5))
    step(core, answer(update, "learner-1", 4))
    assert core.weights_version == Version(1, 5)


def test_the_share_of_a_failed_update_is_dropped_and_not_used_again() -> None:
    core, update = two_updates_apart()
    commands = step(core, UpdateFailed(update.update_id, "learner-0", "L", "a peer is gone"))
    assert only(Discard, commands) == [Discard("learner-0", update.shares[0].batch_ids)]
    step(core, answer(update, "learner-1", 1))
    assert (core.ledger.trained, core.ledger.dropped["learner_lost"]) == (50, 50)


# Membership.


def test_the_first_group_forms_when_all_learners_are_there() -> None:
    core = one_module(ModuleSettings(batch_size=100, max_open_updates=2, num_learners=3))
    assert step(core, LearnerJoined("learner-10", "L")) == []
    assert step(core, LearnerJoined("learner-2", "L")) == []
    assert step(core, LearnerLeft("learner-2", "L", "killed")) == []
    assert step(core, LearnerJoined("learner-0", "L")) == []
    commands = step(core, LearnerJoined("learner-2", "M"))
    assert commands == [FormGroup(1, ("learner-0", "learner-2", "learner-10"))]


def test_those_that_are_there_begin_when_the_others_are_waited_for_no_longer() -> None:
    core = one_module(ModuleSettings(batch_size=100, max_open_updates=2, num_learners=3))
    assert core.missing_learners == 3
    for name in ("learner-1", "learner-0"):
        assert step(core, LearnerJoined(name, "L")) == []
    assert core.missing_learners == 1
    assert step(core, BeginWithFewer()) == [FormGroup(1, ("learner-0", "learner-1"))]
    assert core.missing_learners == 0
    assert step(core, LearnerJoined("learner-2", "L")) == [
        FormGroup(2, ("learner-0", "learner-1", "learner-2"))
    ]
    assert step(core, BeginWithFewer()) == []


def test_a_learner_that_joins_later_waits_until_no_update_is_in_flight() -> None:
    core = make(batch_size=50, max_open_updates=4, requests_per_runner=4)
    first, second, third, _ = join(core)
    updates = only(IssueUpdate, step(core, receipt(first)) + step(core, receipt(second)))
    assert step(core, LearnerJoined("learner-1", "L")) == []
    assert only(IssueUpdate, step(core, receipt(third))) == []
    assert only(FormGroup, step(core, answer(updates[0], "learner-0", 1))) == []
    commands = step(core, answer(updates[1], "learner-0", 2))
    assert commands[0] == FormGroup(2, ("learner-0", "learner-1"))
    # The batch that learner-0 holds from the older generation is still good there.
    (mine,) = [r for r in only(Request, commands) if r.learner == "learner-1"][:1]
    (update,) = only(IssueUpdate, step(core, receipt(mine)))
    assert update.shares[0] == Share("learner-0", (third.batch_id,))
    assert update.generation == 2


def test_a_lost_learners_batches_are_dropped_and_the_others_form_a_group_at_once() -> None:
    core, update = two_updates_apart()
    commands = step(core, LearnerLeft("learner-0", "L", "killed"))
    assert only(FormGroup, commands) == [FormGroup(2, ("learner-1",))]
    assert core.ledger.dropped["learner_lost"] == 50
    assert not core.idle  # learner-1 has not answered
    step(core, answer(update, "learner-1", 1))
    assert core.idle
    step(core, answer(update, "learner-0", 1))
    assert core.ledger.trained == 50


def test_a_batch_for_a_lost_learner_is_dropped_when_its_runner_reports_it() -> None:
    core = make(learners=2)
    first, _ = join(core)
    step(core, LearnerLeft("learner-0", "L", "killed"))
    assert first.batch_id in core.ledger.requested
    step(core, receipt(first))
    assert core.ledger.dropped["learner_lost"] == 50


def test_a_batch_for_the_earlier_process_of_a_learner_is_not_for_the_new_one() -> None:
    core = make(learners=2)
    first, _ = join(core)
    commands = step(core, LearnerJoined("learner-0", "M"))
    assert only(FormGroup, commands) == [
        FormGroup(2, ("learner-1",)),
        FormGroup(3, ("learner-1", "learner-0")),
    ]
    commands = step(core, Arrived("learner-0", "M", first.batch_id, 50))
    assert only(Discard, commands) == [Discard("learner-0", (first.batch_id,))]
    assert core.ledger.dropped["learner_lost"] == 50


def test_without_the_last_learner_nothing_is_asked_for_until_another_one_is_there() -> None:
    core = make()
    first, _ = join(core)
    assert step(core, LearnerLeft("learner-0", "L", "killed")) == []
    assert step(core, receipt(first)) == []
    commands = step(core, LearnerJoined("learner-0", "M"))
    assert commands[0] == FormGroup(2, ("learner-0",))
    assert only(Request, commands)


def test_learners_that_begin_again_from_older_weights_say_so_when_they_meet() -> None:
    core = make()
    join(core)
    step(core, PeersMet(1, 7))
    assert core.weights_version == (1, 7)
    step(core, LearnerLeft("learner-0", "L", "killed"))
    step(core, LearnerJoined("learner-0", "M"))
    step(core, PeersMet(2, 5))
    assert core.weights_version == (2, 5)
    step(core, PeersMet(1, 7))
    assert core.weights_version == (2, 5), "late news of an earlier group"


def test_learners_that_lost_each_other_meet_again_under_another_generation() -> None:
    core = make(learners=2)
    join(core)
    assert step(core, MeetAgain(0)) == []
    assert only(FormGroup, step(core, MeetAgain(1))) == [FormGroup(2, ("learner-0", "learner-1"))]
    assert only(FormGroup, step(core, MeetAgain(1))) == [], "that generation is over"


# The end.


def test_after_a_stop_nothing_is_asked_for_and_what_is_under_way_is_booked() -> None:
    core = make(batch_size=50)
    first, second = join(core)
    (update, *_) = only(IssueUpdate, step(core, receipt(first)))
    assert step(core, StopRequested()) == []
    assert step(core, receipt(second)) == []
    assert not core.idle
    assert step(core, answer(update, "learner-0", 1)) == []
    assert core.idle
    assert (core.ledger.trained, core.held_steps) == (50, 50)


def test_the_end_closes_everything_and_hears_nothing_more() -> None:
    core = make(batch_size=50, max_open_updates=3, requests_per_runner=3)
    first, second, _ = join(core)
    step(core, receipt(first))
    step(core, StopRequested())
    step(core, receipt(second))
    assert step(core, Finish()) == []
    counters = core.ledger.counters()
    assert (counters.sampled, counters.dropped["shutdown"]) == (100, 100)
    assert (core.idle, core.ledger.requested, counters.in_flight) == (True, {}, 0)
    assert step(core, Arrived("learner-0", "L", 3, 50)) == []
    assert core.ledger.counters() == counters


def test_the_views_tell_what_is_going_on() -> None:
    core = make(learners=2)
    first, second = join(core)
    join(core, index=1)
    step(core, receipt(first))
    step(core, receipt(second, steps=30, dropped="nonfinite"))
    assert core.members == ("learner-0", "learner-1")
    assert core.num_runners == 2
    assert core.held_steps == 50


@pytest.mark.parametrize("name", ["batch_size", "max_open_updates", "requests_per_runner"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0"):
        ModuleSettings(**{"batch_size": 1, "max_open_updates": 1, name: 0})
