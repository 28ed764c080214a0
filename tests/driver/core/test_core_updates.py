"""The driver core in asynchronous mode: updates, the learner group, and the end of a run."""

from __future__ import annotations

import pytest
from support.core_world import OneModule, answer, join, make, only, receipt, step

from juggler.driver.core.core_state import ModuleSettings
from juggler.driver.core.events import (
    FormGroup,
    IssueUpdate,
    LearnerJoined,
    LearnerLeft,
    PeersMet,
    RebuildGroup,
    UnreportedUpdate,
    UpdateShare,
)
from juggler.runtime.episodes.version import Version

# Updates.


def test_an_update_waits_until_every_learner_holds_its_share() -> None:
    core = make(learners=2, batch_size=100)
    requests = join(core) + join(core, index=1)
    of_first = [r for r in requests if r.learner == "learner-0"]
    of_second = [r for r in requests if r.learner == "learner-1"]
    assert [c for r in of_first for c in only(IssueUpdate, step(core, receipt(r)))] == []
    (update,) = only(IssueUpdate, step(core, receipt(of_second[0])))
    assert update.shares == (
        UpdateShare("learner-0", (of_first[0].batch_id,)),
        UpdateShare("learner-1", (of_second[0].batch_id,)),
    )


def two_updates_apart() -> tuple[OneModule, IssueUpdate]:
    """Two learners, and an update that both have to answer."""
    core = make(learners=2, batch_size=100, max_open_updates=1)
    requests = join(core)
    (update,) = [u for r in requests for u in only(IssueUpdate, step(core, receipt(r)))]
    return core, update


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


# Membership.


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
    assert step(core, RebuildGroup(0)) == []
    assert only(FormGroup, step(core, RebuildGroup(1))) == [
        FormGroup(2, ("learner-0", "learner-1"))
    ]
    assert only(FormGroup, step(core, RebuildGroup(1))) == [], "that generation is over"


# The end.


@pytest.mark.parametrize("name", ["batch_size", "max_open_updates", "requests_per_runner"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0"):
        ModuleSettings(**{"batch_size": 1, "max_open_updates": 1, name: 0})
