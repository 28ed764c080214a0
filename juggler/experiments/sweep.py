"""Sweeps: many short runs whose settings Optuna chooses."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from juggler.driver.callbacks import MetricsLine
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.core.ledger import Counters
from juggler.driver.driver_config import instead
from juggler.driver.given_config import differing, read_toml
from juggler.driver.record.metrics import Metrics
from juggler.driver.record.run_directory import RunDirectoryError, to_toml
from juggler.driver.record.wording import here, number
from juggler.experiments.runs import (
    RunEnd,
    RunProcess,
    Runs,
    configured,
    make_directory,
    must_be_some,
    must_not_record,
)
from juggler.experiments.space import Axis, Value, configurations, parse_space, placed, settings_in
from juggler.experiments.style import COLOURS, GREY, dress
from juggler.runtime.checkpoints.checkpoint import write_synced
from juggler.runtime.installing import installing
from juggler.runtime.nearest import closest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from optuna import Study, Trial

PLAN_FILE: Final = "sweep.toml"
TRIALS: Final = 20
_STOPS: Final = ("stop_return", "stop_steps", "stop_seconds")
_METRIC: Final = "episode_return_mean"
_POINTS: Final = 10  # of a trial, at which it is compared with others
_UNPRUNED_POINTS: Final = 2  # at first, where returns say little
_MEDIAN_OF: Final = 5  # complete trials at least
_MOST_LISTED: Final = 10_000  # settings of a space; of more, hardly any comes twice
_MOST_FAILED: Final = 3  # trials, before any has ended well
_MOST_ROWS: Final = 10  # of the result
_COLUMNS: Final = 3  # of the picture
#: Attributes of Optuna's trials: the number of the run, and how it ended, for people.
_RUN, _SAID = "run", "said"


class SweepFailed(Exception):
    """Failed first trials of a sweep; the message says where to look."""


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
        return f"best: {_words(self.settings)} with {number(self.value)}, in {self.config}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What a sweep varies, and how its trials are compared."""

    run: dict[str, Any]  # what the configuration of every trial gives, flat
    stops: dict[str, Any]  # the stop conditions that the best settings are written with
    space: dict[str, str | list[Any]]  # by key, its values as they were given
    metric: str  # a key of a line of metrics, flat
    minimize: bool  # the least is the best
    prune: bool  # trials that fall behind are ended
    trials: int  # how many there are to be

    def share_done(self, line: MetricsLine) -> float:
        """Return the finished share of a trial at a line."""
        limits = (("stop_steps", "env_steps_trained"), ("stop_seconds", "training_time"))
        shares = [
            line.get(measure, 0) / self.run[stop]
            for stop, measure in limits
            if self.run.get(stop) not in (None, "none")
        ]
        return float(min(1.0, max(shares)))


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
    """Look for good settings with many short runs.

    Optuna chooses them, and `juggler train` trains each in a process of its own, so classes of a
    script have to be named: "my_file:MyEnv".

    Ctrl-C ends the trials in order; `resume_sweep` resumes them.

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
        {} if space is None else space,
        metric=metric,
        trials=trials,
        minimize=minimize,
        prune=prune,
    )
    run_dir = final.driver.run_dir
    return start_sweep(plan, Path(run_dir) if run_dir else None, jobs)


def resume_sweep(
    sweep_dir: str | Path, *, trials: int | None = None, jobs: int | None = None
) -> SweepResult | None:
    """Resume a sweep, first the trials that were running when it ended.

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
    _optuna_is_there()
    must_be_some("jobs", jobs)
    must_be_some("trials", trials)
    file = Path(sweep_dir) / PLAN_FILE
    if not file.is_file():
        raise RunDirectoryError(f"{sweep_dir} has no {PLAN_FILE}: give the directory of a sweep")
    try:
        plan = msgspec.convert(read_toml(file), SweepPlan)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from error
    plan = dataclasses.replace(plan, trials=trials or plan.trials)
    return _sweep(file.parent, plan, parse_space(plan.space, plan.run), jobs)


