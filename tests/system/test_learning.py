"""Does it learn? The shipped settings, seed by seed, against thresholds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.place import (
    Place,
    assert_books_balance,
    eventually,
    metrics,
    seeds,
    summary,
    trained_steps,
)

pytestmark = pytest.mark.slow


def assert_hardly_any_are_stale(end: dict[str, Any]) -> None:
    """An idle machine has none; a runner may be delayed briefly."""
    assert end["env_steps_dropped"].get("stale", 0) <= 0.01 * end["env_steps_trained"]


def solved_at(run_dir: Path) -> int | None:
    """Steps until the training return first reached 475, or None."""
    lines = metrics(run_dir)
    solved = (line for line in lines if (line["episode_return_mean"] or 0.0) >= 475)
    return next((int(line["env_steps_trained"]) for line in solved), None)


@seeds
def test_cartpole_is_solved_and_stays_solved(place: Place, seed: int) -> None:
    """After 475, training stays at 400 for a million steps."""
    options = ["--run-dir", "run", "--seed", seed, "--stop-return", 501, "--stop-steps", 2_500_000]
    evaluations = ["--evaluation-seconds", 1, "--evaluation-episodes", 20]
    run = place.start("train", "cartpole", *options, *evaluations)

    def long_after() -> bool:
        time.sleep(0.5)  # reading many lines takes the run's time
        since = solved_at(place.path / "run")
        later = since is not None and trained_steps(place.path / "run") > since + 1_000_000
        return later or run.status is not None

    eventually(long_after, 300, lambda: run.output)
    if run.status is None:
        run.interrupt()
    assert run.wait(60) in (0, 130), run.output
    place.assert_nothing_is_left()
    assert_books_balance(place.path / "run")
    lines = metrics(place.path / "run")
    curve = [(line["env_steps_trained"], line["episode_return_mean"] or 0.0) for line in lines]
    solved = solved_at(place.path / "run")
    assert solved is not None, curve
    assert solved <= 1_200_000, curve
    fallen = [(steps, value) for steps, value in curve if steps >= solved and value < 400]
    assert not fallen, curve
    # A line has the newest evaluation, which may be of a policy of some time ago.
    for name, settled in (("episode_return_mean", 300_000), ("evaluation_return_mean", 500_000)):
        returns = [(line["env_steps_trained"], line[name]) for line in lines]
        after = [(steps, value) for steps, value in returns if steps > solved + settled]
        assert after[-1][0] > solved + 1_000_000
        assert min(value for _, value in after) >= 400, (name, after)
    assert_hardly_any_are_stale(summary(place.path / "run"))
