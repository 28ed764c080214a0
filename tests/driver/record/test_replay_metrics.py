"""What a line of metrics says of replays."""

from __future__ import annotations

from juggler.driver.record.metrics import Metrics


def test_the_books_of_a_replay_are_the_newest_and_there_before_anything_is_learned() -> None:
    metrics = Metrics()
    metrics.replayed("learner-0", "default", {"replay_rows": 10.0})
    assert metrics.line(1.0, 10)["modules"] == {"default": {"replay_rows": 10.0}}
    metrics.updated("learner-0", "default", {"default": {"loss": 0.5, "replay_rows": 15.0}})
    metrics.replayed("learner-0", "default", {"replay_rows": 20.0})
    metrics.updated("learner-0", "default", {})
    metrics.replayed("learner-0", "default", {})
    assert metrics.line(2.0, 20)["modules"] == {"default": {"loss": 0.5, "replay_rows": 20.0}}


def test_all_learners_wait_for_the_replay_that_lacks_the_most_steps() -> None:
    metrics = Metrics()
    for learner, missing in (("learner-0", 0.0), ("learner-1", 1000.0), ("learner-2", 1.0)):
        metrics.replayed(learner, "default", {"replay_steps_missing": missing})
    assert metrics.line(1.0, 0)["modules"] == {"default": {"replay_steps_missing": 1000.0}}


def test_the_books_are_means_over_the_learners_that_are_here() -> None:
    metrics = Metrics()
    for learner, rows in (("learner-0", 10.0), ("learner-1", 30.0)):
        metrics.replayed(learner, "red", {"replay_rows": rows})
    metrics.replayed("learner-1", "blue", {"replay_rows": 7.0})
    expected = {"red": {"replay_rows": 20.0}, "blue": {"replay_rows": 7.0}}
    assert metrics.line(1.0, 0)["modules"] == expected
    metrics.learner_left("learner-1")
    assert metrics.line(2.0, 0)["modules"] == {"red": {"replay_rows": 10.0}}
