"""Starts and resumes sweeps, from Python and from the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.given_config import differing
from juggler.driver.record.wording import here, number
from juggler.experiments.at_once import jobs_for, must_be_some, run_all
from juggler.experiments.board import Board
from juggler.experiments.directory import configured, held, must_not_record
from juggler.experiments.metric_names import must_be_a_metric
from juggler.experiments.space import Axis, configurations, parse_space, placed, settings_in
from juggler.experiments.sweep import Sweep, optuna_is_there
from juggler.experiments.sweep_directory import PLAN_FILE, SweepDirectory, SweepPlan
from juggler.experiments.sweep_picture import write_picture
from juggler.experiments.sweep_tables import counts, result_table, rows_for_csv, settings_text
from juggler.experiments.trials import trials_over

_STOPS = ("stop_return", "stop_steps", "stop_seconds")
TRIALS = 20
_METRIC = "episode_return_mean"


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep has found.

    Attributes:
        sweep_dir: its directory.
        settings: the best ones, by key.
        value: what the best trial had of the metric that they were compared by.
        config: a file with the best settings, which `juggler.train` takes.
        trials: a row for each trial, for `pandas.DataFrame(result.trials)`.
    """

    sweep_dir: Path
    settings: dict[str, Any]
    value: float
    config: Path
    trials: list[dict[str, Any]]

    def __repr__(self) -> str:
        return f"best: {settings_text(self.settings)} with {number(self.value)}, in {self.config}"


def sweep(
    config: str | Path | RunConfig | None = None,
    *,
    space: Mapping[str, str | Sequence[Any]] | None = None,
    trials: int = TRIALS,
    jobs: int | None = None,
    metric: str = _METRIC,
    minimize: bool = False,
    prune: bool = True,
    **keys: Any,
) -> SweepResult | None:
    """Look for good settings with many short runs. Optuna chooses them, and `juggler train` trains
    each in a process of its own, so classes of a script have to be named: "my_file:MyEnv".

    Ctrl-C ends the trials in order; `resume_sweep` goes on with them.

    Args:
        config: as in `juggler.train`.
        space: by key of the configuration, "1e-4..1e-2:log", "128..1024:128" or a list of values.
            Keys of tables have dots: "model.hidden_sizes".
        trials: how many there are.
        jobs: how many at once; None: as many as there are cores for.
        metric: a key of the lines of metrics that trials are compared by.
        minimize: the least is the best.
        prune: end trials that fall behind the median of the others.
        keys: of the configuration. `stop_steps` or `stop_seconds` is how long a trial is, and
            `run_dir` where everything is written.

    Returns:
        The best settings; None: no trial was complete.

    Raises:
        ConfigError: a key or a value is wrong, trials have no end, or Optuna is not installed.
        SweepFailed: the first trials have all failed.
        KeyboardInterrupt: on Ctrl-C.
    """
    base, final, given = configured(config, keys)
    plan = plan_of(
        final,
        given,
        keys,
        base,
        space={} if space is None else space,
        metric=metric,
        minimize=minimize,
        prune=prune,
        trials=trials,
    )
    run_dir = final.driver.run_dir
    return start_sweep(plan, Path(run_dir) if run_dir else None, jobs)


def resume_sweep(
    sweep_dir: str | Path, *, trials: int | None = None, jobs: int | None = None
) -> SweepResult | None:
    """Go on with a sweep, and first with the trials that went on when it ended.

    Args:
        sweep_dir: of the sweep.
        trials: how many there are to be, with those of before; None: as before.
        jobs: as in `sweep`.

    Raises:
        RunDirectoryError: there is no sweep.
        ConfigError: a number is wrong, or Optuna is not installed.
        SweepFailed: as `sweep`.
        KeyboardInterrupt: on Ctrl-C.
    """
    optuna_is_there()
    if jobs is not None:
        must_be_some("jobs", jobs)
    directory, plan = SweepDirectory.open(Path(sweep_dir))
    if trials is not None:
        must_be_some("trials", trials)
        plan = dataclasses.replace(plan, trials=trials)
    return _sweep(directory, plan, parse_space(plan.space, plan.run), jobs)


