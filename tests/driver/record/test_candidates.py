"""When a candidate is due, and which goals it has to reach."""

from __future__ import annotations

from itertools import pairwise

import pytest

from juggler.driver.record.candidates import Candidates
from juggler.driver.record.goals import EPISODE, ReturnGoals
from juggler.driver.record.metrics import Metrics


def _metrics(mean: float, episodes: int = 100) -> Metrics:
    metrics = Metrics()
    metrics.episodes_ended([mean] * episodes, [10] * episodes)
    return metrics


@pytest.mark.parametrize(
    ("mean", "episodes", "goal", "seem"),
    [
        (475.0, 100, 475.0, True),
        (474.9, 100, 475.0, False),
        (500.0, 99, 475.0, False),
        (500.0, 100, None, False),
        (-90.0, 300, -100.0, True),
    ],
)
def test_a_run_seems_solved_by_the_mean_of_its_last_hundred_episodes(
    mean: float, episodes: int, goal: float | None, seem: bool
) -> None:
    assert bool(ReturnGoals(goal).proposed(_metrics(mean, episodes))) is seem


def test_behind_a_refused_candidate_a_hundred_new_episodes_come_first() -> None:
    metrics = _metrics(500.0)
    metrics.candidates.refuse(metrics.episodes)
    metrics.episodes_ended([500.0] * 99, [10] * 99)
    assert not ReturnGoals(475.0).proposed(metrics)
    metrics.episodes_ended([500.0], [10])
    assert ReturnGoals(475.0).proposed(metrics) == {EPISODE: 500.0}


def test_who_is_refused_again_and_again_is_evaluated_ever_more_seldom() -> None:
    candidates, episodes, evaluated = Candidates(), 100, []
    while episodes < 1_000_000:
        if candidates.due(episodes):
            evaluated.append(episodes)
            candidates.refuse(episodes)
        episodes += 1
    assert evaluated[:4] == [100, 200, 400, 700]
    assert len(evaluated) < 150
    gaps = [later / before for before, later in pairwise(evaluated[20:])]
    assert max(gaps) < 1.11, "and a run that is solved at last hears of it soon"


def test_who_was_refused_before_has_to_play_longer() -> None:
    """Else the luck of many candidates would add up, and one of them would pass."""
    asked, candidates = [], Candidates()
    for episodes in range(7):
        asked.append(candidates.episodes)
        candidates.refuse(episodes)
    assert asked == [100, 200, 300, 400, 500, 500, 500]


def test_a_candidate_of_which_nothing_is_known_counts_for_nothing() -> None:
    candidates = Candidates()
    candidates.put_off(500)
    assert (candidates.refused, candidates.not_before) == (0, 600)


@pytest.mark.parametrize(
    ("returns", "reached"),
    [
        ([475.0] * 100, True),
        ([500.0] * 50 + [450.0] * 50, True),
        ([500.0] * 50 + [449.9] * 50, False),
        ([float("nan")] * 100, False),
    ],
)
def test_the_mean_of_all_episodes_reaches_the_goal(returns: list[float], reached: bool) -> None:
    goals = ReturnGoals(475.0)
    assert goals.reached(goals.played(returns, {})) is reached


AGENT_RETURNS = {("a", "main"): [1.0, 3.0], ("b", "main"): [5.0], ("c", "rest"): [-2.0]}


@pytest.mark.parametrize(
    ("stop_return", "means"),
    [
        ({"main": 3.0}, {"main": 3.0}),
        ({"main": 3.0, "b": 6.0}, {"main": 3.0, "b": 5.0}),
        ({"rest": -2.0, "c": -2.0}, {"rest": -2.0, "c": -2.0}),
        ({"d": 0.0}, {}),
    ],
)
def test_an_evaluation_has_a_mean_for_each_module_and_agent_with_a_goal(
    stop_return: dict[str, float], means: dict[str, float]
) -> None:
    goals = ReturnGoals(stop_return)
    played = goals.played([99.0], AGENT_RETURNS)
    assert {name: each.mean for name, each in played.items()} == means
    assert goals.reached(played) is all(
        means.get(name, -9.0) >= goal for name, goal in stop_return.items()
    )


def test_every_module_and_agent_with_a_goal_has_to_reach_it_in_training() -> None:
    goals, metrics = ReturnGoals({"main": 2.0, "b": 3.0}), _metrics(-50.0)
    metrics.agents_ended("main", [2.5] * 100, [1] * 100)
    metrics.agent_ended("b", [3.0] * 99)
    assert goals.proposed(metrics) == {}
    assert goals.now(metrics) == {"main": 2.5, "b": 3.0}
    metrics.agent_ended("b", [3.0])
    assert goals.proposed(metrics) == {"main": 2.5, "b": 3.0}
    metrics.agent_ended("b", [2.0])
    assert goals.proposed(metrics) == {}


def test_a_module_counts_where_an_agent_has_its_name() -> None:
    metrics = Metrics()
    metrics.agent_ended("a", [1.0])
    metrics.agents_ended("a", [7.0], [1])
    assert list(metrics.returns_of("a")) == [7.0]
    played = ReturnGoals({"a": 0.0}).played([0.0], {("a", "b"): [1.0], ("b", "a"): [7.0]})
    assert played["a"].mean == 7.0
