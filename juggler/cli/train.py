"""`juggler train`: trains on this host."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from juggler.cli.arguments import (
    Flag,
    keys_given,
    must_stand_alone,
    parse_first,
    parse_rest,
    process_started,
    report_errors,
)
from juggler.cli.monitoring_arguments import MonitoringArguments
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.given_config import load_given
from juggler.driver.script_classes import must_be_given_again
from juggler.driver.starting import resume_run, start_run


@dataclass(kw_only=True)
class Arguments(MonitoringArguments):
    """Train on this host until a stop condition holds. Ctrl-C ends the run in order.

    Algorithms have their own options: `juggler train --algorithm ppo --help` shows those of PPO,
    `juggler train --algorithm my_file:MyAlgorithm --help` those of an algorithm of your own, and
    `juggler train pendulum --help` those of a configuration, with its values.
    """

    config: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CONFIG]")] = None
    """A configuration that ships with Juggler, or a .toml file. Options override its values."""

    resume: str | None = None
    """Continue the run in this directory from its newest checkpoint, unless it has reached its
    goal."""

    list: Flag = False
    """List the configurations that ship with Juggler, with what they reached, and stop."""

    seeds: int | None = None
    """Train with so many seeds, from --seed on, each a run of its own, and tell what they reach
    together: the interquartile mean with a 95 % interval."""

    jobs: int | None = None
    """With --seeds: how many runs at once; none: as many as there are cores for."""

    insecure: Flag = False
    """Serve --metrics-bind beyond loopback without encryption: only on a network that you trust."""

    run: RunConfig = field(default_factory=RunConfig)


def run(arguments: Sequence[str]) -> int:
    started = process_started()
    return report_errors("train", lambda: _train(arguments, started))


def _train(arguments: Sequence[str], started: float) -> int:
    # The file decides the defaults of the options, so its name is read first.
    first, algorithm = parse_first(Arguments, arguments, "train")
    if first.list:
        from juggler.cli.listing import listing

        print(listing())
        return 0
    base, keys = load_given(first.config, algorithm)
    _must_go_together(first)
    if first.resume is not None and first.seeds is not None:
        goes_on = "runs with several seeds as they were started"
        must_stand_alone(first.config, arguments, goes_on, ("seeds", "jobs"))
        return _seeds(Path(first.resume), first.seeds, first.jobs)
    if first.resume is not None:
        return _resume(first, arguments, started)
    given = parse_rest(Arguments, arguments, "train", Arguments(run=base))
    given.run.validate()
    keys |= keys_given(arguments)
    if given.seeds is not None:
        from juggler.experiments.seeds import create

        wanted = given.run.driver.run_dir
        directory = create(given.run, keys, given.seeds, Path(wanted) if wanted else None)
        return _seeds(directory, given.seeds, given.jobs)
    start_run(given.run, keys, started=started, monitoring=given.monitoring(given.insecure))
    return 0


def _must_go_together(first: Arguments) -> None:
    """
    Raises:
        ConfigError: an option is for one run, or for several; or no run could begin.
    """
    from juggler.experiments.at_once import must_be_some
    from juggler.experiments.seeds import CONFIG_FILE as SEEDS_FILE

    if first.seeds is None and first.jobs is not None:
        raise ConfigError("--jobs is how many runs there are at once: give --seeds, too")
    if first.jobs is not None:
        must_be_some("jobs", first.jobs)
    if first.resume and first.seeds is None and (Path(first.resume) / SEEDS_FILE).is_file():
        raise ConfigError(f"{first.resume} has runs with several seeds: add --seeds and how many")
    of_one = {
        "--metrics-bind": first.metrics_bind,
        "--health-bind": first.health_bind,
        "--reflection": first.reflection,
    }
    for option, value in of_one.items():
        if first.seeds is not None and value:
            raise ConfigError(f"{option} is of one run, and --seeds makes several: leave one out")


def _seeds(directory: Path, seeds: int, jobs: int | None) -> int:
    from juggler.cli.picture import plot
    from juggler.driver.record.wording import here
    from juggler.experiments.seeds import run_seeds

    result = run_seeds(directory, seeds, jobs)
    print(f"plot: {here(plot([directory]))}")
    return 1 if result.failed else 0


def _resume(first: Arguments, arguments: Sequence[str], started: float) -> int:
    if first.config is not None:
        print("juggler train: give a configuration or --resume, not both", file=sys.stderr)
        return 2
    from juggler.runtime.checkpoints.checkpoint import read

    run_dir = Path(first.resume or "")
    checkpoint = read(run_dir)
    before = RunConfig.from_flat(checkpoint.config, where=str(run_dir))
    given = parse_rest(Arguments, arguments, "train", Arguments(run=before))
    given.run.validate()
    must_be_given_again(given.run, None, None, {})
    if given.run.driver.run_dir != before.driver.run_dir:
        print(
            "juggler train: a resumed run stays in its directory: leave out --run-dir",
            file=sys.stderr,
        )
        return 2
    monitoring = given.monitoring(given.insecure)
    resume_run(run_dir, checkpoint, given.run, started=started, monitoring=monitoring)
    return 0
