"""Lines of metrics, and how files are read."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.workers_world import play_a_round, synchronous

from juggler.driver.periodic_work import metrics_line
from juggler.driver.reporting import run_directory as line_file
from juggler.driver.reporting.episode_returns import (
    ReturnGoals,
    WithReturns,
)
from juggler.driver.reporting.metrics import Candidates, Metrics, TrainingRate
from juggler.driver.reporting.run_directory import LineFile, metrics_table
from juggler.envrunner.info_numbers import InfoNumber, keep_newest
from juggler.runtime.wire.v1 import training_pb2


def test_a_line_tells_of_the_inferences_since_the_line_before() -> None:
    metrics = Metrics()
    assert metrics.line(1.0, 0)["inference"] is None
    first = {"inferences": 10, "inferred_rows": 80, "inferred_batches": 40, "waited_seconds": 0.2}
    second = {"inferences": 12, "inferred_rows": 90, "inferred_batches": 45, "waited_seconds": 0.7}
    metrics.workers.counted("envrunner-0", first)
    assert metrics.line(2.0, 0)["inference"] == pytest.approx({"rows": 8.0, "wait_ms": 5.0})
    metrics.workers.counted("envrunner-0", second)
    metrics.workers.counted("envrunner-1", first)
    told = metrics.line(3.0, 0)["inference"]
    assert told == pytest.approx({"rows": 90 / 12, "wait_ms": 1e3 * 0.7 / 45})
    assert metrics.line(4.0, 0)["inference"] is None


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


def test_a_line_has_means_over_the_newest_episodes(tmp_path: Path) -> None:
    world = synchronous(tmp_path)
    assert "info" not in metrics_line(world.parts)
    told = training_pb2.InfoNumber(name="x", mean=[1.0, 3.0], least=[0.0, 1.0], most=[2.0, 9.0])
    play_a_round(world, infos=[told])
    means = {"mean": 2.0, "least": 0.5, "most": 5.5}
    assert metrics_line(world.parts)["info"] == {"x": means}
    keep_newest(world.parts.metrics.infos, {"x": [InfoNumber(7.0, 7.0, 7.0)] * 100})
    assert metrics_line(world.parts)["info"]["x"] == dict.fromkeys(means, 7.0)


def _seen(seconds: Iterable[int], every: int, steps: int, rate: TrainingRate) -> list[float]:
    """Rates at these seconds, with N steps per `every` seconds."""
    found = []
    for second in seconds:
        rate.note(float(second), second // every * steps)
        found.append(rate.per_second())
    return found


@pytest.mark.parametrize("every", [1, 3, 7, 40])
def test_updates_that_take_longer_than_a_line_have_one_rate_in_all_of_their_lines(
    every: int,
) -> None:
    rates = _seen(range(1, 200), every, 2048, TrainingRate())
    assert rates[: every - 1] == [0.0] * (every - 1), "no update has been made"
    assert rates[every - 1 :] == pytest.approx([2048 / every] * (200 - every))


def test_a_run_that_goes_on_counts_what_it_adds() -> None:
    rate = TrainingRate(600.0, 1_000_000)
    assert rate.per_second() == 0.0
    rate.note(602.0, 1_000_400)
    assert rate.per_second() == pytest.approx(200.0)


# Files of lines that a run writes, as they are read.


def read(file: LineFile) -> tuple[bool, list[bytes]]:
    restarts: list[None] = []
    lines = list(file.new_lines(lambda: restarts.append(None)))
    return bool(restarts), lines


@pytest.mark.parametrize("part", [5, 11, 1 << 23])
def test_each_line_comes_once_and_whole(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_file, "_PART", part)  # longer than any line here
    path = tmp_path / "lines"
    file = LineFile(path)
    came: list[bytes] = []
    text = b"".join(b"%d\n" % n for n in range(100))
    for end in range(0, len(text) + 1, 7):
        path.write_bytes(text[:end])
        anew, lines = read(file)
        assert not anew
        came += lines
    path.write_bytes(text)
    assert [*came, *read(file)[1]] == [b"%d" % n for n in range(100)]


def test_a_file_that_is_cut_or_another_one_comes_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n")
    file = LineFile(path)
    assert read(file) == (False, [b"one", b"two"])
    path.write_bytes(b"three\n")
    assert read(file) == (True, [b"three"])
    (tmp_path / "new").write_bytes(b"four\nfive\nsix\n")
    (tmp_path / "new").rename(path)
    assert read(file) == (True, [b"four", b"five", b"six"])


LINES = """
{"env_steps_sampled": 10, "wall_time": 1.0, "modules": {"default": {"kl": 0.5}}}
{"env_steps_sampled": 20, "wall_time": 2.0, "weights_version": [1, 2]}
{"env_steps_sampled": 30, "wall_time": 3.0}
no line of metrics
[1]
{"env_steps_sampled": null, "wall_time": 4.0}
{"env_steps_sampled": 40}
{"env_steps_sampled": 20, "wall_time": 0.5, "episode_return_mean": null}
{"env_steps_sampled": 40, "upd
"""


def _clocks(seconds: float) -> dict[str, float]:
    """Older runs have one clock."""
    return {"wall_time": seconds, "training_time": seconds}


def test_a_table_is_flat_and_a_resumed_run_has_its_steps_once_and_one_clock(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(LINES.strip())
    assert metrics_table(tmp_path) == [
        {"env_steps_sampled": 10, **_clocks(1.0), "modules/default/kl": 0.5},
        {"env_steps_sampled": 20, **_clocks(2.0), "weights_version": [1, 2]},
        {"env_steps_sampled": 20, **_clocks(2.5), "episode_return_mean": None},
    ]


# What returns of episodes say about their mean.


class PlayedSome(WithReturns):
    def __init__(self, returns: list[float]) -> None:
        self.returns = returns


def test_the_interval_of_a_mean_is_that_of_a_normal_distribution_where_returns_are_normal() -> None:
    returns = np.random.default_rng(5).normal(100, 20, size=400)
    interval = PlayedSome(returns.tolist()).interval
    assert interval is not None
    low, high = interval
    error = 1.96 * returns.std() / 20
    assert low == pytest.approx(returns.mean() - error, abs=0.1 * error)
    assert high == pytest.approx(returns.mean() + error, abs=0.1 * error)


# When a candidate is due, and which goals it has to reach.


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
    metrics = Metrics()
    metrics.episodes_ended([mean] * episodes, [10] * episodes)
    assert bool(ReturnGoals(goal).proposed(metrics)) is seem


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
    assert max(gaps) < 1.11, "and a run that is solved at last ends soon"


def test_a_module_counts_where_an_agent_has_its_name() -> None:
    metrics = Metrics()
    metrics.of_agent("a").episodes_ended([1.0])
    metrics.of("a").episodes_ended([7.0], [1])
    assert list(metrics.returns_of("a")) == [7.0]
    played = ReturnGoals({"a": 0.0}).played([0.0], {("a", "b"): [1.0], ("b", "a"): [7.0]})
    assert played["a"].mean == 7.0
