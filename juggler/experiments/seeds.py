"""Several runs of one configuration that differ by their seeds, and what they say together."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress_bar import ProgressBar
from rich.table import Table

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.given_config import read_toml
from juggler.driver.record.bootstrap import FEWEST
from juggler.driver.record.checkpoints import write_synced
from juggler.driver.record.episode_returns import RETURN_WINDOW
from juggler.driver.record.metrics_file import number as finite
from juggler.driver.record.metrics_file import read_metrics
from juggler.driver.record.run_directory import to_toml
from juggler.driver.record.wording import clock, here, how_it_ended, number, quantity
from juggler.experiments.at_once import jobs_for, must_be_some, run_all
from juggler.experiments.board import Board
from juggler.experiments.directory import configured, held, make_directory, must_not_record
from juggler.experiments.run_process import RunEnd, RunProcess
from juggler.experiments.statistics import Interval, interquartile_mean

CONFIG_FILE = "seeds.toml"
RESULT_FILE = "seeds.json"
_RETURN = "episode_return_mean"
_GOOD_ENDS = ("solved", "stop_steps", "stop_seconds")


@dataclass(frozen=True, slots=True)
class SeedsResult:
    """What runs with several seeds have reached.

    Attributes:
        seeds_dir: their directory.
        runs: for each that ended well: its `seed`, `run_dir`, `solved`, `final_return`,
            `best_return` and `env_steps_trained`. Returns are means over 100 training episodes.
        failed: by seed, what went wrong with the others.
        final_return: of all of them.
        best_return: likewise, each at its best moment; the last one, where fewer episodes ended.
    """

    seeds_dir: Path
    runs: list[dict[str, Any]]
    failed: dict[int, str]
    final_return: Interval
    best_return: Interval

    def __repr__(self) -> str:
        return "\n".join(_conclusion(self))


def train_seeds(
    config: str | Path | RunConfig | None = None,
    *,
    seeds: int,
    jobs: int | None = None,
    **keys: Any,
) -> SeedsResult:
    """Train with several seeds, each in a process of its own, so that classes of a script have to
    be named: "my_file:MyEnv".

    Ctrl-C ends the runs in order, and `juggler train --resume DIR --seeds N` goes on with them.

    Args:
        config: as in `juggler.train`.
        seeds: how many. They begin with the `seed` of the configuration.
        jobs: how many at once; None: as many as there are cores for.
        keys: of the configuration; `run_dir` is where everything is written.

    Raises:
        ConfigError: a key or a value is wrong, or the runs would have no end.
        RunFailed: none ended well.
        KeyboardInterrupt: on Ctrl-C.
    """
    if jobs is not None:
        must_be_some("jobs", jobs)
    _, final, given = configured(config, keys)
    run_dir = Path(final.driver.run_dir) if final.driver.run_dir else None
    return run_seeds(create(final, given, seeds, run_dir), seeds, jobs)


def create(config: RunConfig, given: Collection[str], seeds: int, path: Path | None) -> Path:
    """Make the directory of several runs.

    Args:
        config: of the runs.
        given: the keys that somebody gave.
        seeds: how many there are to be.
        path: of the directory; None: a new one under runs/.

    Raises:
        ConfigError: the runs would have no end, or record what they sample.
        RunDirectoryError: it is not empty, or cannot be made.
    """
    must_be_some("seeds", seeds)
    must_not_record(config)
    flat = config.flat()
    if all(flat[stop] is None for stop in ("stop_return", "stop_steps", "stop_seconds")):
        raise ConfigError(
            "runs with several seeds have to end by themselves: give --stop-steps, --stop-return "
            "or --stop-seconds"
        )
    values = {key: flat[key] for key in flat if key in given and key != "run_dir"}
    going_on = f"juggler train --seeds {seeds} --resume"
    env, content = config.env_runner.env, to_toml(values)
    return make_directory(path, "seeds", env, CONFIG_FILE, content, going_on)


def run_seeds(directory: Path, seeds: int, jobs: int | None = None) -> SeedsResult:
    """Have the runs of a directory, or go on with those that have not ended.

    Raises:
        RunDirectoryError: it is not one that `create` has made, or another process has it.
        RunFailed: none ended well.
        KeyboardInterrupt: on Ctrl-C.
    """
    from juggler.driver.driver import RunFailed

    must_be_some("seeds", seeds)
    going_on = f"juggler train --resume {here(directory)} --seeds {seeds}"
    with held(directory, CONFIG_FILE):
        file = directory / CONFIG_FILE
        config = RunConfig.from_flat(read_toml(file), str(file))
        board = Board(config.driver.progress)
        plan = _Seeds(directory, config, seeds, board)
        with board.interruptible(going_on):
            run_all(plan, board, f"{seeds} seeds", directory, jobs or jobs_for(config))
        if not plan.runs:
            where = f"{here(directory)}/seed-*.log"
            raise RunFailed(f"no run ended well; what they printed is in {where}")
        return _concluded(plan, board)


def _concluded(plan: _Seeds, board: Board) -> SeedsResult:
    """Write what the runs have reached, and tell people."""
    result = plan.result()
    content = json.dumps(_plain(result), indent=2).encode() + b"\n"
    write_synced(result.seeds_dir / RESULT_FILE, content)
    for line in _conclusion(result):
        board.say(line)
    return result


def members(directory: Path) -> list[Path]:
    """The runs in a directory that `create` has made, by seed; []: it has made another."""
    if not (directory / CONFIG_FILE).is_file():
        return []
    found = (path for path in directory.glob("seed-*") if path.is_dir())
    return sorted(found, key=lambda path: (len(path.name), path.name))


class _Seeds:
    """The plan of the runs, for `run_all`."""

    def __init__(self, directory: Path, config: RunConfig, seeds: int, board: Board) -> None:
        first = config.driver.seed
        self._directory = directory
        self._config = config
        self._waiting = list(range(first, first + seeds))
        self._count = seeds
        self._board = board
        self._at_work: dict[int, int] = {}  # seeds by process id
        self.runs: dict[int, dict[str, Any]] = {}  # by seed
        self.failed: dict[int, str] = {}

    def next(self) -> RunProcess | None:
        """Start the next run."""
        if not self._waiting:
            return None
        seed = self._waiting.pop(0)
        values = read_toml(self._directory / CONFIG_FILE)
        config = self._directory / f"seed-{seed}.toml"
        config.write_bytes(to_toml({**values, "seed": seed}))
        run = RunProcess(config, self._directory / f"seed-{seed}")
        self._at_work[run.pid] = seed
        return run

    def heard(self, run: RunProcess) -> None:
        """Read what is new of a run."""
        run.new_lines()

    def over(self, run: RunProcess, end: RunEnd) -> None:
        """Note and tell how a run has ended."""
        seed = self._at_work.pop(run.pid)
        if end.interrupted:
            return
        reached = _reached(seed, run.run_dir, end)
        if isinstance(reached, str):
            self.failed[seed] = reached
            self._board.say(f"seed {seed:>3}  failed: {reached}", "red")
            return
        self.runs[seed] = reached
        self._board.say(
            f"seed {seed:>3}  return {number(reached['final_return'])}"
            f"  best {number(reached['best_return'])}"
            f"  steps {quantity(reached['env_steps_trained'])}"
            f"  {how_it_ended(end.summary)} after {clock(end.summary.get('wall_time', 0.0))}"
        )

    def show(self, running: Sequence[RunProcess], stopping: bool) -> None:
        """Show the runs that go on."""
        self._board.show(lambda: self._table(running, stopping), lambda: self._line(running))

    def result(self) -> SeedsResult:
        """What those that ended well have reached."""
        runs = [self.runs[seed] for seed in sorted(self.runs)]
        return SeedsResult(
            self._directory,
            runs,
            self.failed,
            interquartile_mean([run["final_return"] for run in runs]),
            interquartile_mean([run["best_return"] for run in runs]),
        )

    def _line(self, running: Sequence[RunProcess]) -> str:
        """How the runs are doing that go on, in one line; "": there are none."""
        words = (
            f"seed {self._at_work[run.pid]:>3}  return {number(run.newest.get(_RETURN))}"
            f"  steps {quantity(run.newest['env_steps_trained'])}"
            if run.newest
            else f"seed {self._at_work[run.pid]:>3}  starting"
            for run in running
        )
        return "; ".join(words)

    def _table(self, running: Sequence[RunProcess], stopping: bool) -> Table:
        title = f"{len(self.runs) + len(self.failed)} of {self._count} seeds are over"
        if stopping:
            title += ", those that go on are ending (Ctrl-C again kills them)"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("seed", justify="right")
        table.add_column("", width=16)
        table.add_column("return", justify="right")
        table.add_column("steps", justify="right")
        goal = self._config.driver.stop_steps
        for run in running:
            steps = run.newest.get("env_steps_trained", 0)
            bar = ProgressBar(total=goal, completed=steps, width=16) if goal else ""
            table.add_row(
                f"{self._at_work[run.pid]}", bar, number(run.newest.get(_RETURN)), quantity(steps)
            )
        return table


def _reached(seed: int, run_dir: Path, end: RunEnd) -> dict[str, Any] | str:
    """What a run has reached, or what went wrong."""
    if end.problem:
        return end.problem
    if (reason := end.summary.get("reason_for_stop")) not in _GOOD_ENDS:
        return f"it ended by {reason}"
    # The first episodes to end are short ones, whose returns say little.
    whole = [x for x in read_metrics(run_dir).lines if x.get("episodes", 0) >= RETURN_WINDOW]
    returns = [finite(line.get(_RETURN)) for line in whole]
    known = [each for each in returns if each == each]  # not NaN
    final = finite(end.summary.get(_RETURN))
    if final != final:
        return "it ended before an episode did"
    return {
        "seed": seed,
        "run_dir": str(run_dir),
        "solved": bool(end.summary.get("solved")),
        "final_return": final,
        "best_return": max(known, default=final),
        "env_steps_trained": end.summary["env_steps_trained"],
    }


def _conclusion(result: SeedsResult) -> list[str]:
    """Word what the runs have reached together."""
    lines = []
    for name, interval in (
        ("final return", result.final_return),
        ("best return", result.best_return),
    ):
        count = len(result.runs)
        of = "1 seed" if count == 1 else f"interquartile mean of {count} seeds"
        if interval.low is not None:
            of = f"95 % interval {number(interval.low)} to {number(interval.high)}; {of}"
        elif count > 1:
            of += f"; an interval takes {FEWEST}"
        lines.append(f"{name:<13} {number(interval.mean)}  ({of})")
    if solved := sum(run["solved"] for run in result.runs):
        lines.append(f"{'solved':<13} {solved} of {len(result.runs) + len(result.failed)}")
    if result.failed:
        seeds = ", ".join(map(str, sorted(result.failed)))
        lines.append(
            f"{'failed':<13} {len(result.failed)} (seed {seeds}), in none of these figures"
        )
    return lines


def _plain(result: SeedsResult) -> dict[str, Any]:
    values = {
        "runs": result.runs,
        "failed": {str(seed): problem for seed, problem in result.failed.items()},
    }
    return values | {
        name: asdict(getattr(result, name)) for name in ("final_return", "best_return")
    }