def start_sweep(plan: SweepPlan, path: Path | None, jobs: int | None) -> SweepResult | None:
    """Start a new sweep. See `sweep`."""
    _optuna_is_there()
    must_be_some("jobs", jobs)
    axes = parse_space(plan.space, plan.run)
    env, content = str(plan.run.get("env", "")), to_toml(asdict(plan))
    made = make_directory(path, "sweep", env, PLAN_FILE, content, "juggler sweep --resume")
    return _sweep(made, plan, axes, jobs)


def plan_of(
    config: RunConfig,
    given: Collection[str],
    said: Collection[str],
    base: RunConfig,
    space: Mapping[str, str | Sequence[Any]],
    *,
    metric: str,
    trials: int,
    **how: bool,
) -> SweepPlan:
    """Make the plan of a new sweep.

    Args:
        given: the keys that were given, in a file or with the sweep.
        said: the keys that were given with the sweep itself.
        base: the configuration without these.
        how: `minimize` and `prune`, as in `SweepPlan`.

    Raises:
        ConfigError: trials would have no end, or different ones, or record what they sample, or
            runs have no such metric.
    """
    flat, before = config.flat(), base.flat()
    run = {key: flat[key] for key in flat if key in given and key != "run_dir"}
    # Trials that reach it sooner would be compared at another number of steps.
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
    plain = _plain(space)
    axes = parse_space(plain, run)  # before anything is made
    for each in configurations(axes, run):
        must_not_record(each)
        must_be_a_metric(metric, each)
    for key in _STOPS:
        if key in plain:
            raise ConfigError(f"--space {key}: trials are compared at equal lengths; leave it out")
    run = {key: "none" if value is None else value for key, value in run.items()}
    return SweepPlan(run=run, stops=stops, space=plain, metric=metric, trials=trials, **how)


def _plain(space: object) -> dict[str, str | list[Any]]:
    """Return a space as files hold it."""
    example = 'such as {"lr": "1e-4..1e-2:log", "model.hidden_sizes": [[64], [256]]}'
    if not isinstance(space, Mapping):
        raise ConfigError(f"space = {space!r}: give a dict, {example}")
    for key, value in space.items():
        if isinstance(value, Mapping) or not isinstance(value, Iterable):
            raise ConfigError(f"space: {key} = {value!r}: give a text or a list, {example}")
    return {
        key.strip().replace("-", "_"): value if isinstance(value, str) else list(value)
        for key, value in space.items()
    }


#: Numbers that the driver adds to those of `Metrics` and of the books.
_OF_THE_DRIVER: Final = (
    *("wall_time", "training_time", "updates", "num_env_runners", "num_learners", "restarts"),
)
#: Tables: their content depends on the algorithm, the environment or the workers.
_TABLES: Final = (
    *("modules", "info", "custom", "by_module", "by_agent", "league", "seconds", "inference"),
    *("env_steps_dropped", "learner_steps"),
)


def plain_metrics() -> frozenset[str]:
    """Return the keys of every run's lines that are numbers by themselves."""
    gathered = Metrics().line(1.0, 0).keys()
    books = {f"env_steps_{each.name}" for each in fields(Counters)}
    return frozenset({*_OF_THE_DRIVER, *gathered, *books}.difference(_TABLES))


