"""`juggler sweep`: looks for good settings with many short runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from juggler.cli.arguments import (
    ConfigArguments,
    Flag,
    keys_given,
    must_stand_alone,
    parse_first,
    parse_rest,
    report_errors,
)
from juggler.driver.config import ConfigError
from juggler.driver.given_config import load_given


@dataclass(kw_only=True)
class Arguments(ConfigArguments):
    """Look for good settings with many short runs, which Optuna chooses.

    Each is a run of its own.

    juggler sweep cartpole --stop-steps 50000 --space lr=1e-4..1e-2:log --space
    entropy_coefficient=0,0.01 --trials 20

    Ctrl-C ends the trials in order, and --resume goes on with them. At the end there are a table, a
    plot, and the best settings as a file that `juggler train` takes, all in
    --run-dir.
    """

    space: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A key of the configuration and its values, for each key that varies: KEY=LOW..HIGH,
    KEY=LOW..HIGH:log, KEY=LOW..HIGH:STEP or KEY=A,B,C. A key of a table has a dot:
    model.hidden_sizes=[64],[256]."""

    trials: int | None = None
    """How many runs there are to be, with those of before a resume; none: 20."""

    jobs: int | None = None
    """How many at once; none: as many as there are cores for."""

    metric: str = "episode_return_mean"
    """What trials are compared by: a key of the lines of metrics."""

    minimize: Flag = False
    """The least of it is the best."""

    prune: bool = True
    """End trials that have fallen behind the median of the others."""

    resume: str | None = None
    """Go on with the sweep in this directory."""


def run(arguments: Sequence[str]) -> int:
    return report_errors("sweep", lambda: _sweep(arguments))


def _sweep(arguments: Sequence[str]) -> int:
    from juggler.experiments.sweep import TRIALS, plan_of, resume_sweep, start_sweep

    first, algorithm = parse_first(Arguments, arguments, "sweep")
    if first.resume is not None:
        goes_on = "a sweep as it was started"
        must_stand_alone(first.config, arguments, goes_on, ("trials", "jobs"))
        return _status(resume_sweep(first.resume, trials=first.trials, jobs=first.jobs))
    base, in_file = load_given(first.config, algorithm)
    given = parse_rest(Arguments, arguments, "sweep", base)
    said = keys_given(arguments)
    plan = plan_of(
        given.run,
        in_file | said,
        said,
        base,
        _by_key(given.space),
        metric=given.metric,
        minimize=given.minimize,
        prune=given.prune,
        trials=TRIALS if given.trials is None else given.trials,
    )
    run_dir = given.run.driver.run_dir
    return _status(start_sweep(plan, Path(run_dir) if run_dir else None, given.jobs))


def _status(result: object) -> int:
    return 0 if result is not None else 1


def _by_key(space: Sequence[str]) -> dict[str, str]:
    """Split values from their keys, each of which comes once."""
    found: dict[str, str] = {}
    for each in space:
        key, equals, values = each.partition("=")
        if not equals or not values:
            raise ConfigError(
                f"--space {each}: give a key and its values, as in --space lr=1e-4..1e-2:log"
            )
        if key in found:
            raise ConfigError(f"--space {key}: this key is given twice")
        found[key] = values
    return found
