"""Whom to tell that a learner could use idle cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from juggler.driver.workers.idle_cores import IdleCores, Used


def used(
    *, waiting: float = 0.02, busy: float = 2.0, idle: float = 6.0, cores: float = 8.0, learners=1
) -> Iterator[Used]:
    """What a run has used every 20 seconds: of each, so much in a second."""
    for second in range(0, 100, 20):
        yield Used(
            float(second),
            learners,
            (1 - waiting) * learners * second,
            busy * second,
            idle * second,
            cores,
        )


def told(threads: int, seconds: Iterator[Used]) -> list[str]:
    idle_cores = IdleCores(threads)
    return [text for each in seconds if (text := idle_cores.look(each))]


def test_a_learner_that_limits_a_run_beside_idle_cores_is_told_once() -> None:
    assert told(1, used()) == [
        "the learner limits this run: in the last 20 s it waited for 2% of the time, and 6.0 of 8 "
        "cores had nothing to do. learner_threads = 4 may make updates faster: `juggler tune` "
        "measures it"
    ]
    (text,) = told(2, used(learners=2, busy=4.0, idle=4.0))
    assert text.startswith("learners limit this run: in the last 20 s they waited for 2% of")
    assert "learner_threads = 4 " in text


@pytest.mark.parametrize(
    "seconds",
    [
        used(waiting=0.3),  # EnvRunners limit the run
        used(idle=0.9),  # others use the cores
        used(busy=1.5, cores=2.0),  # the run uses them
        used(learners=8),  # there is not one core for each
    ],
)
def test_nothing_is_told_where_no_thread_would_help(seconds: Iterator[Used]) -> None:
    assert not told(1, seconds)


def test_eight_threads_are_enough() -> None:
    assert not told(8, used(idle=50.0, cores=64.0))


def test_looks_begin_anew_when_learners_come_or_go() -> None:
    one, two = list(used())[:1], list(used(learners=2))[1:]
    assert not told(1, iter([*one, *two[:1]]))
    assert len(told(1, iter([*one, *two]))) == 1


def test_a_learner_that_is_idle_between_long_updates_is_not_taken_for_a_busy_one() -> None:
    # Updates of 50 s each, told when they are done.
    assert not told(1, (each._replace(worked=50.0 * (each.time // 60)) for each in used()))