def must_be_a_metric(name: str, config: RunConfig) -> None:
    """Check that runs will have this metric, if known."""
    where, agents = f"metric = {name!r}: ", config.agents
    table, _, rest = name.partition("/")
    module_id, _, metric = rest.partition("/")
    if name.endswith("evaluation_return_mean") and not config.driver.evaluation_seconds:
        raise ConfigError(
            f"{where}a run evaluates only with evaluation_seconds: give it, and less than a trial "
            "takes"
        )
    if name in plain_metrics():
        return
    if not rest or table not in _TABLES:
        first = config.module_ids[0]
        raise ConfigError(
            f"{where}lines of metrics have no such number{_meant(name, plain_metrics())}. Those of "
            f"a learner are named as modules/{first}/grad_norm is, those of an environment's infos "
            "info/NAME/mean"
        )
    # An environment that Gymnasium does not name may settle the modules, and so does a league.
    is_settled = bool(agents.agents) or ":" not in config.env_runner.env
    if table in ("modules", "by_module") and is_settled and not agents.league:
        known = config.module_ids if table == "modules" else agents.acting_ids
        if table == "by_module" and len(known) == 1:
            raise ConfigError(
                f"{where}lines have by_module with several modules, and there is one alone, "
                f"{known[0]!r}: name a number of the run, as episode_return_mean is"
            )
        if module_id not in known:
            which = "module that is trained" if table == "modules" else "module"
            raise ConfigError(
                f"{where}there is no {which} {module_id!r}{instead(module_id, known)}"
            )
    if table == "modules":
        is_known = module_id in {*config.module_ids, *agents.modules}
        learner = (config.of(module_id) if is_known else config).learner
        names = learner.metric_names()
        if ":" not in learner.algorithm and metric not in names:  # one's own has others
            raise ConfigError(
                f"{where}{learner.algorithm} has no metric {metric!r} as it is configured"
                f"{_meant(metric, names)}. It has {', '.join(sorted(names))}"
            )


def _meant(name: str, known: Collection[str]) -> str:
    near = closest(name, known)
    return f" (did you mean {near!r}?)" if near else ""


def _optuna_is_there() -> None:
    """Check that Optuna is installed."""
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"a sweep needs the package optuna: {installing('sweep')}") from error


def _sweep(
    directory: Path, plan: SweepPlan, axes: Sequence[Axis], jobs: int | None
) -> SweepResult | None:
    is_whole_grid = (settings := settings_in(axes)) <= plan.trials
    if is_whole_grid:
        plan = dataclasses.replace(plan, trials=int(settings))
    trials = Sweep(directory, plan, axes, jobs)
    with trials.held():
        trials.begin()
        try:
            once = ", one of each setting" if is_whole_grid else ""
            trials.run_all(f"sweep of {plan.trials} trials{once}")
            trials.must_be_good()
        finally:
            result = trials.conclude()
        return result


@dataclass(slots=True)
class _AtWork:
    """A trial at work."""

    trial: Trial  # Optuna's
    number: int  # of its run, which stays the same when the sweep is resumed
    points: int = 0  # how many tenths of it were reported
    value: float | None = None  # the newest that it is compared by; None: it has had none
    pruned: bool = False  # it was told to stop

    def report(self, value: float, points: int) -> None:
        """Report a tenth, and skipped ones before it with the value then.

        Optuna compares trials that have reported the same one.
        """
        if self.value is not None:
            for skipped in range(self.points + 1, points):
                self.trial.report(self.value, skipped)
        self.trial.report(value, points)
        self.points = points


@dataclass(frozen=True, slots=True)
class TrialOver:
    """A trial that is over, as Optuna has recorded it."""

    number: int
    # What trials are compared by: of a pruned one, the last that it reported; None: none
    value: float | None
    complete: bool  # it was neither pruned nor failed
    said: str  # why not, for people; "" if it is complete
    # By key, the values that it had. What is not a number or a word is JSON.
    settings: Mapping[str, Any]


