"""Chooses the trials of a sweep with Optuna, follows them, and ends those that fall behind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from juggler.driver.callbacks import MetricsLine
from juggler.driver.config import ConfigError
from juggler.experiments.board import Board
from juggler.experiments.run_process import RunEnd, RunProcess
from juggler.experiments.space import Axis, Value, placed, settings_in
from juggler.experiments.sweep_directory import SweepDirectory, SweepPlan
from juggler.experiments.sweep_tables import Row, progress_table, trial_line
from juggler.experiments.trials import RUN, SAID, trials_over
from juggler.runtime.installing import installing
from juggler.runtime.nearest import closest

if TYPE_CHECKING:
    from optuna import Study, Trial

_POINTS = 10  # of a trial, at which it is compared with others
_UNPRUNED_POINTS = 2  # at first, where returns say little
_MEDIAN_OF = 5  # complete trials at least
_MOST_LISTED = 10_000  # settings of a space; of more, hardly any comes twice
_MOST_FAILED = 3  # trials, before any has ended well


class SweepFailed(Exception):
    """The first trials of a sweep have failed; the message says where to look."""


@dataclass(slots=True)
class _AtWork:
    """A trial that goes on.

    Attributes:
        trial: Optuna's.
        number: of its run, which stays the same when the sweep is resumed.
        points: how many tenths of it were reported.
        value: the newest that it is compared by; None: it has had none.
        pruned: it was told to stop.
        zero: what it is compared by has been 0 so far.
    """

    trial: Trial
    number: int
    points: int = 0
    value: float | None = None
    pruned: bool = False
    zero: bool = True

    def report(self, value: float, points: int) -> None:
        """Report a tenth of it, and those before it that no line fell into: Optuna compares trials
        that have reported the same one. They have what was known by then."""
        if self.value is not None:
            for skipped in range(self.points + 1, points):
                self.trial.report(self.value, skipped)
        self.trial.report(value, points)
        self.points = points


class Sweep:
    """The plan of a sweep's runs, for `run_all`.

    Args:
        directory: of the sweep.
        plan: what is varied, and how trials are compared.
        axes: the space, parsed.
        board: for people.

    Attributes:
        study: Optuna's, with all trials.
    """

    def __init__(
        self, directory: SweepDirectory, plan: SweepPlan, axes: Sequence[Axis], board: Board
    ) -> None:
        self.study = _open_study(directory, plan)
        self._directory = directory
        self._plan = plan
        self._axes = axes
        self._board = board
        self._at_work: dict[int, _AtWork] = {}  # by process id
        self._random = Random(int(plan.run.get("seed", 0)))
        self._begun = 0  # trials that are over or at work
        self._failed = 0
        self._said = ""  # how the last trial failed
        self._one_was_good = False
        runs = [each.user_attrs.get(RUN, -1) for each in self.study.get_trials(deepcopy=False)]
        self._next_run = max(runs, default=-1) + 1
        self._go_on()

    def next(self) -> RunProcess | None:
        """Start the next trial."""
        if self._begun >= self._plan.trials or self._hopeless:
            return None
        self._begun += 1
        trial, values = self._asked()
        number = int(trial.user_attrs.get(RUN, self._next_run))
        self._next_run = max(self._next_run, number + 1)
        trial.set_user_attr(RUN, number)
        config = self._directory.write_config(number, placed(self._plan.run, values))
        run = RunProcess(config, self._directory.run_dir(number))
        self._at_work[run.pid] = _AtWork(trial, number)
        return run

    def _asked(self) -> tuple[Trial, dict[str, Value]]:
        """A trial, and the values that it is to have: where a space has few settings, others than
        those of all trials before."""
        from optuna.trial import TrialState

        untried = self._untried()
        while True:
            trial = self.study.ask()
            values = {axis.key: axis.suggest(trial) for axis in self._axes}
            setting = tuple(trial.params[axis.key] for axis in self._axes)
            if untried is None or setting in untried:
                return trial, values
            self.study.tell(trial, state=TrialState.FAIL)
            other = self._random.choice(untried)
            self.study.enqueue_trial(
                {axis.key: value for axis, value in zip(self._axes, other, strict=True)}
            )

    def _untried(self) -> list[tuple[Any, ...]] | None:
        """The settings that no trial has had; None: there are many."""
        if settings_in(self._axes) > _MOST_LISTED:
            return None
        had = [each.settings for each in trials_over(self.study)]
        had += [each.trial.params for each in self._at_work.values()]
        tried = {tuple(each.get(axis.key) for axis in self._axes) for each in had}
        every = itertools.product(*(axis.names() for axis in self._axes))
        return [each for each in every if each not in tried]

    def heard(self, run: RunProcess) -> None:
        """Report what is new of a trial, and end it if it has fallen behind."""
        known = self._at_work[run.pid]
        for line in run.new_lines():
            value = _measured(line, self._plan.metric)
            known.zero &= value is None or _is_zero(value, _of_agents(line, self._plan.metric))
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
        """Tell Optuna and people how a trial has ended."""
        from optuna.trial import TrialState

        known = self._at_work.pop(run.pid)
        value = _measured(end.summary, self._plan.metric)
        of_agents = _of_agents(end.summary, self._plan.metric)
        failed = True
        # One that had ended by itself before it heard of it is complete.
        if known.pruned and end.interrupted:
            said, state, failed = f"pruned after {known.points} tenths", TrialState.PRUNED, False
        elif end.interrupted:
            return  # it goes on when the sweep is resumed
        elif end.problem:
            said, state = f"failed: {end.problem}", TrialState.FAIL
        elif value is None:
            said, state = f"failed: {_lacks(end.summary, self._plan.metric)}", TrialState.FAIL
        elif any(of_agents.values()) and known.zero and _is_zero(value, of_agents):
            said, state = f"failed: {_cancels(self._plan.metric, of_agents)}", TrialState.FAIL
            value = None
        else:
            said, state, failed = "", TrialState.COMPLETE, False
        known.trial.set_user_attr(SAID, said)
        self.study.tell(known.trial, value if state == TrialState.COMPLETE else None, state)
        self._failed += failed
        self._said = said or self._said
        self._one_was_good |= not failed
        line = trial_line(known.number, self._plan.metric, value, said, known.trial.params)
        self._board.say(line, "red" if failed else "")

    def show(self, running: Sequence[RunProcess], stopping: bool) -> None:
        """Show the trials that go on, and the best one so far."""
        rows = [self._row(run) for run in running]
        self._board.show(
            lambda: progress_table(trials_over(self.study), rows, self._plan, stopping)
        )

    def must_be_good(self) -> None:
        """
        Raises:
            SweepFailed: the first trials have failed, and no others were started.
        """
        if self._hopeless:
            raise SweepFailed(
                f"the first {self._failed} trials have failed, and no others were started. The "
                f"last one {self._said}. What they printed is in {self._directory.trials}/*.log"
            )

    @property
    def _hopeless(self) -> bool:
        return self._failed >= _MOST_FAILED and not self._one_was_good

    def _row(self, run: RunProcess) -> Row:
        known, line = self._at_work[run.pid], run.newest
        share = self._plan.share_done(line) if line else 0.0
        return Row(known.number, share, _measured(line, self._plan.metric), known.trial.params)

    def _go_on(self) -> None:
        """Have the trials first that went on when the sweep ended, in the runs that they had."""
        from optuna.trial import TrialState

        for trial in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            self.study.tell(trial.number, state=TrialState.FAIL)
            if RUN in trial.user_attrs:  # else it had no run yet
                attributes = {RUN: trial.user_attrs[RUN]}
                self.study.enqueue_trial(trial.params, user_attrs=attributes)
        before = trials_over(self.study)
        self._begun = len(before)
        self._one_was_good = any(not each.said.startswith("failed") for each in before)


def optuna_is_there() -> None:
    """
    Raises:
        ConfigError: Optuna is not installed.
    """
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"a sweep needs the package optuna: {installing('sweep')}") from error


def _open_study(directory: SweepDirectory, plan: SweepPlan) -> Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=f"sqlite:///{directory.study.absolute()}",
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
    """The number of a line or a summary that trials are compared by; None: it has none."""
    value = line.get(metric)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _of_agents(line: MetricsLine, metric: str) -> dict[str, float]:
    """What a line says of several agents or modules where `metric` is of all of them; 0 is said of
    one that nothing is known of."""
    tables = "by_agent/", "by_module/"
    ends = f"/{metric}"
    found = (key for key in line if key.startswith(tables) and key.endswith(ends))
    return {key: _measured(line, key) or 0.0 for key in found}


def _is_zero(value: float, of_agents: Mapping[str, float]) -> bool:
    """Whether it is 0, but for how sums of what the agents have are rounded."""
    return abs(value) <= 1e-9 * max(map(abs, of_agents.values()), default=0.0)


def _cancels(metric: str, of_agents: Mapping[str, float]) -> str:
    """Word that nothing can be compared where what some agents win others lose."""
    modules = [key for key in of_agents if key.startswith("by_module/")]
    such = f", such as {modules[0]}" if modules else ""
    return (
        f"what its agents get adds up to 0, so {metric} says nothing of the settings: compare "
        f"trials by another metric{such}"
    )


def _lacks(summary: MetricsLine, metric: str) -> str:
    """Word that a run ended without the number that trials are compared by."""
    numbers = [key for key in summary if _measured(summary, key) is not None]
    is_known = metric in summary  # None: nothing was measured, as when no episode has ended
    near = None if is_known else closest(metric, numbers)
    return f"it ended without {metric}" + (f" (did you mean {near!r}?)" if near else "")
