"""Callbacks: a script's code that runs on events of a run."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from juggler.driver.config import RunConfig, plain
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.driver_config import ConfigError
from juggler.driver.reporting.episode_returns import WithReturns
from juggler.driver.reporting.metrics import Metrics
from juggler.driver.reporting.run_directory import flat, to_json
from juggler.driver.reporting.wording import Level, Progress
from juggler.driver.run_end import OWN_REASONS, RunEnd
from juggler.driver.signals import SecondSignal
from juggler.learner.config import LearnerConfig
from juggler.runtime.annotations import signature
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.near_matches import closest, nearest

VALUES: Final = "values"  # in the counters of a checkpoint
_ALL: Final = ""  # modules


class ChangedValues:
    """Numbers that replace schedules, by module; any thread may set them.

    Every update has them, so that all learners of a group change at the same update.
    """

    def __init__(
        self, config: RunConfig, trained: Mapping[str, str], resume: Checkpoint | None = None
    ) -> None:
        self._config, self._trained = config, trained
        self._lock = threading.Lock()
        # By module id and key. None: the number for all modules does not apply to this one.
        self._values: dict[str, dict[str, float | None]] = {}
        if resume is not None:
            saved = resume.counters.get(VALUES, {})
            self._values = msgspec.convert(saved, dict[str, dict[str, float | None]])
            self._follow_changes(RunConfig.from_flat(resume.config))

    def _follow_changes(self, before: RunConfig) -> None:
        """Forget numbers of keys whose configured value has changed."""
        for key in dict.fromkeys(key for values in self._values.values() for key in values):
            able = self._able(key, self._trained)
            changed = [
                each
                for each in able
                if _configured(self._config.of(self._trained[each]).learner, key)
                != _configured(before.of(self._trained[each]).learner, key)
            ]
            if changed == able:
                self._store(key, None, None)
            else:
                for module_id in changed:
                    self._store(key, None, module_id)

    def set(self, key: str, value: float | None, module_id: str | None = None) -> None:
        """Replace a schedule by a number; None: follow the configuration again.

        Raises:
            ValueError: the key cannot change while a run trains, there is no such module, or the
                value is out of range.
        """
        value = plain(value)
        where = f"set({key!r}, {value!r})"
        if module_id is not None and module_id not in self._trained:
            raise ValueError(f"{where}: no module {module_id!r}{nearest(module_id, self._trained)}")
        wanted = [*self._trained] if module_id is None else [module_id]
        able = self._able(key, wanted)
        if not able:
            known = sorted({key for each in wanted for key in _schedules(self._learner(each))})
            if close := closest(key, known):
                raise ValueError(f"{where}: did you mean {close!r}?")
            raise ValueError(
                f"{where}: this cannot change while a run trains; what can is {', '.join(known)}"
            )
        # Checked here, in the caller's thread: a learner that refused it would fail.
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{where}: expected a number, or None for the configuration's")
            for each in able:
                _must_be_allowed(self._learner(each), key, float(value), where)
        self._store(key, None if value is None else float(value), module_id)

    def _store(self, key: str, value: float | None, module_id: str | None) -> None:
        """Store a checked number."""
        with self._lock:
            for each in self._values if module_id is None else [module_id]:
                self._values.get(each, {}).pop(key, None)
            if value is not None or (module_id is not None and key in self._values.get(_ALL, {})):
                self._values.setdefault(module_id or _ALL, {})[key] = value

    def of(self, module_id: str, settings_of: str) -> dict[str, float]:
        """Return the numbers that were set for a module, by key."""
        with self._lock:
            both = {**self._values.get(_ALL, {}), **self._values.get(module_id, {})}
        if not both:
            return {}
        able = _schedules(self._config.of(settings_of).learner)
        return {key: value for key, value in both.items() if key in able and value is not None}

    def in_words(self) -> str:
        """List the numbers that were set; "" if there are none."""
        return ", ".join(
            f"{key} = {value:g}" + (f" ({module_id})" if module_id else "")
            for module_id, values in self._values.items()
            for key, value in values.items()
            if value is not None
        )

    def to_state(self) -> dict[str, Any]:
        """Return the numbers for a checkpoint's counters."""
        with self._lock:
            values = {
                module_id: dict(own)
                for module_id, own in self._values.items()
                if own and (module_id == _ALL or module_id in self._trained)
            }
        return {VALUES: values} if values else {}

    def _able(self, key: str, module_ids: Iterable[str]) -> list[str]:
        """Return the modules that have a key."""
        return [each for each in module_ids if key in _schedules(self._learner(each))]

    def _learner(self, module_id: str) -> LearnerConfig:
        return self._config.of(self._trained[module_id]).learner