class Sweep(Runs):
    """The trials of a sweep. Its directory has:

    - `sweep.toml`: what it was started with;
    - `study.db`: Optuna's study, in SQLite;
    - `trials/`: of each trial its configuration, its run directory, and what it printed;
    - `best.toml`, `trials.csv`, `sweep.png`: the result.
    """

    file = PLAN_FILE

    def __init__(
        self, directory: Path, plan: SweepPlan, axes: Sequence[Axis], jobs: int | None
    ) -> None:
        going_on = f"juggler sweep --resume {here(directory)}"
        super().__init__(directory, RunConfig.from_flat(plan.run), jobs, going_on)
        self._trials = directory / "trials"
        self._plan = plan
        self._axes = axes
        self._at_work: dict[int, _AtWork] = {}  # by process id
        self._random = Random(int(plan.run.get("seed", 0)))
        self._failed = 0
        self._said = ""  # how the last trial failed

    def begin(self) -> None:
        """Open the study, and enqueue trials that were interrupted."""
        from optuna.trial import TrialState

        self._trials.mkdir(exist_ok=True)
        self._study = _open_study(self.directory / "study.db", self._plan)
        trials = self._study.get_trials(deepcopy=False)
        self._next_run = max((each.user_attrs.get(_RUN, -1) for each in trials), default=-1) + 1
        for trial in trials:
            if trial.state == TrialState.RUNNING:
                self._study.tell(trial.number, state=TrialState.FAIL)
                if _RUN in trial.user_attrs:  # else it had no run yet
                    attributes = {_RUN: trial.user_attrs[_RUN]}
                    self._study.enqueue_trial(trial.params, user_attrs=attributes)
        before = self._over()
        self._begun = len(before)
        self._one_was_good = any(not each.said.startswith("failed") for each in before)

    def next(self) -> RunProcess | None:
        if self._begun >= self._plan.trials or self._hopeless:
            return None
        self._begun += 1
        trial, values = self._asked()
        number = int(trial.user_attrs.get(_RUN, self._next_run))
        self._next_run = max(self._next_run, number + 1)
        trial.set_user_attr(_RUN, number)
        config = self._trials / f"{number:03}.toml"
        config.write_bytes(to_toml(placed(self._plan.run, values)))
        run = RunProcess(config, self._trials / f"{number:03}")
        self._at_work[run.pid] = _AtWork(trial, number)
        return run

    def _asked(self) -> tuple[Trial, dict[str, Value]]:
        """Ask for a trial and its values; small spaces repeat none."""
        from optuna.trial import TrialState

        untried: list[tuple[Any, ...]] | None = None
        if settings_in(self._axes) <= _MOST_LISTED:
            had = [each.settings for each in self._over()]
            had += [each.trial.params for each in self._at_work.values()]
            tried = {tuple(each.get(axis.key) for axis in self._axes) for each in had}
            every = itertools.product(*(axis.names() for axis in self._axes))
            untried = [each for each in every if each not in tried]
        space = {axis.key: axis.distribution() for axis in self._axes}
        while True:
            trial = self._study.ask(space)
            setting = tuple(trial.params[key] for key in space)
            if untried is None or setting in untried:
                return trial, {axis.key: axis.meant(trial.params[axis.key]) for axis in self._axes}
            self._study.tell(trial, state=TrialState.FAIL)
            other = self._random.choice(untried)
            self._study.enqueue_trial(dict(zip(space, other, strict=True)))

    def heard(self, run: RunProcess) -> None:
        """Report new metrics of a trial, and end it if behind."""
        known = self._at_work[run.pid]
        for line in run.new_lines():
            value = _measured(line, self._plan.metric)
            if value is None or known.pruned:
                continue
            points = int(_POINTS * self._plan.share_done(line))
            if points > known.points:
                known.report(value, points)
                if self._plan.prune and points < _POINTS and known.trial.should_prune():
                    known.pruned = True
                    run.stop()
            known.value = value

    def over(self, run: RunProcess, end: RunEnd) -> None:
        from optuna.trial import TrialState

        known, metric = self._at_work.pop(run.pid), self._plan.metric
        value = _measured(end.summary, metric)
        problem = end.problem or _why_not_compared(end.summary, metric)
        # One that had ended by itself before it heard of it is complete.
        if known.pruned and end.interrupted:
            said, state = f"pruned after {known.points} tenths", TrialState.PRUNED
        elif end.interrupted:
            return  # it is resumed with the sweep
        elif problem:
            said, state, value = f"failed: {problem}", TrialState.FAIL, None
        else:
            said, state = "", TrialState.COMPLETE
        known.trial.set_user_attr(_SAID, said)
        self._study.tell(known.trial, value if state == TrialState.COMPLETE else None, state)
        failed = state == TrialState.FAIL
        self._failed += failed
        self._said = said or self._said
        self._one_was_good |= not failed
        measured = "" if value is None else f"  {metric} {number(value)}"
        how = f"  {said}" if said else ""
        settings = _words(known.trial.params)
        line = f"trial {known.number:>3}{measured}  {settings}{how}"
        self.say(line, "red" if failed else "")

    def table(self, running: Sequence[RunProcess], title: str) -> Table:
        over = self._over()
        title = f"sweep: {len(over)} of {self._plan.trials} trials are over{title}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("trial", justify="right")
        table.add_column("", width=16)
        table.add_column(self._plan.metric, justify="right")
        table.add_column("settings", overflow="fold")
        for run in running:
            known, line = self._at_work[run.pid], run.newest
            share = self._plan.share_done(line) if line else 0.0
            bar = ProgressBar(total=1.0, completed=share, width=16)
            value, settings = _measured(line, self._plan.metric), _words(known.trial.params)
            table.add_row(f"{known.number}", bar, number(value), settings)
        if over and over[0].complete:
            best = over[0]
            table.add_row(
                f"{best.number}", "best so far", number(best.value), _words(best.settings)
            )
        return table

    def must_be_good(self) -> None:
        """Check that not all of the first trials have failed."""
        if self._hopeless:
            raise SweepFailed(
                f"the first {self._failed} trials have failed, and no others were started. The "
                f"last one {self._said}. What they printed is in {self._trials}/*.log"
            )

    @property
    def _hopeless(self) -> bool:
        return self._failed >= _MOST_FAILED and not self._one_was_good

    def _over(self) -> list[TrialOver]:
        """Return finished trials, the best first, others in order."""
        found = []
        for trial in self._study.get_trials(deepcopy=False):
            if not trial.state.is_finished() or _SAID not in trial.user_attrs:
                continue  # it is at work, or went on as another after a resume
            reports, said = trial.intermediate_values, trial.user_attrs[_SAID]
            is_pruned = said.startswith("pruned") and reports
            value = reports[max(reports)] if is_pruned else trial.value
            number = trial.user_attrs[_RUN]
            found.append(TrialOver(number, value, not said, said, dict(trial.params)))
        sign = 1 if self._plan.minimize else -1

        def rank(trial: TrialOver) -> tuple[bool, float]:
            worth = sign * (trial.value or 0.0) if trial.complete else trial.number
            return not trial.complete, worth

        return sorted(found, key=rank)

    def conclude(self) -> SweepResult | None:
        """Write the results, and show them."""
        over, plan = self._over(), self._plan
        if not over:
            return None
        rows = [
            {
                "trial": each.number,
                plan.metric: each.value,
                **{key: each.settings.get(key) for key in plan.space},
                "ended": each.said or "complete",
            }
            for each in sorted(over, key=lambda each: each.number)
        ]
        table = self.directory / "trials.csv"
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        pruned = sum(each.said.startswith("pruned") for each in over)
        complete = sum(each.complete for each in over)
        failed = len(over) - complete - pruned
        self.say(f"{complete} trials complete, {pruned} pruned, {failed} failed")
        self.show(_result_table(over, plan))
        best = over[0]
        if not best.complete or best.value is None:
            return None
        chosen = {axis.key: axis.meant(best.settings[axis.key]) for axis in self._axes}
        values = {key: value for key, value in plan.run.items() if key not in _STOPS}
        about = f"# The best of {len(over)} trials, {best.number}: {plan.metric} "
        about += f"{number(best.value)}\n"
        settings = differing(placed({**values, **plan.stops}, chosen), plan.space)
        config = self.directory / "best.toml"
        write_synced(config, about.encode() + to_toml(settings))
        picture = self.directory / "sweep.png"
        _draw(picture, over, plan, self._axes)
        self.say(f"table: {here(table)}\nplot: {here(picture)}")
        self.say(f"best settings: {here(config)}; to train with them: juggler train {here(config)}")
        return SweepResult(self.directory, chosen, best.value, config, rows)


