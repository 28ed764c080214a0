"""`juggler sweep`: looks for good settings with many short runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from juggler.cli.arguments import (
    ConfigArguments,
    Flag,
    must_not_be_combined,
    parse_first,
    parse_rest,
    report_errors,
    values_given,
)
from juggler.driver.config import ConfigError
from juggler.driver.config_files import load_config_and_keys


@dataclass(kw_only=True)
class Arguments(ConfigArguments):
    """Look for good settings with many short runs, chosen by Optuna.

    Every trial is a separate run.

    juggler sweep cartpole --stop-steps 50000 --space lr=1e-4..1e-2:log --space
    entropy_coefficient=0,0.01 --trials 20

    Ctrl-C ends the trials normally, and --resume continues them. At the end, --run-dir has a
    table, a plot, and the best settings as a file for `juggler train`.
    """

    space: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Key of the configuration and its values, for each key that varies: KEY=LOW..HIGH,
    KEY=LOW..HIGH:log, KEY=LOW..HIGH:STEP or KEY=A,B,C. A key of a table has a dot:
    model.hidden_sizes=[64],[256]."""

    trials: int | None = None
    """Total number of runs, including runs before a resume; none: 20."""

    jobs: int | None = None
    """Number of runs at once; none: as many as the cores allow."""

    metric: str = "episode_return_mean"
    """Metric that compares trials: a key of metrics lines."""

    minimize: Flag = False
    """The smallest value is the best."""

    prune: bool = True
    """End trials that fall behind the median of the other trials."""

    resume: str | None = None
    """Resume the sweep in this directory."""


def run(arguments: Sequence[str]) -> int:
    return report_errors("sweep", lambda: _sweep(arguments))


def _sweep(arguments: Sequence[str]) -> int:
    from juggler.experiments.sweep import TRIALS, resume_sweep, sweep

    first, algorithm = parse_first(Arguments, arguments, "sweep")
    if first.resume is not None:
        resumed = "a sweep with its settings"
        must_not_be_combined(first.config, arguments, resumed, ("trials", "jobs"))
        result = resume_sweep(first.resume, trials=first.trials, jobs=first.jobs)
        return 0 if result else 1
    base, _ = load_config_and_keys(first.config, algorithm)
    given = parse_rest(Arguments, arguments, "sweep", base)
    result = sweep(
        first.config,
        space=_by_key(given.space),
        # No default of the option, because a resumed sweep keeps its own number.
        trials=TRIALS if given.trials is None else given.trials,
        jobs=given.jobs,
        metric=given.metric,
        minimize=given.minimize,
        prune=given.prune,
        **values_given(given.run, arguments),
    )
    return 0 if result else 1


def _by_key(space: Sequence[str]) -> dict[str, str]:
    """Split values from their keys, each of which occurs once."""
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
