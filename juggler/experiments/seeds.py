"""Several runs of one configuration, with different seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.progress_bar import ProgressBar
from rich.table import Table

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import read_toml
from juggler.driver.record.episode_returns import FEWEST
from juggler.driver.record.metrics import RETURN_WINDOW
from juggler.driver.record.run_directory import number as finite
from juggler.driver.record.run_directory import read_metrics, to_toml
from juggler.driver.record.wording import clock, here, how_it_ended, number, quantity
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
from juggler.experiments.statistics import Interval, interquartile_mean
from juggler.runtime.checkpoints.checkpoint import write_synced

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
        seeds: number of seeds, from the `seed` of the configuration on.
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
            "runs with several seeds need an end: give --stop-steps, --stop-return "
            "or --stop-seconds"
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
    must_have(directory, CONFIG_FILE)
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
        self._at_work: dict[int, int] = {}  # seeds by process id
        self.reached: dict[int, dict[str, Any]] = {}  # by seed
        self._failed: dict[int, str] = {}

    def next(self) -> RunProcess | None:
        if not self._waiting:
            return None
        seed = self._waiting.pop(0)
        config = self.directory / f"seed-{seed}.toml"
        config.write_bytes(to_toml({**self._values, "seed": seed}))
        run = RunProcess(config, self.directory / f"seed-{seed}")
        self._at_work[run.pid] = seed
        return run

    def over(self, run: RunProcess, end: RunExit) -> None:
        seed = self._at_work.pop(run.pid)
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
        table = Table(title=over, title_justify="left", box=None, pad_edge=False)
        table.add_column("seed", justify="right")
        table.add_column("", width=16)
        for name in ("return", "steps"):
            table.add_column(name, justify="right")
        for run in running:
            steps = run.newest.get("env_steps_trained", 0)
            bar = ProgressBar(total=self._goal, completed=steps, width=16) if self._goal else ""
            returns = number(run.newest.get(_RETURN))
            table.add_row(f"{self._at_work[run.pid]}", bar, returns, quantity(steps))
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