def _open_study(file: Path, plan: SweepPlan) -> Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=f"sqlite:///{file.absolute()}",
        study_name="sweep",
        direction="minimize" if plan.minimize else "maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(
            n_startup_trials=_MEDIAN_OF, n_warmup_steps=_UNPRUNED_POINTS, n_min_trials=_MEDIAN_OF
        ),
    )
    # With another seed after a resume, or the same trials would come again.
    seed = int(plan.run.get("seed", 0)) + len(study.trials)
    study.sampler = optuna.samplers.TPESampler(seed=seed)
    return study


def _measured(line: MetricsLine, metric: str) -> float | None:
    """Return the metric of a line or summary; None: it is missing."""
    value = line.get(metric)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _why_not_compared(summary: MetricsLine, metric: str) -> str:
    """Word why an ended run cannot be compared, or ""."""
    value = _measured(summary, metric)
    if value is None:
        numbers = [key for key in summary if _measured(summary, key) is not None]
        # None if nothing was measured, as when no episode has ended.
        return f"it ended without {metric}{'' if metric in summary else _meant(metric, numbers)}"
    tables, end = ("by_agent/", "by_module/"), f"/{metric}"
    of_agents = {
        key: _measured(summary, key) or 0.0
        for key in summary
        if key.startswith(tables) and key.endswith(end)
    }
    # Zero but for how sums are rounded: what some agents win, others lose.
    if (most := max(map(abs, of_agents.values()), default=0.0)) and abs(value) <= 1e-9 * most:
        modules = [key for key in of_agents if key.startswith("by_module/")]
        example = f", such as {modules[0]}" if modules else ""
        return (
            f"what its agents get adds up to 0, so {metric} says nothing of the settings: compare "
            f"trials by another metric{example}"
        )
    return ""


