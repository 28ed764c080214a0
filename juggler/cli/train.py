"""`juggler train`: trains on this host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from juggler.cli import STARTED
from juggler.cli.arguments import (
    Flag,
    make_console,
    make_table,
    must_not_be_combined,
    parse_first,
    report_errors,
    values_given,
)
from juggler.cli.driver import RunArguments, read_given
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import MedianResults, read_shipped, shipped_configs
from juggler.driver.script_classes import must_be_given_again
from juggler.envrunner.environments.simulator_extras import extra_for

if TYPE_CHECKING:
    from rich.table import Table

    from juggler.experiments.seeds import SeedsResult


@dataclass(kw_only=True)
class Arguments(RunArguments):
    """Train on this host until a stop condition holds.

    Ctrl-C ends the run normally.

    Algorithms have their own options: `juggler train --algorithm ppo --help` shows PPO's,
    `juggler train --algorithm my_file:MyAlgorithm --help` the options of your own algorithm, and
    `juggler train pendulum --help` the options of a configuration, with its values.
    """

    list: Flag = False
    """List the shipped configurations with their results, and stop."""

    seeds: int | None = None
    """Number of seeds, starting at --seed, each a separate run, to report together: the
    interquartile mean with a 95 % interval."""

    jobs: int | None = None
    """With --seeds: number of runs at once; none: as many as the cores allow."""


def run(arguments: Sequence[str]) -> int:
    return report_errors("train", lambda: _train(arguments))


def _train(arguments: Sequence[str]) -> int:
    # The file sets the defaults of the options, so its name is read first.
    first, algorithm = parse_first(Arguments, arguments, "train")
    if first.list:
        make_console().print(listing())
        return 0
    _must_go_together(first)
    if first.resume is not None and first.seeds is not None:
        resumed = "runs with several seeds with their settings"
        must_not_be_combined(first.config, arguments, resumed, ("seeds", "jobs"))
        from juggler.experiments.seeds import run_seeds

        return _show(run_seeds(Path(first.resume), first.seeds, first.jobs))
    # Once more, now with the configuration's values as defaults.
    read_first = read_given(Arguments, arguments, "train", first, algorithm)
    given, checkpoint = read_first.arguments, read_first.checkpoint
    if given.seeds is not None:
        from juggler.experiments.seeds import train_seeds

        keys = values_given(given.run, arguments)
        return _show(train_seeds(first.config, seeds=given.seeds, jobs=given.jobs, **keys))
    if checkpoint is not None:
        must_be_given_again(given.run, None, None, {})
        if given.run.driver.run_dir != RunConfig.from_flat(checkpoint.config).driver.run_dir:
            raise ConfigError("a resumed run stays in its directory: leave out --run-dir")
    read_first.start(STARTED)
    return 0


def _must_go_together(first: Arguments) -> None:
    """Check that options for one run or several are not mixed."""
    from juggler.experiments.runs import must_be_some
    from juggler.experiments.seeds import CONFIG_FILE as SEEDS_FILE

    if first.seeds is None and first.jobs is not None:
        raise ConfigError("--jobs is the number of runs at once: also give --seeds")
    must_be_some("jobs", first.jobs)
    if first.resume and first.seeds is None and (Path(first.resume) / SEEDS_FILE).is_file():
        raise ConfigError(
            f"{first.resume} has runs with several seeds: add --seeds and their number"
        )
    # Several runs on one host cannot share an address.
    of_one = {
        "--metrics-bind": first.metrics_bind,
        "--health-bind": first.health_bind,
        "--reflection": first.reflection,
    }
    for option, value in of_one.items():
        if first.seeds is not None and value:
            raise ConfigError(f"{option} is for one run, but --seeds makes several: leave one out")


def _show(result: SeedsResult) -> int:
    from juggler.cli.plot import save
    from juggler.driver.reporting.wording import here

    print(f"plot: {here(save([result.seeds_dir]))}")
    return 1 if result.failed else 0


#: Columns of `juggler train --list`.
_HEAD = ("name", "algorithm", "environment", "extra", "return", "steps", "seconds", "seen on")


def listing() -> Table:
    """Return the table of shipped configurations."""
    table = make_table(_HEAD)
    for name in shipped_configs():
        table.add_row(*_row(name))
    return table


def _row(name: str) -> tuple[str, ...]:
    shipped = read_shipped(name)
    env, algorithm = shipped.config.env_runner.env, shipped.config.learner.algorithm
    about = (name, algorithm, env.rpartition(":")[2], extra_for(env) or "-")
    seen = shipped.seen
    if not isinstance(seen, MedianResults):
        return *about, "-", "-", "-", seen or "not tried in full"
    reached = f"{seen.episode_return:.1f}", f"{seen.env_steps / 1e3:.0f}k", f"{seen.seconds:.1f}"
    seeds = "seed 0" if seen.seeds == 1 else f"median of seeds 0 to {seen.seeds - 1}"
    return *about, *reached, f"{seen.machine}; {seeds}"