def _schedules(config: LearnerConfig) -> dict[str, tuple[Any, str]]:
    """Return each schedule's table, and its key there."""
    own = {spec.lr_key: (spec.config, "lr") for spec in config.optimizer_specs()}
    return {**own, **{key: (config, key) for key in config.schedules()}}


def _configured(config: LearnerConfig, key: str) -> Any:
    """Return the configured value of this key; None: it is missing."""
    found = _schedules(config).get(key)
    return getattr(*found) if found else None


def _must_be_allowed(config: LearnerConfig, key: str, value: float, where: str) -> None:
    """Check that the configuration accepts this value of this key."""
    if not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number")
    table, name = _schedules(config)[key]
    try:
        changed = replace(table, **{name: value})
        (changed.validate if table is config else changed.validate_optimizer)()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


_SLOW_SECONDS = 1.0
_NAME = re.compile(r"[\w.-]{1,64}(/[\w.-]{1,64}){0,3}", re.ASCII)

#: A flat line of metrics, with keys such as "modules/default/policy_loss".
MetricsLine = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation(WithReturns):
    """Episodes that an evaluator played alongside training, deterministically.

    Attributes:
        returns: undiscounted, one per episode; with several agents, summed over the agents.
        lengths: numbers of environment steps, in the same order.
        agent_returns: by agent and module, the agent's returns in the episodes in which it acted;
            empty if there is one agent.
        update: number of updates that made the weights.
        env_steps_trained: environment steps that these weights were trained on.
        is_best: no evaluation of the run had a higher mean before: its checkpoint is kept.
    """

    returns: list[float]
    lengths: list[int]
    agent_returns: dict[tuple[str, str], list[float]]
    update: int
    env_steps_trained: int
    is_best: bool