def _result_table(over: Sequence[TrialOver], plan: SweepPlan) -> Table:
    """Show the best trials, with a column for each key."""
    table = Table(box=None, pad_edge=False)
    table.add_column("trial", justify="right")
    table.add_column(plan.metric, justify="right")
    for key in plan.space:
        table.add_column(key, justify="right", overflow="fold")
    table.add_column("", overflow="fold")
    for each in over[:_MOST_ROWS]:
        shown = [_short(each.settings.get(key, "-")) for key in plan.space]
        table.add_row(f"{each.number}", number(each.value), *shown, Text(each.said, style="dim"))
    if len(over) > _MOST_ROWS:
        table.caption = f"and {len(over) - _MOST_ROWS} more: trials.csv has all of them"
        table.caption_justify = "left"
    return table


def _words(settings: Mapping[str, Any]) -> str:
    """Word settings in a line: "lr=0.00123 entropy_coefficient=0"."""
    return " ".join(f"{key}={_short(value)}" for key, value in settings.items())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _draw(file: Path, over: Sequence[TrialOver], plan: SweepPlan, axes: Sequence[Axis]) -> None:
    """Draw trials in order, with the best so far, and over keys."""
    # Matplotlib takes half a second; without pyplot it needs no window system.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = -(-(len(axes) + 1) // _COLUMNS)
    figure = Figure(figsize=(13, 3.6 * rows), dpi=140, layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).flat
    shown = [each for each in over if each.value is not None]
    panel = next(panels)
    _scatter(panel, [each.number for each in shown], shown)
    good = sorted((each for each in shown if each.complete), key=lambda each: each.number)
    values = np.array([each.value for each in good], dtype=np.float64)  # [complete trials]
    best = (np.minimum if plan.minimize else np.maximum).accumulate(values)
    numbers = [each.number for each in good]
    panel.step(numbers, best, where="post", color=COLOURS[1], linewidth=1.5, label="best so far")
    dress(panel, "trial", plan.metric)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis, panel in zip(axes, panels, strict=False):
        chosen = [each.settings[axis.key] for each in shown]
        names = [str(name) for name in axis.names()] if axis.values else []
        if axis.log:
            panel.set_xscale("log")
        places = [names.index(str(name)) for name in chosen] if names else chosen
        _scatter(panel, places, shown)
        dress(panel, axis.key, plan.metric, numbers_on_x=not (names or axis.log))
        if names:
            panel.set_xticks(range(len(names)), names)
            panel.set_xlim(-0.5, len(names) - 0.5)
        else:  # the whole range
            panel.set_xlim(axis.low, axis.high)
    for panel in figure.get_axes()[len(axes) + 1 :]:
        panel.set_visible(False)
    figure.savefig(file)


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
