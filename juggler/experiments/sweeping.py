"""Starts and resumes sweeps, from Python and from the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.given_config import differing
from juggler.driver.record.wording import here, number
from juggler.experiments.at_once import jobs_for, must_be_some, run_all
from juggler.experiments.board import Board
from juggler.experiments.directory import configured, held, must_not_record
from juggler.experiments.space import Axis, Range, configurations, parse_space, placed, settings_in
from juggler.experiments.style import COLOURS, GREY, dress
from juggler.experiments.sweep import Sweep, optuna_is_there
from juggler.experiments.sweep_directory import PICTURE_FILE, PLAN_FILE, SweepDirectory, SweepPlan
from juggler.experiments.sweep_tables import counts, result_table, rows_for_csv, settings_text
from juggler.experiments.trials import TrialOver, trials_over

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from dataclasses import fields
from typing import Final

from juggler.driver.core.ledger import Counters
from juggler.driver.module_ids import instead
from juggler.driver.record.metrics import Metrics
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.nearest import closest

#: Numbers that the driver adds to those of `Metrics` and of the books.
_OF_THE_DRIVER: Final = (
    "wall_time",
    "training_time",
    "updates",
    "num_env_runners",
    "num_learners",
    "restarts",
)
#: The end of the names of what evaluations have.
_OF_EVALUATIONS: Final = "evaluation_return_mean"
#: Tables: what is in them depends on the algorithm, the environment or the workers.
_TABLES: Final = (
    "modules",
    "info",
    "custom",
    "by_module",
    "by_agent",
    "league",
    "seconds",
    "inference",
    "env_steps_dropped",
    "learner_steps",
)


def plain_metrics() -> frozenset[str]:
    """Those of every run that are numbers by themselves."""
    gathered = Metrics().line(1.0, 0).keys()
    books = {f"env_steps_{each.name}" for each in fields(Counters)}
    return frozenset({*_OF_THE_DRIVER, *gathered, *books}.difference(_TABLES))


def must_be_a_metric(name: str, config: RunConfig) -> None:
    """
    Args:
        name: of a number in lines of metrics, flat.
        config: of the run.

    Raises:
        ConfigError: no line will have such a number, as far as that is known before a run.
    """
    table, slash, rest = name.partition("/")
    if name.endswith(_OF_EVALUATIONS) and not config.driver.evaluation_seconds:
        raise ConfigError(
            f"metric = {name!r}: a run evaluates only with evaluation_seconds: give it, and less "
            "than a trial takes"
        )
    if name in plain_metrics():
        return
    first = config.module_ids[0]
    # What is not named by Gymnasium may have several agents, and so modules with names of its own.
    is_known = bool(config.agents.agents) or ":" not in config.env_runner.env
    is_alone = is_known and config.agents.acting_ids == (DEFAULT_MODULE,)
    if is_alone and table == "modules" and rest.partition("/")[0] != DEFAULT_MODULE:
        raise ConfigError(
            f"metric = {name!r}: a metric of the learner is named modules/{DEFAULT_MODULE}/NAME, "
            f"such as modules/{DEFAULT_MODULE}/grad_norm"
        )
    if slash and table in ("modules", "by_module") and is_known and not config.agents.league:
        _must_be_of_a_module(name, config)
    if slash and table == "modules":
        return _must_be_of_a_learner(name, config)
    if slash and table in _TABLES:
        return
    near = closest(name, plain_metrics())
    hint = f" (did you mean {near!r}?)" if near else ""
    raise ConfigError(
        f"metric = {name!r}: lines of metrics have no such number{hint}. Those of a learner are "
        f"named as modules/{first}/grad_norm is, those of an environment's infos info/NAME/mean"
    )


def _must_be_of_a_module(name: str, config: RunConfig) -> None:
    """
    Args:
        name: as "modules/hunter/entropy" or "by_module/hunter/updates".
        config: of a run whose modules are known: the environment does not settle them, and no
            players come and go.

    Raises:
        ConfigError: there is no such module.
    """
    agents = config.agents
    table, module_id = name.split("/", 2)[:2]
    if table == "by_module" and len(agents.acting_ids) == 1:
        raise ConfigError(
            f"metric = {name!r}: lines have by_module with several modules, and there is one "
            f"alone, {agents.acting_ids[0]!r}: name a number of the run, as episode_return_mean is"
        )
    known = config.module_ids if table == "modules" else agents.acting_ids
    if module_id not in known:
        which = "module that is trained" if table == "modules" else "module"
        raise ConfigError(
            f"metric = {name!r}: there is no {which} {module_id!r}{instead(module_id, known)}"
        )


def _must_be_of_a_learner(name: str, config: RunConfig) -> None:
    """
    Args:
        name: as "modules/default/entropy"; which modules there are may only show in the run.
        config: of the run.

    Raises:
        ConfigError: learners of the module's algorithm have no such number.
    """
    _, module_id, metric = (*name.split("/", 2), "")[:3]
    is_known = module_id in {*config.module_ids, *config.agents.modules}
    learner = (config.of(module_id) if is_known else config).learner
    known = learner.metric_names()
    if ":" in learner.algorithm or metric in known:  # nobody knows the metrics of one's own
        return
    near = closest(metric, known)
    hint = f" (did you mean {near!r}?)" if near else ""
    raise ConfigError(
        f"metric = {name!r}: {learner.algorithm} has no metric {metric!r} as it is configured"
        f"{hint}. It has {', '.join(sorted(known))}"
    )


_COLUMNS = 3


def write_picture(
    path: Path, over: Sequence[TrialOver], plan: SweepPlan, axes: Sequence[Axis]
) -> Path:
    """Draw a sweep into its directory.

    Args:
        path: of the directory.
        over: the trials, of which one at least is complete.
        plan: of the sweep.
        axes: its space.
    """
    figure = draw(over, plan, axes)
    file = path / PICTURE_FILE
    figure.savefig(file)
    return file


def draw(over: Sequence[TrialOver], plan: SweepPlan, axes: Sequence[Axis]) -> Figure:
    """The same as a figure of Matplotlib."""
    # Matplotlib takes half a second; without pyplot it needs no window system.
    from matplotlib.figure import Figure

    rows = -(-(len(axes) + 1) // _COLUMNS)
    figure = Figure(figsize=(13, 3.6 * rows), dpi=140, layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).flat
    shown = [each for each in over if each.value is not None]
    _draw_course(next(panels), shown, plan)
    for axis in axes:
        _draw_key(next(panels), shown, plan, axis)
    for panel in panels:
        panel.set_visible(False)
    return figure


def _draw_course(panel: Axes, shown: Sequence[TrialOver], plan: SweepPlan) -> None:
    """The trials in their order, and the best one so far."""
    from matplotlib.ticker import MaxNLocator

    _scatter(panel, [float(each.number) for each in shown], shown)
    good = sorted((each for each in shown if each.complete), key=lambda each: each.number)
    values = np.array([each.value for each in good], dtype=np.float64)  # [complete trials]
    best = (np.minimum if plan.minimize else np.maximum).accumulate(values)
    numbers = [each.number for each in good]
    panel.step(numbers, best, where="post", color=COLOURS[1], linewidth=1.5, label="best so far")
    dress(panel, "trial", plan.metric)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_key(panel: Axes, shown: Sequence[TrialOver], plan: SweepPlan, axis: Axis) -> None:
    """The trials over one key."""
    chosen = [each.settings[axis.key] for each in shown]
    if isinstance(axis, Range):
        if axis.log:
            panel.set_xscale("log")
        _scatter(panel, chosen, shown)
        dress(panel, axis.key, plan.metric, numbers_on_x=not axis.log)
        _bound(panel, axis)
        return
    names = [str(name) for name in axis.names()]
    places = [float(names.index(str(name))) for name in chosen]
    _scatter(panel, places, shown)
    dress(panel, axis.key, plan.metric, numbers_on_x=False)
    panel.set_xticks(range(len(names)), names)
    panel.set_xlim(-0.5, len(names) - 0.5)


def _bound(panel: Axes, axis: Range) -> None:
    """Show the whole range of a key, and a little more."""
    low, high = np.log([axis.low, axis.high]) if axis.log else (axis.low, axis.high)
    around = 0.03 * (high - low)
    limits = low - around, high + around
    panel.set_xlim(*(np.exp(limits) if axis.log else limits))


def _scatter(panel: Axes, x: Sequence[float], shown: Sequence[TrialOver]) -> None:
    for complete, mark, colour, label in (
        (True, "o", COLOURS[0], "complete"),
        (False, "x", GREY, "pruned"),
    ):
        points = [
            (at, each.value)
            for at, each in zip(x, shown, strict=True)
            if each.complete == complete and each.value is not None
        ]
        if points:
            panel.plot(*zip(*points, strict=True), mark, color=colour, ms=5, label=label)


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