class Run:
    """A running run, as callbacks see it.

    Attributes:
        run_dir: its directory.
        config: its configuration, flat.
        metrics: the newest line of metrics; {} before the first one.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        core: DriverCore,
        progress: Progress,
        stop: Callable[[str], None],
        values: ChangedValues,
        gathered: Metrics,
    ) -> None:
        self.run_dir = run_dir
        self.config = config
        self.metrics: MetricsLine = {}
        self._core = core
        self._progress = progress
        self._stop = stop
        self._values = values
        self._gathered = gathered

    @property
    def env_steps_trained(self) -> int:
        """Environment steps trained on so far."""
        return self._core.trained

    @property
    def updates(self) -> int:
        """Updates so far; with several modules, summed over them."""
        return self._core.updates

    def message(self, text: str, level: Level = "info") -> None:
        """Show a message as the run shows its own.

        `events.jsonl` has it too. Only callbacks call this.

        Args:
            text: one line or more.
            level: "info", "warning" or "error".
        """
        self._progress.message(text, level)

    def record(self, name: str, value: float) -> None:
        """Record your own number as `custom/NAME` in the metrics.

        Later lines of metrics repeat its newest value. A resumed run starts without it. Only
        callbacks can call this.

        Args:
            name: letters, digits, "_", "." and "-", in up to four parts joined by "/". You can omit
                the part "custom/".
            value: NaN and infinity become null, as in all lines of metrics.

        Raises:
            ValueError: the name has other characters, or is too long.
            TypeError: the value is not a number.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(short := name.removeprefix("custom/")):
            raise ValueError(
                f"record({name!r}): name it with letters, digits, '_', '.' and '-', and '/' "
                "between up to four parts of at most 64 letters"
            )
        if not hasattr(value, "__float__"):  # strings do not have it
            kind = type(value).__name__
            raise TypeError(f"record({name!r}): give a number, not a value of type {kind}")
        self._gathered.custom[short] = float(value)

    def stop(self, reason: str = "stopped") -> None:
        """End the run normally before its next update.

        It writes a last checkpoint. Any thread may call this; the first reason stands.

        Args:
            reason: the `reason_for_stop` of the summary.

        Raises:
            ValueError: the reason is empty, or one that only the run itself may give.
        """
        if not reason or reason in OWN_REASONS:
            raise ValueError(
                f"stop({reason!r}): give your own reason; {', '.join(OWN_REASONS)} are "
                "reserved for the run itself"
            )
        self._stop(reason)

    def set(self, key: str, value: float | None, module_id: str | None = None) -> None:
        """Replace a schedule, such as "lr" or "entropy_coefficient", by a number.

        The number applies from the run's next update. All learners change at the same update.
        Checkpoints have the number, and a resumed run continues with it, unless the key has
        another value in its configuration then. Any thread may call this.

        Args:
            key: a key of the algorithm that may be a schedule. An optimizer's own learning rate is
                named as in metrics: "lr_value" of [optimizers.value].
            value: None: return to the configuration.
            module_id: of one of several modules; None: of all that have the key.

        Raises:
            ValueError: the key cannot change while a run trains, there is no such module, or the
                value is out of range.
        """
        self._values.set(key, value, module_id)


class Callback:
    """Base class of callbacks: override the methods that you need.

    The methods of this class do nothing.

    They are called in the driver's process, by the thread that drives the run, in the order of
    events. During a call workers finish their work but get no new work, so a callback should be
    quick: a warning names one that takes over a second. An exception ends the run normally, with a
    last checkpoint, and `juggler.train` then raises it. `sys.exit()` and `KeyboardInterrupt` count
    as exceptions here.
    """

    def on_start(self, run: Run) -> None:
        """The run has its directory, and starts its workers."""

    def on_metrics(self, run: Run, metrics: MetricsLine) -> None:
        """Handle a new line of metrics.

        Lines are written each second, every `metrics_steps` steps, and at the end.

        Args:
            run: the run.
            metrics: a flat dict, such as of "episode_return_mean" and
                "modules/default/policy_loss". A number that does not exist yet is None.
        """

    def on_update(self, run: Run, module_id: str, metrics: Mapping[str, float]) -> None:
        """An update of a module is done.

        Args:
            run: the run.
            module_id: of the module; "default" if the run has one.
            metrics: of the learner, such as "policy_loss": means over the updates since it sent
                them last. It sends them twice a second, and {} between.
        """

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """An evaluation alongside training is done (`evaluation_seconds`)."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """A checkpoint is on the disk.

        The run deletes it when it has newer ones (`keep_checkpoints`).
        """

    def on_worker_lost(self, run: Run, worker_id: str, reason: str) -> None:
        """A worker, such as "envrunner-3", died, hung, failed or left during training.

        Local workers are started again.
        """

    def on_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        """The run has ended, for any reason.

        `summary` is the content of `summary.json`.
        """


def checked(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Check callbacks, and that their methods take their arguments."""
    if isinstance(callbacks, Callback):
        raise ConfigError("callbacks: give a list, such as callbacks=[MyCallback()]")
    found = tuple(callbacks)
    known = [name for name in vars(Callback) if name.startswith("on_")]
    for each in found:
        if isinstance(each, type):
            raise ConfigError(f"callbacks: give an object of this class: {each.__name__}()")
        if not isinstance(each, Callback):
            raise ConfigError(f"callbacks: {each!r} is not a juggler.Callback")
        # A misspelt method would never be called.
        for name in dir(each):
            if name.startswith("on_") and name not in known:
                which = f"{type(each).__name__}.{name}"
                raise ConfigError(f"callbacks: nothing calls {which}{nearest(name, known)}")
        for name in known:
            _must_take_its_arguments(each, name)
    return found


