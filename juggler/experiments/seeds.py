"""Several runs of one configuration, with different seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike
from rich.progress_bar import ProgressBar
from rich.table import Table

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import read_toml
from juggler.driver.reporting.episode_returns import FEWEST, Column, bootstrap_interval
from juggler.driver.reporting.metrics import RETURN_WINDOW
from juggler.driver.reporting.run_directory import number as finite
from juggler.driver.reporting.run_directory import read_metrics, to_toml
from juggler.driver.reporting.wording import clock, here, how_it_ended, number, quantity
from juggler.experiments.runs import (
    RunExit,
    RunProcess,
    Runs,
    configured,
    make_directory,
    must_be_some,
    must_have,
    must_not_record,
)
from juggler.runtime.checkpoints.checkpoint import write_synced

_POINTS = 100  # of a curve


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean of several runs, with a confidence interval.

    Attributes:
        mean: the interquartile mean.
        low: the lower bound of its 95 % confidence interval; None: too few runs to estimate their
            variance: fewer than five of a single task, or three of one of several tasks.
        high: the upper bound, or None.
    """

    mean: float
    low: float | None
    high: float | None


def interquartile_mean(*tasks: ArrayLike) -> Interval:
    """Return the interquartile mean of all scores, with a bootstrap interval.

    Args:
        tasks: for each task the scores of its runs, such as their returns. All tasks need the same
            scale of scores.

    Raises:
        ValueError: there are no scores, or not only finite ones.
    """
    scores = [np.asarray(task, dtype=np.float64).reshape(-1) for task in tasks]  # [runs] each
    if not scores or not all(len(task) and np.isfinite(task).all() for task in scores):
        raise ValueError("give finite scores of at least one run for each task")
    mean = float(_middle_mean(np.concatenate(scores)))
    low, high = bootstrap_interval(_middle_mean, scores) or (None, None)
    return Interval(mean, low, high)


@dataclass(frozen=True, slots=True)
class MeanCurve:
    """Interquartile mean of curves, with intervals."""

    x: Column  # the places, [points]
    mean: Column  # [points]
    low: Column  # [points]; NaN where there are too few curves for an interval
    high: Column  # [points]; NaN like `low`


def mean_curve(curves: Sequence[tuple[Column, Column]]) -> MeanCurve | None:
    """Return the mean of curves, from where all have begun.

    A curve that ends earlier keeps its last value. None: a curve has no values.
    """
    known = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in curves]  # [values] each
    if not known or not all(len(x) for x, _ in known):
        return None
    places = np.linspace(max(x[0] for x, _ in known), max(x[-1] for x, _ in known), _POINTS)
    values = np.array([np.interp(places, x, y) for x, y in known])  # [runs, points]
    found = [interquartile_mean(at) for at in values.T]
    columns = [(each.mean, each.low, each.high) for each in found]
    mean, low, high = np.array(columns, dtype=np.float64).T  # [points] each
    return MeanCurve(places, mean, low, high)


def _middle_mean(scores: Column) -> Column:
    """Return the mean of the middle half: [..., runs] -> [...]."""
    ordered = np.sort(scores, axis=-1)
    cut = ordered.shape[-1] // 4
    middle: Column = ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)
    return middle


CONFIG_FILE: Final = "seeds.toml"
RESULT_FILE: Final = "seeds.json"
_RETURN: Final = "episode_return_mean"
_GOOD_ENDS: Final = ("solved", "stop_steps", "stop_seconds")


@dataclass(frozen=True, slots=True)
class SeedsResult:
    """Results of runs with several seeds.

    Attributes:
        seeds_dir: their directory.
        runs: for each successful run: its `seed`, `run_dir`, `solved`, `final_return`,
            `best_return` and `env_steps_trained`. Returns are means over 100 training episodes.
        failed: by seed, the problems of failed runs.
        final_return: over all runs.
        best_return: over all runs, each at its best moment; the last mean, if fewer episodes
            ended.
    """

    seeds_dir: Path
    runs: list[dict[str, Any]]
    failed: dict[int, str]
    final_return: Interval
    best_return: Interval

    def __repr__(self) -> str:
        lines = []
        count = len(self.runs)
        for name, interval in (
            ("final return", self.final_return),
            ("best return", self.best_return),
        ):
            of = "1 seed" if count == 1 else f"interquartile mean of {count} seeds"
            if interval.low is not None:
                of = f"95 % interval {number(interval.low)} to {number(interval.high)}; {of}"
            elif count > 1:
                of += f"; an interval needs {FEWEST}"
            lines.append(f"{name:<13} {number(interval.mean)}  ({of})")
        # Failed runs count here: a seed that fails is no solved one.
        if solved := sum(run["solved"] for run in self.runs):
            lines.append(f"{'solved':<13} {solved} of {count + len(self.failed)}")
        if self.failed:
            seeds = ", ".join(map(str, sorted(self.failed)))
            lines.append(f"{'failed':<13} {len(self.failed)} (seed {seeds}), not in these figures")
        return "\n".join(lines)


