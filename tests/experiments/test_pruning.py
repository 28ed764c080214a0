"""Which trials of a sweep are pruned, with the real Optuna and lines of metrics as they come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import optuna
import pytest

from juggler.experiments import sweep
from juggler.experiments.runs import RunExit
from juggler.experiments.space import parse_space
from juggler.experiments.sweep import SweepPlan

METRIC = "episode_return_mean"
STEPS = 100


@dataclass
class Run:
    """A run whose lines the test writes."""

    config: Path
    run_dir: Path
    pid: int = field(default_factory=count().__next__)
    lines: list[dict[str, float]] = field(default_factory=list)
    stopped: bool = False

    def new_lines(self) -> Iterator[dict[str, float]]:
        while self.lines:
            yield self.lines.pop(0)

    def stop(self) -> None:
        self.stopped = True


class Trials:
    """The trials of a sweep, one after the other."""

    def __init__(self, directory: Path) -> None:
        run: dict[str, Any] = {
            "env": "CartPole-v1",
            "stop_steps": STEPS,
            "stop_return": "none",
            "progress": "off",
        }
        plan = SweepPlan(
            run=run,
            stops={},
            space={"lr": "1..2"},
            metric=METRIC,
            minimize=False,
            prune=True,
            trials=99,
        )
        axes = parse_space(plan.space, run)
        directory.mkdir()
        self._sweep = sweep.Sweep(directory, plan, axes, jobs=1)
        self._sweep.begin()

    def is_pruned(self, *points: tuple[int, float | None]) -> bool:
        """Have a trial.

        Args:
            points: for each of its lines, the steps and the return.
        """
        run: Any = self._sweep.next()
        run.lines = [{"env_steps_trained": at, METRIC: value} for at, value in points]
        self._sweep.read_new(run)
        summary = {METRIC: points[-1][1]}
        self._sweep.over(run, RunExit(summary, interrupted=run.stopped, problem=""))
        return bool(run.stopped)


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    create = optuna.create_study
    # SQLite would wait for the disk.
    monkeypatch.setattr(optuna, "create_study", lambda *, storage, **how: create(**how))
    monkeypatch.setattr(sweep, "RunProcess", Run)
    return Trials(tmp_path / "sweep")


def test_a_trial_is_compared_with_those_that_had_no_line_in_its_tenth(trials: Trials) -> None:
    """A line comes once a second, and a tenth of a short trial takes less."""
    assert not trials.is_pruned((35, 50.0), (65, 80.0), (100, 100.0))  # the best one
    for _ in range(4):
        assert not trials.is_pruned((25, 5.0), (55, 10.0), (100, 15.0))
    assert not trials.is_pruned((36, 30.0), (66, 50.0), (100, 80.0)), "the second of six"


def test_a_tenth_without_a_line_counts_with_what_was_known_by_then(trials: Trials) -> None:
    for _ in range(5):
        assert not trials.is_pruned((28, 28.0), (58, 58.0), (100, 100.0))
    assert not trials.is_pruned((30, 31.0), (60, 61.0), (100, 101.0)), "the best of six"
    assert trials.is_pruned((20, 20.0), (50, 27.0)), "behind those that last said 28"


def test_no_trial_is_pruned_by_few_that_had_a_return_so_early(trials: Trials) -> None:
    assert not trials.is_pruned((35, 50.0), (100, 100.0))
    for _ in range(4):
        assert not trials.is_pruned((35, None), (55, 10.0), (100, 15.0))
    assert not trials.is_pruned((36, 30.0), (100, 80.0))


def test_nothing_is_pruned_before_five_trials_are_complete(trials: Trials) -> None:
    tenths = range(10, 101, 10)
    for _ in range(4):
        assert not trials.is_pruned(*((at, 10.0 * at) for at in tenths))
    assert not trials.is_pruned(*((at, float(at)) for at in tenths))
    for _ in range(2):
        assert trials.is_pruned(*((at, float(at)) for at in tenths)), "pruned ones do not count"
