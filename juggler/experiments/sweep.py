"""Sweeps: many short runs whose settings Optuna chooses."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from juggler.driver.callbacks import MetricsLine
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import differing, read_toml
from juggler.driver.core.ledger import Counters
from juggler.driver.driver_config import instead
from juggler.driver.reporting.metrics import Metrics
from juggler.driver.reporting.run_directory import to_toml
from juggler.driver.reporting.wording import here, number
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
from juggler.experiments.space import Axis, Value, configurations, parse_space, placed, settings_in
from juggler.runtime.checkpoints.checkpoint import write_synced
from juggler.runtime.install_commands import installing
from juggler.runtime.near_matches import all_of, closest

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

PLAN_FILE: Final = "sweep.toml"
TRIALS: Final = 20
_STOPS: Final = ("stop_return", "stop_steps", "stop_seconds")
_METRIC: Final = "episode_return_mean"
_POINTS: Final = 10  # points of a trial at which it is compared with other trials
_UNPRUNED_POINTS: Final = 2  # first points, at which returns mean little
_MEDIAN_OF: Final = 5  # minimum number of complete trials
_MOST_LISTED: Final = 10_000  # settings of a space; larger spaces hardly repeat any
_MOST_FAILED: Final = 3  # failed trials before any has succeeded
_MOST_ROWS: Final = 10  # of the result
#: Attributes of Optuna's trials: the number of the run, and its end, for people.
_RUN, _ENDED = "run", "said"


class SweepFailed(Exception):
    """A sweep's first trials failed; the message says where to look."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Result of a sweep.

    Attributes:
        sweep_dir: its directory.
        settings: the best settings, by key.
        value: metric of the best trial.
        config: a file with the best settings, for `juggler.train`.
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
    """Plan of a sweep: what varies, and how trials are compared."""

    run: dict[str, Any]  # configuration of every trial, flat
    stops: dict[str, Any]  # stop conditions for the file of the best settings
    space: dict[str, str | list[Any]]  # by key, the given values
    metric: str  # a key of a line of metrics, flat
    minimize: bool  # the smallest is the best
    prune: bool  # end trials that fall behind
    trials: int  # total number of trials

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

    Optuna chooses settings, and `juggler train` runs each trial in its own process, so give
    classes of a script by name: "my_file:MyEnv". Ctrl-C ends the trials normally; `resume_sweep`
    resumes them.

    Args:
        config: as in `juggler.train`.
        space: by key of the configuration, "1e-4..1e-2:log", "128..1024:128" or a list of values.
            Keys of tables have dots: "model.hidden_sizes".
        trials: total number of trials.
        jobs: number at once; None: as many as the cores allow.
        metric: key of metrics lines by which trials are compared.
        minimize: the smallest is the best.
        prune: end trials that fall behind the median of the other trials.
        keys: of the configuration. `stop_steps` or `stop_seconds` is the length of a trial, and
            everything is written into `run_dir`.

    Returns:
        The best settings; None: no complete trial.

    Raises:
        ConfigError: a key or a value is wrong; trials would never end, have different lengths or
            record their steps; runs have no such metric; or Optuna is not installed.
        SweepFailed: the first trials have all failed.
        KeyboardInterrupt: on Ctrl-C.
    """
    base, final, given = configured(config, keys)
    flat, run_dir = final.flat(), final.driver.run_dir
    plain = _comparable(space, flat)
    _must_be_possible(trials, jobs)
    run = {key: flat[key] for key in flat if key in given and key != "run_dir"}
    # Trials that reach it earlier would be compared at another number of steps.
    run["stop_return"] = flat["stop_return"] if "stop_return" in keys else "none"
    # All of the space is checked before anything is made.
    axes = parse_space(plain, run)
    for each in configurations(axes, run):
        must_not_record(each)
        must_be_a_metric(metric, each)
    run = {key: "none" if value is None else value for key, value in run.items()}
    plan = SweepPlan(
        run=run,
        stops=_stops(base.flat()) or _stops(flat),
        space=plain,
        metric=metric,
        minimize=minimize,
        prune=prune,
        trials=trials,
    )
    # The plan is all that a resumed sweep reads.
    of_plan = "sweep", final.env_runner.env, PLAN_FILE, to_toml(asdict(plan))
    path = Path(run_dir) if run_dir else None
    made = make_directory(path, *of_plan, "juggler sweep --resume")
    return _sweep(made, plan, axes, jobs)


def _stops(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {key: flat[key] for key in _STOPS if flat[key] is not None}


def resume_sweep(
    sweep_dir: str | Path, *, trials: int | None = None, jobs: int | None = None
) -> SweepResult | None:
    """Resume a sweep, first the trials that were running.

    Args:
        sweep_dir: directory of the sweep.
        trials: total number, including earlier trials; None: as before.
        jobs: as in `sweep`.

    Raises:
        RunDirectoryError: the directory has no sweep.
        ConfigError: a number is wrong, or Optuna is not installed.
        SweepFailed: as for `sweep`.
        KeyboardInterrupt: on Ctrl-C.
    """
    _must_be_possible(trials, jobs)
    file = must_have(Path(sweep_dir), PLAN_FILE, "a sweep")
    try:
        plan = msgspec.convert(read_toml(file), SweepPlan)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from error
    plan = dataclasses.replace(plan, trials=trials or plan.trials)
    return _sweep(file.parent, plan, parse_space(plan.space, plan.run), jobs)


def _comparable(space: object, flat: Mapping[str, Any]) -> dict[str, str | list[Any]]:
    """Check that trials can be compared; return a space as in files."""
    example = 'such as {"lr": "1e-4..1e-2:log", "model.hidden_sizes": [[64], [256]]}'
    if not space:
        raise ConfigError("a sweep needs a space, such as --space lr=1e-4..1e-2:log")
    if not isinstance(space, Mapping):
        raise ConfigError(f"space = {space!r}: give a dict, {example}")
    if flat["stop_steps"] is None and flat["stop_seconds"] is None:
        raise ConfigError(
            "trials are compared at equal lengths: give their length, such as "
            "stop_steps = 50000 or stop_seconds = 30"
        )
    # Names of options are taken for keys, too.
    plain: dict[str, str | list[Any]] = {}
    for name, value in space.items():
        key = name.strip().replace("-", "_")
        if key in (*_STOPS, "run_dir"):
            reason = "trials have equal lengths, and directories of their own"
            raise ConfigError(f"--space {key}: {reason}; leave it out")
        if isinstance(value, Mapping) or not isinstance(value, Iterable):
            raise ConfigError(f"space: {name} = {value!r}: give a text or a list, {example}")
        plain[key] = value if isinstance(value, str) else list(value)
    return plain


#: Numbers that the driver adds to `Metrics` and the books.
_OF_THE_DRIVER: Final = (
    *("wall_time", "training_time", "updates", "num_env_runners", "num_learners", "restarts"),
)
#: Tables: their content depends on the algorithm, the environment or the workers.
_TABLES: Final = (
    *("modules", "info", "custom", "by_module", "by_agent", "league", "seconds", "inference"),
    *("env_steps_dropped", "learner_steps"),
)


def plain_metrics() -> frozenset[str]:
    """Return the metrics keys that are plain numbers in every run."""
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
            f"{where}a run evaluates only with evaluation_seconds: set it to less than a trial "
            "takes"
        )
    # Every line has these; what a table has depends on the run.
    if name in plain_metrics():
        return
    if not rest or table not in _TABLES:
        first = config.module_ids[0]
        raise ConfigError(
            f"{where}metrics lines have no such number{_meant(name, plain_metrics())}. Numbers of "
            f"a learner are named like modules/{first}/grad_norm, numbers of an environment's "
            "infos like info/NAME/mean"
        )
    # Environments unknown to Gymnasium may settle the modules, and so does a league.
    is_settled = bool(agents.agents) or ":" not in config.env_runner.env
    if table in ("modules", "by_module") and is_settled and not agents.league:
        known = config.module_ids if table == "modules" else agents.acting_ids
        if table == "by_module" and len(known) == 1:
            raise ConfigError(
                f"{where}lines have by_module only with several modules, but there is only "
                f"{known[0]!r}: name a number of the run, such as episode_return_mean"
            )
        if module_id not in known:
            which = "trained module" if table == "modules" else "module"
            raise ConfigError(
                f"{where}there is no {which} {module_id!r}{instead(module_id, known)}"
            )
    # Infos, callbacks and workers decide the numbers of all other tables.
    if table == "modules":
        is_known = module_id in {*config.module_ids, *agents.modules}
        learner = (config.of(module_id) if is_known else config).learner
        names = learner.metric_names()
        if ":" not in learner.algorithm and metric not in names:  # a user's algorithm has its own
            raise ConfigError(
                f"{where}{learner.algorithm} has no metric {metric!r} with this configuration"
                f"{_meant(metric, names)}. It has {', '.join(sorted(names))}"
            )


def _meant(name: str, known: Collection[str]) -> str:
    near = closest(name, known)
    return f" (did you mean {near!r}?)" if near else ""


def _must_be_possible(trials: int | None, jobs: int | None) -> None:
    """Check both numbers, and that Optuna is installed."""
    must_be_some("trials", trials)
    must_be_some("jobs", jobs)
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

    trial: Trial  # Optuna's trial
    number: int  # of its run, which stays the same if the sweep is resumed
    points: int = 0  # number of reported tenths
    value: float | None = None  # newest value of the metric; None: none yet
    pruned: bool = False  # it was asked to stop

    def report(self, value: float, points: int) -> None:
        """Report a tenth, and skipped ones: Optuna compares equal tenths."""
        if self.value is not None:
            for skipped in range(self.points + 1, points):
                self.trial.report(self.value, skipped)
        self.trial.report(value, points)
        self.points = points


class Sweep(Runs):
    """The trials of a sweep. Its directory has:

    - `sweep.toml`: its plan;
    - `study.db`: Optuna's study, in SQLite;
    - `trials/`: configuration, run directory and output of each trial;
    - `best.toml`, `trials.csv`, `sweep.png`, `history.png`: the result.
    """

    file = PLAN_FILE

    def __init__(
        self, directory: Path, plan: SweepPlan, axes: Sequence[Axis], jobs: int | None
    ) -> None:
        resume_command = f"juggler sweep --resume {here(directory)}"
        super().__init__(directory, RunConfig.from_flat(plan.run), jobs, resume_command)
        self._trials = directory / "trials"
        self._plan = plan
        self._axes = axes
        self._at_work: dict[RunProcess, _AtWork] = {}
        self._random = Random(int(plan.run.get("seed", 0)))
        self._failures: list[str] = []  # of the trials that failed, in this process

    def begin(self) -> None:
        """Open the study, and enqueue trials that were interrupted."""
        from optuna.trial import TrialState

        self._trials.mkdir(exist_ok=True)
        self._study = _open_study(self.directory / "study.db", self._plan)
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state == TrialState.RUNNING:
                self._study.tell(trial.number, state=TrialState.FAIL)
                if _RUN in trial.user_attrs:  # otherwise it had no run yet
                    attributes = {_RUN: trial.user_attrs[_RUN]}
                    self._study.enqueue_trial(trial.params, user_attrs=attributes)

    def next(self) -> RunProcess | None:
        over = len(self._over())
        if over + len(self._at_work) >= self._plan.trials or self._hopeless:
            return None
        trial, values = self._asked()
        known = self._study.get_trials(deepcopy=False)
        free = max((each.user_attrs.get(_RUN, -1) for each in known), default=-1) + 1
        number = int(trial.user_attrs.get(_RUN, free))
        trial.set_user_attr(_RUN, number)
        config = self._trials / f"{number:03}.toml"
        config.write_bytes(to_toml(placed(self._plan.run, values)))
        run = RunProcess(config, self._trials / f"{number:03}")
        self._at_work[run] = _AtWork(trial, number)
        return run

    def _asked(self) -> tuple[Trial, dict[str, Value]]:
        """Ask for a trial and its values; small spaces repeat none."""
        from optuna.trial import TrialState

        untried: list[tuple[Any, ...]] | None = None
        if settings_in(self._axes) <= _MOST_LISTED:
            had = [*self._over(), *(each.trial for each in self._at_work.values())]
            tried = {tuple(each.params.get(axis.key) for axis in self._axes) for each in had}
            every = itertools.product(*(axis.names() for axis in self._axes))
            untried = [each for each in every if each not in tried]
        # Optuna's sampler may propose a setting again, which a run of the same seed would repeat.
        space = {axis.key: axis.distribution() for axis in self._axes}
        while True:
            trial = self._study.ask(space)
            setting = tuple(trial.params[key] for key in space)
            if untried is None or setting in untried:
                return trial, {axis.key: axis.meant(trial.params[axis.key]) for axis in self._axes}
            self._study.tell(trial, state=TrialState.FAIL)
            other = self._random.choice(untried)
            self._study.enqueue_trial(dict(zip(space, other, strict=True)))

    def read_new(self, run: RunProcess) -> None:
        """Report a trial's new metrics; end it if it falls behind."""
        known = self._at_work[run]
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

    def over(self, run: RunProcess, end: RunExit) -> None:
        from optuna.trial import TrialState

        known, metric = self._at_work.pop(run), self._plan.metric
        value = _measured(end.summary, metric)
        problem = end.problem or _why_not_compared(end.summary, metric)
        # A trial that ended by itself before it was stopped is complete.
        if known.pruned and end.interrupted:
            why, state = f"pruned after {known.points} tenths", TrialState.PRUNED
        elif end.interrupted:
            return  # it is resumed with the sweep
        elif problem:
            why, state, value = f"failed: {problem}", TrialState.FAIL, None
        else:
            why, state = "", TrialState.COMPLETE
        # Optuna's own states do not say why, and a resumed sweep shows this trial again.
        known.trial.set_user_attr(_ENDED, why)
        self._study.tell(known.trial, value if state == TrialState.COMPLETE else None, state)
        if failed := state == TrialState.FAIL:
            self._failures.append(why)
        measured = "" if value is None else f"{metric} {number(value)}"
        parts = f"trial {known.number:>3}", measured, _words(known.trial.params), why
        self.report("  ".join(filter(None, parts)), "red" if failed else "")

    def table(self, running: Sequence[RunProcess], title: str) -> Table:
        over = self._over()
        title = f"sweep: {len(over)} of {self._plan.trials} trials have ended{title}"
        table = self.make_table(title, "trial", "", self._plan.metric, "settings")
        for run in running:
            known, line = self._at_work[run], run.newest
            share = self._plan.share_done(line) if line else 0.0
            bar = ProgressBar(total=1.0, completed=share, width=16)
            value, settings = _measured(line, self._plan.metric), _words(known.trial.params)
            table.add_row(f"{known.number}", bar, number(value), settings)
        # Pruned and failed trials are behind all complete ones.
        if over and _is_complete(best := over[0]):
            shown = number(best.value), _words(best.params)
            table.add_row(f"{best.user_attrs[_RUN]}", "best so far", *shown)
        return table

    def must_be_good(self) -> None:
        """Check that not all of the first trials have failed."""
        if self._hopeless:
            raise SweepFailed(
                f"the first {len(self._failures)} trials failed, and no others were started. The "
                f"last one {self._failures[-1]}. Their output is in {self._trials}/*.log"
            )

    @property
    def _hopeless(self) -> bool:
        """Whether all trials have failed, several of them in this process."""
        is_bad = all(each.user_attrs[_ENDED].startswith("failed") for each in self._over())
        return is_bad and len(self._failures) >= _MOST_FAILED

    def _over(self) -> list[FrozenTrial]:
        """Return ended trials, the best first, incomplete ones in order."""
        sign = 1 if self._plan.minimize else -1

        def rank(trial: FrozenTrial) -> tuple[bool, float]:
            if _is_complete(trial):
                return False, sign * (trial.value or 0.0)
            return True, trial.user_attrs[_RUN]

        # Other trials are at work, or were resumed as another trial.
        ended = (
            trial
            for trial in self._study.get_trials(deepcopy=False)
            if trial.state.is_finished() and _ENDED in trial.user_attrs
        )
        return sorted(ended, key=rank)

    def conclude(self) -> SweepResult | None:
        """Write the results, and show them."""
        over, plan = self._over(), self._plan
        if not over:
            return None
        rows = [self._row(each) for each in over]
        in_order = sorted(rows, key=lambda row: row["trial"])
        table = self.directory / "trials.csv"
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(in_order)
        # People see how many trials count, and the best ones.
        ends = Counter(each.state.name for each in over)
        self.report(
            f"{ends['COMPLETE']} trials complete, {ends['PRUNED']} pruned, {ends['FAIL']} failed"
        )
        self.show(_result_table(rows))
        best = over[0]
        if not _is_complete(best):
            return None
        # The file is for a run by itself, so it stops as the configuration said.
        chosen = {axis.key: axis.meant(best.params[axis.key]) for axis in self._axes}
        values = {key: value for key, value in plan.run.items() if key not in _STOPS}
        about = f"# The best of {len(over)} trials, {rows[0]['trial']}: {plan.metric} "
        about += f"{number(best.value)}\n"
        settings = differing(placed({**values, **plan.stops}, chosen), plan.space)
        config = self.directory / "best.toml"
        write_synced(config, about.encode() + to_toml(settings))
        pictures = _draw(self.directory, self._study, plan)
        self.report(f"table: {here(table)}\nplots: {all_of(map(here, pictures))}")
        self.report(
            f"best settings: {here(config)}; to train with them: juggler train {here(config)}"
        )
        return SweepResult(self.directory, chosen, float(best.value or 0.0), config, in_order)

    def _row(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return a trial as a row of the table."""
        return {
            "trial": trial.user_attrs[_RUN],
            self._plan.metric: trial.value,
            **{key: trial.params.get(key) for key in self._plan.space},
            "ended": trial.user_attrs[_ENDED] or "complete",
        }


def _is_complete(trial: FrozenTrial) -> bool:
    """Return whether an ended trial was neither pruned nor failed."""
    return not trial.user_attrs[_ENDED]


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
    # With a new seed after a resume: otherwise the same trials would be drawn again.
    seed = int(plan.run.get("seed", 0)) + len(study.trials)
    study.sampler = optuna.samplers.TPESampler(seed=seed)
    return study


def _measured(line: MetricsLine, metric: str) -> float | None:
    """Return the metric of a line or summary; None: it is missing."""
    value = line.get(metric)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _why_not_compared(summary: MetricsLine, metric: str) -> str:
    """Describe why an ended run cannot be compared, or ""."""
    value = _measured(summary, metric)
    if value is None:
        numbers = [key for key in summary if _measured(summary, key) is not None]
        # None if nothing was measured, for example before an episode ended.
        return f"it ended without {metric}{'' if metric in summary else _meant(metric, numbers)}"
    tables, end = ("by_agent/", "by_module/"), f"/{metric}"
    of_agents = {
        key: _measured(summary, key) or 0.0
        for key in summary
        if key.startswith(tables) and key.endswith(end)
    }
    # Zero except for rounding: some agents win what others lose.
    if (most := max(map(abs, of_agents.values()), default=0.0)) and abs(value) <= 1e-9 * most:
        modules = [key for key in of_agents if key.startswith("by_module/")]
        example = f", such as {modules[0]}" if modules else ""
        return (
            f"the returns of its agents add up to 0, so {metric} is 0 for all settings: compare "
            f"trials by another metric{example}"
        )
    return ""


def _result_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Show the best trials."""
    table = Table(box=None, pad_edge=False)
    for title in rows[0]:
        table.add_column(title, justify="left" if title == "ended" else "right", overflow="fold")
    for row in rows[:_MOST_ROWS]:
        trial, value, *settings, ended = row.values()
        table.add_row(f"{trial}", number(value), *map(_short, settings), Text(ended, style="dim"))
    if len(rows) > _MOST_ROWS:
        table.caption = f"and {len(rows) - _MOST_ROWS} more: trials.csv has all of them"
        table.caption_justify = "left"
    return table


def _words(settings: Mapping[str, Any]) -> str:
    """Describe settings in a line: "lr=0.00123 entropy_coefficient=0"."""
    return " ".join(f"{key}={_short(value)}" for key, value in settings.items())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _draw(directory: Path, study: Study, plan: SweepPlan) -> list[Path]:
    """Draw complete trials over each key, and in their order."""
    # Both take half a second.
    import matplotlib.pyplot as plt
    from optuna.visualization.matplotlib import plot_optimization_history, plot_slice

    drawn: dict[str, Any] = {"sweep.png": plot_slice, "history.png": plot_optimization_history}
    with warnings.catch_warnings(), plt.style.context("default"):
        warnings.simplefilter("ignore")  # about experimental functions, and keys with one value
        for name, draw in drawn.items():
            draw(study, target_name=plan.metric)
            plt.savefig(directory / name, dpi=140, bbox_inches="tight")
            plt.close()
    return [directory / name for name in drawn]