def train_seeds(
    config: str | Path | RunConfig | None = None,
    *,
    seeds: int,
    jobs: int | None = None,
    **keys: Any,
) -> SeedsResult:
    """Train with several seeds, each in its own process.

    So give classes of a script by name: "my_file:MyEnv".

    Ctrl-C ends the runs normally, and `juggler train --resume DIR --seeds N` resumes them.

    Args:
        config: as in `juggler.train`.
        seeds: number of seeds, starting at the `seed` of the configuration.
        jobs: number of runs at once; None: as many as the cores allow.
        keys: of the configuration; everything is written into `run_dir`.

    Raises:
        ConfigError: a key or a value is wrong; the runs would never end, or record their steps.
        RunFailed: no run succeeded.
        KeyboardInterrupt: on Ctrl-C.
    """
    must_be_some("jobs", jobs)
    _, final, given = configured(config, keys)
    must_be_some("seeds", seeds)
    must_not_record(final)
    flat, env = final.flat(), final.env_runner.env
    path = Path(final.driver.run_dir) if final.driver.run_dir else None
    if all(flat[stop] is None for stop in ("stop_return", "stop_steps", "stop_seconds")):
        raise ConfigError(
            "runs with several seeds need an end: set stop_steps, stop_return or stop_seconds"
        )
    values = {key: flat[key] for key in flat if key in given and key != "run_dir"}
    resume_command = f"juggler train --seeds {seeds} --resume"
    made = make_directory(path, "seeds", env, CONFIG_FILE, to_toml(values), resume_command)
    return run_seeds(made, seeds, jobs)


def run_seeds(directory: Path, seeds: int, jobs: int | None = None) -> SeedsResult:
    """Train the runs of a directory, or resume unfinished ones.

    Raises:
        RunDirectoryError: it was not made for this, or another process has it.
    """
    from juggler.driver.driver import RunFailed

    must_be_some("seeds", seeds)
    must_have(directory, CONFIG_FILE, "runs with several seeds")
    runs = _Seeds(directory, seeds, jobs)
    with runs.held():
        runs.run_all(f"{seeds} seeds")
        if not runs.reached:
            where = f"{here(directory)}/seed-*.log"
            raise RunFailed(f"no run succeeded; their output is in {where}")
        result = runs.result()
        plain = {key: value for key, value in asdict(result).items() if key != "seeds_dir"}
        write_synced(directory / RESULT_FILE, json.dumps(plain, indent=2).encode() + b"\n")
        runs.report(repr(result))
        return result


def members(directory: Path) -> list[Path]:
    """Return runs of a directory of seeds; []: another kind of directory."""
    if not (directory / CONFIG_FILE).is_file():
        return []
    found = (path for path in directory.glob("seed-*") if path.is_dir())
    return sorted(found, key=lambda path: (len(path.name), path.name))


class _Seeds(Runs):
    """The runs of several seeds."""

    file = CONFIG_FILE

    def __init__(self, directory: Path, seeds: int, jobs: int | None) -> None:
        file = directory / CONFIG_FILE
        self._values = read_toml(file)
        config = RunConfig.from_flat(self._values, str(file))
        resume_command = f"juggler train --resume {here(directory)} --seeds {seeds}"
        super().__init__(directory, config, jobs, resume_command)
        self._goal = config.driver.stop_steps
        self._waiting = list(range(config.driver.seed, config.driver.seed + seeds))
        self._count = seeds
        self._at_work: dict[RunProcess, int] = {}  # seeds
        self.reached: dict[int, dict[str, Any]] = {}  # by seed
        self._failed: dict[int, str] = {}

    def next(self) -> RunProcess | None:
        if not self._waiting:
            return None
        seed = self._waiting.pop(0)
        config = self.directory / f"seed-{seed}.toml"
        config.write_bytes(to_toml({**self._values, "seed": seed}))
        run = RunProcess(config, self.directory / f"seed-{seed}")
        self._at_work[run] = seed
        return run

    def over(self, run: RunProcess, end: RunExit) -> None:
        seed = self._at_work.pop(run)
        if end.interrupted:
            return
        reached = _reached(seed, run.run_dir, end)
        if isinstance(reached, str):
            self._failed[seed] = reached
            self.report(f"seed {seed:>3}  failed: {reached}", "red")
            return
        self.reached[seed] = reached
        self.report(
            f"seed {seed:>3}  return {number(reached['final_return'])}"
            f"  best {number(reached['best_return'])}"
            f"  steps {quantity(reached['env_steps_trained'])}"
            f"  {how_it_ended(end.summary)} after {clock(end.summary.get('wall_time', 0.0))}"
        )

    def result(self) -> SeedsResult:
        """Return the results of successful runs."""
        runs = [self.reached[seed] for seed in sorted(self.reached)]
        means = (
            interquartile_mean([run[name] for run in runs])
            for name in ("final_return", "best_return")
        )
        return SeedsResult(self.directory, runs, self._failed, *means)

    def table(self, running: Sequence[RunProcess], title: str) -> Table:
        over = f"{len(self.reached) + len(self._failed)} of {self._count} seeds have ended{title}"
        table = self.make_table(over, "seed", "", "return", "steps")
        for run in running:
            steps = run.newest.get("env_steps_trained", 0)
            bar = ProgressBar(total=self._goal, completed=steps, width=16) if self._goal else ""
            returns = number(run.newest.get(_RETURN))
            table.add_row(f"{self._at_work[run]}", bar, returns, quantity(steps))
        return table


def _reached(seed: int, run_dir: Path, end: RunExit) -> dict[str, Any] | str:
    """Return the results of a run, or its problem."""
    if end.problem:
        return end.problem
    if (reason := end.summary.get("reason_for_stop")) not in _GOOD_ENDS:
        return f"it ended ({reason})"
    # The first episodes that end are short, and their returns mean little.
    whole = [x for x in read_metrics(run_dir).lines if x.get("episodes", 0) >= RETURN_WINDOW]
    returns = [finite(line.get(_RETURN)) for line in whole]
    final = finite(end.summary.get(_RETURN))
    if math.isnan(final):
        return "it ended before its first episode"
    return {
        "seed": seed,
        "run_dir": str(run_dir),
        "solved": bool(end.summary.get("solved")),
        "final_return": final,
        "best_return": max((each for each in returns if not math.isnan(each)), default=final),
        "env_steps_trained": end.summary["env_steps_trained"],
    }
