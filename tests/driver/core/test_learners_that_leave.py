"""Learners that leave, since fewer are wanted: what was asked for them is trained on first."""

from __future__ import annotations

from support.core_world import OneModule, answer, join, make, only, receipt, step

from juggler.driver.core.events import (
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    LearnerLeaves,
    PeersMet,
    ReleaseLearner,
    Request,
    SampleFailed,
)


def two_with_requests(**settings: int) -> tuple[OneModule, list[Request]]:
    """Learners that have met, and requests of 50 steps; an update is of 50 steps from each."""
    core = make(learners=2, batch_size=100, max_open_updates=2, **settings)
    step(core, PeersMet(core.generation, 0))
    return core, join(core, index=0) + join(core, index=1)


def leave(core: OneModule, index: int = 1) -> list[object]:
    return list(step(core, LearnerLeaves(f"learner-{index}", "L")))


def of(learner: int, requests: list[Request]) -> list[Request]:
    return [each for each in requests if each.learner == f"learner-{learner}"]


def test_the_last_learner_stays_until_another_one_has_its_weights() -> None:
    core = make(learners=1, batch_size=50, max_open_updates=2)
    assert leave(core, 0) == []
    requests = join(core)
    assert of(0, requests), "it goes on meanwhile"
    (issued,) = only(IssueUpdate, step(core, receipt(requests[0])))
    assert only(ReleaseLearner, step(core, answer(issued, "learner-0", 1))) == []
    told = step(core, LearnerJoined("learner-1", "L"))
    assert only(FormGroup, told) == [FormGroup(2, ("learner-0", "learner-1"))]
    for batch in list(core.ledger.requested.values()):
        if batch.learner.worker_id == "learner-0":
            step(core, SampleFailed(batch.batch_id, *batch.runner))
    assert core.members == ("learner-0", "learner-1"), "they have not met"
    assert step(core, PeersMet(1, 0)) == [], "another group met"
    told = step(core, PeersMet(2, 1))
    assert only(ReleaseLearner, told) == [ReleaseLearner("learner-0")]
    assert only(FormGroup, told) == [FormGroup(3, ("learner-1",))]


def test_who_waits_to_join_does_so_no_more_when_it_is_to_leave() -> None:
    core, requests = two_with_requests()
    for each in (of(0, requests)[0], of(1, requests)[0]):
        step(core, receipt(each))
    assert not core.idle
    step(core, LearnerJoined("learner-2", "L"))
    assert leave(core, 2) == []
    assert leave(core, 3) == []
    told = step(core, LearnerJoined("learner-3", "L"))
    assert only(FormGroup, told) == [], "nobody who leaves joins"
    assert core.members == ("learner-0", "learner-1")
    assert not core.modules["default"].admissible