def plan_of(
    config: RunConfig,
    given: Collection[str],
    said: Collection[str],
    base: RunConfig,
    *,
    space: Mapping[str, str | Sequence[Any]],
    metric: str,
    minimize: bool,
    prune: bool,
    trials: int,
) -> SweepPlan:
    """The plan of a new sweep.

    Args:
        config: the complete configuration of the runs.
        given: the keys that somebody gave; those of a file, and those that are `said`.
        said: the keys that were given with the sweep itself.
        base: the configuration without these.
        space: by key, the values.
        metric: that trials are compared by.
        minimize: the least is the best.
        prune: trials that fall behind are ended.
        trials: how many.

    Raises:
        ConfigError: trials would have no end, or different ones, or record what they sample, or
            runs have no such metric.
    """
    flat, before = config.flat(), base.flat()
    run = {key: flat[key] for key in flat if key in given and key != "run_dir"}
    # Those that reach it sooner would be compared at another number of steps.
    run["stop_return"] = flat["stop_return"] if "stop_return" in said else "none"
    if not space:
        raise ConfigError("a sweep needs a space, such as --space lr=1e-4..1e-2:log")
    if flat["stop_steps"] is None and flat["stop_seconds"] is None:
        raise ConfigError(
            "trials are compared at equal lengths: say how long they are, such as "
            "--stop-steps 50000 or --stop-seconds 30"
        )
    must_be_some("trials", trials)
    own = {key: before[key] for key in _STOPS if before[key] is not None}
    stops = own or {key: flat[key] for key in _STOPS if flat[key] is not None}
    plain = _plain(space, {key for key, value in flat.items() if isinstance(value, Mapping)})
    axes = parse_space(plain, run)  # before anything is made
    for each in configurations(axes, run):
        must_not_record(each)
        must_be_a_metric(metric, each)
    for key in _STOPS:
        if key in plain:
            raise ConfigError(f"--space {key}: trials are compared at equal lengths; leave it out")
    return SweepPlan(
        run={key: "none" if value is None else value for key, value in run.items()},
        stops=stops,
        space=plain,
        metric=metric,
        minimize=minimize,
        prune=prune,
        trials=trials,
    )


def _plain(space: object, tables: Collection[str]) -> dict[str, str | list[Any]]:
    """A space as files hold it.

    Args:
        space: what somebody gave.
        tables: keys of a run that hold tables.

    Raises:
        ConfigError: it is no dict, or a key has something else than a text or a list.
    """
    example = 'such as {"lr": "1e-4..1e-2:log", "batch_size": [256, 512]}'
    if not isinstance(space, Mapping):
        raise ConfigError(f"space = {space!r}: give a dict, {example}")
    plain: dict[str, str | list[Any]] = {}
    for key, value in space.items():
        if isinstance(value, Mapping) and key in tables:
            inner = next(iter(value), "hidden_sizes")
            raise ConfigError(
                f"space: name a key of the table {key} with a dot, as in {f'{key}.{inner}'!r}"
            )
        if isinstance(value, Mapping) or not isinstance(value, Iterable):
            raise ConfigError(f"space: {key} = {value!r}: give a text or a list, {example}")
        plain[key.strip().replace("-", "_")] = value if isinstance(value, str) else list(value)
    return plain


def start_sweep(plan: SweepPlan, path: Path | None, jobs: int | None) -> SweepResult | None:
    """Start a new sweep. See `sweep`."""
    optuna_is_there()
    if jobs is not None:
        must_be_some("jobs", jobs)
    axes = parse_space(plan.space, plan.run)
    return _sweep(SweepDirectory.create(path, plan), plan, axes, jobs)


def _sweep(
    directory: SweepDirectory, plan: SweepPlan, axes: Sequence[Axis], jobs: int | None
) -> SweepResult | None:
    config = RunConfig.from_flat(plan.run)
    if is_whole_grid := (settings := settings_in(axes)) <= plan.trials:
        plan = dataclasses.replace(plan, trials=int(settings))
    board = Board(config.driver.progress)
    going_on = f"juggler sweep --resume {here(directory.path)}"
    with held(directory.path, PLAN_FILE), board.interruptible(going_on):
        going = Sweep(directory, plan, axes, board)
        try:
            once = ", one of each setting" if is_whole_grid else ""
            what = f"sweep of {plan.trials} trials{once}"
            run_all(going, board, what, directory.path, jobs or jobs_for(config))
            going.must_be_good()
        finally:
            result = _conclude(directory, plan, axes, going, board)
        return result


def _conclude(
    directory: SweepDirectory, plan: SweepPlan, axes: Sequence[Axis], going: Sweep, board: Board
) -> SweepResult | None:
    """Write the results, and show them."""
    over = trials_over(going.study)
    if not over:
        return None
    rows = rows_for_csv(over, plan)
    table = directory.write_table(rows)
    board.say(counts(over))
    board.leave(result_table(over, plan))
    if not over[0].complete:
        return None
    best = over[0]
    chosen = {axis.key: axis.meant(best.settings[axis.key]) for axis in axes}
    values = {key: value for key, value in plan.run.items() if key not in _STOPS}
    about = f"The best of {len(over)} trials, {best.number}: {plan.metric} {number(best.value)}"
    settings = differing(placed({**values, **plan.stops}, chosen), plan.space)
    file = directory.write_best(settings, about)
    picture = write_picture(directory.path, over, plan, axes)
    board.say(f"table: {here(table)}\nplot: {here(picture)}")
    board.say(f"best settings: {here(file)}; to train with them: juggler train {here(file)}")
    assert best.value is not None
    return SweepResult(directory.path, chosen, best.value, file, rows)