def _must_take_its_arguments(callback: Callback, method: str) -> None:
    """Check that a method takes the arguments that it is called with."""
    names = [*signature(getattr(Callback, method)).parameters][1:]  # without self
    try:
        takes = signature(getattr(callback, method))
    except (TypeError, ValueError):  # Python knows no signature
        return
    try:
        takes.bind(*names)
    except TypeError:
        which = f"{type(callback).__name__}.{method}{takes}"
        raise ConfigError(f"callbacks: {which} has to take ({', '.join(names)})") from None


@dataclass(slots=True)
class Callbacks:
    """Collects the events of a turn, and calls callbacks between turns."""

    run: Run
    end: RunEnd
    progress: Progress
    callbacks: Sequence[Callback]
    # The first exception of a callback, which ends the run; None: no exception yet
    error: BaseException | None = None
    _noted: deque[tuple[str, tuple[Any, ...]]] = field(default_factory=deque)
    _slow: set[str] = field(default_factory=set)  # names in warnings so far

    def metrics(self, line: Mapping[str, Any]) -> None:
        if self.callbacks:
            self.run.metrics = flat(to_json(line))
            self.note("on_metrics", self.run.metrics)

    def updated(self, module_id: str, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Queue `on_update`, with the learner's metrics by module."""
        if self.callbacks:
            of_one = dict(next(iter(metrics.values()))) if len(metrics) == 1 else flat(metrics)
            self.note("on_update", module_id, of_one)

    def note(self, method: str, *arguments: Any) -> None:
        """Queue a call of every callback, made between two turns."""
        if self.callbacks:
            self._noted.append((method, arguments))

    def start(self) -> None:
        """Call `on_start`."""
        self.note("on_start")
        self.deliver()

    def deliver(self) -> None:
        """Make the queued calls, unless a callback has raised an error."""
        while self._noted and self.error is None:
            method, arguments = self._noted.popleft()
            for callback in self.callbacks:
                if not self._call(callback, method, *arguments):
                    break

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Call `on_end` of every callback, even after an error."""
        for callback in self.callbacks:
            self._call(callback, "on_end", summary)

    def _call(self, callback: Callback, method: str, *arguments: Any) -> bool:
        """Call a method; return whether it raised nothing."""
        name = f"{type(callback).__name__}.{method}"
        began = time.monotonic()
        good = False
        try:
            getattr(callback, method)(self.run, *arguments)
            good = True
        except SecondSignal:
            raise  # a second Ctrl-C leaves without a last checkpoint
        except BaseException as error:  # sys.exit() must not cost the last checkpoint
            if isinstance(error, KeyboardInterrupt) and method == "on_end":
                raise  # the run has already ended
            # The first error ends the run, and `juggler.train` raises it.
            text = f"the callback {name} raised {type(error).__name__}: {error}".rstrip(": ")
            failed_before = method == "on_end" and self.end.failure  # that failure is raised
            if self.error is None and not failed_before:
                self.error = error
                self.end.fail(text, "callback_failed")
                self.end.failed_at(text)
            self.progress.message(text, "error")
        # Workers get no new work during a call.
        seconds = time.monotonic() - began
        at_work = method not in ("on_start", "on_end")
        if seconds > _SLOW_SECONDS and at_work and name not in self._slow:
            self._slow.add(name)
            self.progress.message(
                f"the callback {name} took {seconds:.1f} s, in which workers got no new work: have "
                "it do less, or hand its work to a thread",
                "warning",
            )
        return good
