"""Starts and resumes runs of complete configurations, also alongside a script."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from juggler.driver.agent_tables import (
    FoundGroup,
    copies_of,
    needs_environment,
    players_of,
    with_agents,
)
from juggler.driver.callbacks import Callback, MetricsLine, Run, checked
from juggler.driver.checkpoint import first_weights as beginnings
from juggler.driver.checkpoint.first_weights import (
    FirstCheckpoints,
    FirstWeights,
    frozen_modules,
    kept_modules,
    shared_parts_must_agree,
    with_digests,
)
from juggler.driver.checkpoint.snapshots import must_be_sound
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import load_config_and_keys
from juggler.driver.defaults import settled, with_models
from juggler.driver.driver import Driver, StartSettings
from juggler.driver.driver_config import DriverConfig
from juggler.driver.preflight import Trial, check_names, rehearse, without_arrays
from juggler.driver.reporting.progress import make_progress
from juggler.driver.reporting.run_directory import (
    CONFIG_FILE,
    SUMMARY_FILE,
    RunDirectory,
    must_be_free,
    must_be_resumable,
)
from juggler.driver.reporting.wording import Level, Progress
from juggler.driver.run_datasets import with_dataset
from juggler.driver.run_end import Result, goal_reached, goals_behind, nothing_to_do
from juggler.driver.run_parts import InheritedState
from juggler.driver.script_classes import (
    give_names,
    must_be_given_again,
    own_classes,
    own_module,
    pack,
)
from juggler.driver.signals import as_exception
from juggler.driver.trackers import tracking
from juggler.driver.watching.page_server import PageProcess
from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.actors.processes import release_forkserver, share_forkserver
from juggler.runtime.actors.resources import allow_many_open_files
from juggler.runtime.checkpoints.checkpoint import Checkpoint, read
from juggler.runtime.checkpoints.weights import FROM, TRAIN
from juggler.runtime.connectors.config import PLACES, Piece
from juggler.runtime.importing import must_not_be_imported
from juggler.runtime.near_matches import all_of, listed
from juggler.runtime.plain_files import read_json


def with_callbacks(how: StartSettings, config: DriverConfig) -> StartSettings:
    """Add callbacks of `track` and `web` before the script's."""
    page = (PageProcess(),) if config.web else ()
    return replace(how, callbacks=(*tracking(config.track), *page, *how.callbacks))


def start_run(
    config: RunConfig, given: Collection[str], how: StartSettings, over: bool = False
) -> Result:
    """Start a new run; `over`: again in a killed run's directory.

    Raises:
        ConfigError: the configuration names something that this host cannot find or make, or
            weights that the run cannot begin with.
    """
    must_not_be_imported()
    listen, how = how.listen, with_callbacks(how, config.driver)
    progress = make_progress(config.driver.progress)
    path = Path(config.driver.run_dir) if config.driver.run_dir else None
    before = path if over and path and (path / CONFIG_FILE).is_file() else None
    if before:  # reported before the slower checks
        must_be_resumable(before)
    else:
        must_be_free(path, "train" if listen is None else "driver")
    # Other processes read these paths from other directories.
    config = with_dataset(config, given, is_here=listen is None, is_new=before is None)
    origins, frozen = FirstCheckpoints.of(config), frozen_modules(config)
    config = with_digests(config, frozen)
    trial = Trial(with_models(config, given), None, origins, frozen)
    messages = list[tuple[str, Level]]()
    with _checked(trial, how, progress, messages) as groups:
        config = with_agents(config, groups)
        config, chosen = settled(config, given, groups, origins.rescaled(config))
        if chosen:
            messages.append((chosen, "info"))
        beginning, warnings = origins.beginning(config)
        if texts := dict.fromkeys(first.text for first in beginning.values()):
            messages.append((f"beginning with {', '.join(texts)}", "info"))
        messages += [(warning, "warning") for warning in warnings]
        # Until here nothing is written: a wrong configuration leaves no directory.
        inherited = InheritedState(None, beginning, frozen)
        if before:
            directory = RunDirectory.open(before, config.flat())
        else:
            name = config.env_runner.env.rpartition(":")[2]
            directory = RunDirectory.create(path, config.flat(), name)
        try:
            return _drive(config, directory, progress, how, inherited, messages)
        except EndpointError:
            if not before:
                directory.discard()
            raise


def resume_run(
    run_dir: Path, checkpoint: Checkpoint, config: RunConfig, how: StartSettings
) -> Result:
    """Resume a run, unless it has reached its goal.

    Raises:
        CheckpointError: the checkpoint has content that no run writes.
        RunDirectoryError: this is not a run directory, or it is not writable.
        ConfigError: the algorithm or the starting weights have changed.
    """
    must_not_be_imported()
    must_be_sound(checkpoint)
    run_dir = run_dir.absolute()
    if checkpoint.path:
        checkpoint = replace(checkpoint, path=checkpoint.path.absolute())
    began = checkpoint.config.get("from_checkpoint")
    if config.driver.from_checkpoint != began:
        raise ConfigError(
            f"from_checkpoint = {config.driver.from_checkpoint!r}: a resumed run continues "
            "with its own weights; to begin with others, start a new run"
        )
    # Now and again once the agents are known: mistakes in given keys are found at once.
    must_be_of_one_run(config, checkpoint)
    config = with_dataset(config, config.flat(), is_here=how.listen is None, is_new=False)
    progress = make_progress(config.driver.progress)
    before = RunConfig.from_flat(checkpoint.config)
    if reached := goal_reached(run_dir, before, config):
        progress.message(nothing_to_do(run_dir, reached, before, config))
        summary = read_json(run_dir / SUMMARY_FILE)
        return Result(summary, run_dir, checkpoint.path)
    # The directory is checked after the goal: nothing is written into a run that has ended.
    behind = goals_behind(checkpoint, before, config)
    must_be_resumable(run_dir)
    how = with_callbacks(how, config.driver)
    frozen = frozen_modules(config, run_dir)
    config = with_digests(config, frozen)
    beginning, messages = dict[str, FirstWeights](), list[tuple[str, Level]]()
    messages += [(text, "warning") for text in (*behind, *changes(config, before))]
    # Copies of a league's players are not in its checkpoints, but beside them.
    if config.agents.league:
        copies = copies_of(checkpoint.counters)
        frozen |= kept_modules(run_dir, copies, lambda text: messages.append((text, "warning")))
        beginning, lost = beginnings.kept(config, run_dir)
        if lost:
            messages.append((f"league: {lost}", "warning"))
    # The trial needs only shapes, and a replay may be large.
    trial = Trial(config, without_arrays(checkpoint), frozen=frozen)
    with _checked(trial, how, progress, messages) as groups:
        config = with_agents(config, groups)
        must_be_of_one_run(config, checkpoint)
        directory = RunDirectory.open(run_dir, config.flat())
        inherited = InheritedState(checkpoint, beginning, frozen)
        return _drive(config, directory, progress, how, inherited, messages)


@contextmanager
def _checked(
    trial: Trial, how: StartSettings, progress: Progress, messages: list[tuple[str, Level]]
) -> Iterator[tuple[FoundGroup, ...]]:
    """Check a configuration before its directory exists; yield known agents.

    A run with workers on other hosts is not checked, since its parts are on those hosts.
    Exception: if its modules depend on the environment's agents, the environment has to be here
    too.
    """
    config = trial.config
    workers = config.driver.num_env_runners + config.driver.learners
    allow_many_open_files(32 + 4 * workers)  # before starting processes, which inherit the limit
    if how.listen is not None and not needs_environment(config):
        yield ()
        return
    if not how.own_code:
        check_names(config)
    # Workers are forked from the same forkserver.
    share_forkserver()
    try:
        try:
            groups = rehearse(
                trial,
                how.own_code,
                lambda text: progress.waiting(text, time.monotonic() - how.started),
                lambda text: messages.append((text, "warning")),
            )
        finally:
            progress.stop_waiting()
        yield groups
    finally:
        release_forkserver()


def _drive(
    config: RunConfig,
    directory: RunDirectory,
    progress: Progress,
    how: StartSettings,
    inherited: InheritedState,
    messages: Sequence[tuple[str, Level]],
) -> Result:
    before = [*messages]
    if resume := inherited.resume:
        before += [(problem, "error") for problem in resume.problems]
    before += [(doubt, "warning") for doubt in config.doubts()]
    if resume is None:
        for module in inherited.frozen.values():
            module.keep(directory.path)
        if config.agents.league and inherited.beginning:
            beginnings.keep(inherited.beginning, config, directory.path)
    # From here on, the run needs no other run's files.
    driver = Driver(config, directory, progress, how, inherited, before)
    summary = driver.run()
    newest = summary["checkpoint"]
    result = Result(summary, directory.path, Path(newest) if newest else None)
    if driver.signal:
        end: Any = as_exception(driver.signal)
        end.result = result  # a subclass would change how Python ends the program
        raise end
    return result


def train(
    config: str | Path | RunConfig | None = None,
    *,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    callbacks: Iterable[Callback] = (),
    **keys: Any,
) -> Result:
    """Train until a stop condition holds.

    Ctrl-C and SIGTERM end the run with a checkpoint, and then raise KeyboardInterrupt and
    SystemExit, which have the run's result as their `result`.

    Args:
        config: a shipped configuration's name ("cartpole"), a TOML file, or a `RunConfig`. Keys
            missing from a file are chosen as described in docs/algorithms.md.
        env: a Gymnasium id, "module:callable", or any callable that makes an environment.
        module: "package.module:Class", an RLModule or Catalog class of this script or notebook, or
            an `RLModuleSpec` whose config has one.
        callbacks: called on events of the run, and may end it. An exception of a callback ends the
            run normally, and is then raised here.
        keys: override the configuration: `lr=1e-3, stop_return=475`. `algorithm`, and the entries
            of `connectors`, may be classes of this script or notebook.

    Returns:
        The summary, and the paths of the run directory and the newest checkpoint.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
        RunFailed: the run failed; the message has the reason.
        KeyboardInterrupt: on Ctrl-C.
        SystemExit: on SIGTERM or SIGHUP; its status is 128 plus the signal's number.
    """
    started = time.monotonic()
    listeners = checked(callbacks)
    _must_be_keys(keys)
    own = own_classes(keys)
    give_names(env, module, keys)
    base, given = load_config_and_keys(config, keys.get("algorithm"))
    final = RunConfig.from_flat({**base.flat(), **keys})
    own_code = pack(final, env, own_module(final, module, own), own)
    return start_run(
        final, given | keys.keys(), StartSettings(started, own_code, callbacks=listeners)
    )


def resume(
    run_dir: str | Path,
    *,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    callbacks: Iterable[Callback] = (),
    **keys: Any,
) -> Result:
    """Resume a run from its newest good checkpoint.

    Signals end it as in `train`.

    Args:
        run_dir: of the run.
        env: as in `train`; a run that was trained on a callable needs it again.
        module: as in `train`, and also needed again.
        callbacks: as in `train`.
        keys: new values for keys of the configuration; an `algorithm` that is a script's class is
            needed again.

    Raises:
        CheckpointError: there is no good checkpoint.
        RunFailed: the run failed; the message has the reason.
    """
    started = time.monotonic()
    listeners = checked(callbacks)
    _must_be_keys(keys)
    own = own_classes(keys)
    give_names(env, module, keys)
    checkpoint = read(run_dir)
    if "algorithm" in keys and "algorithm" in checkpoint.config:
        must_keep_its_algorithm(checkpoint.config["algorithm"], keys["algorithm"])
    where = f"{checkpoint.path}, with the given keys" if keys else str(checkpoint.path)
    config = RunConfig.from_flat({**checkpoint.config, **keys}, where=where)
    module = own_module(config, module, own)
    must_be_given_again(config, env, module, own)
    how = StartSettings(started, pack(config, env, module, own), callbacks=listeners)
    return resume_run(Path(run_dir), checkpoint, config, how)


def _must_be_keys(keys: Mapping[str, Any]) -> None:
    """Reject names that are arguments of these functions, not keys."""
    if "resume" in keys:
        raise ConfigError(
            "resume is not a key of a configuration: to resume a run, call "
            f"juggler.resume({str(keys['resume'])!r})"
        )
    if "callback" in keys:
        raise ConfigError("there is no key 'callback': did you mean callbacks=[...], a list?")


def must_keep_its_algorithm(before: str, now: str, where: str = "") -> None:
    """Check that a run or module is resumed with its algorithm."""
    if before != now:
        raise ConfigError(
            f"{where}algorithm = {now!r}: this run uses {before!r}, and a resumed run "
            "keeps its algorithm. To begin another run with its weights, give from_checkpoint, "
            "or --from"
        )


def must_be_of_one_run(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Check that modules and algorithms match the checkpoint."""
    before = RunConfig.from_flat(checkpoint.config)
    _league_must_be_the_same(config, before)
    had, has = before.agents.acting_ids, config.agents.acting_ids
    if {*has} != {*had}:
        raise ConfigError(
            f"agents: this run has the modules {listed(had)}, but the given keys name "
            f"{listed(has)}: a resumed run keeps its modules"
        )
    if config.agents.shared != before.agents.shared:
        raise ConfigError(
            f"shared = {config.agents.shared}: this run has {before.agents.shared}, and a resumed "
            "run keeps the parts that its modules share"
        )
    shared_parts_must_agree(checkpoint, config.agents.shared)
    # A module that is not trained has no state to continue from.
    for module_id in has:
        tables = [each.agents.modules.get(module_id, {}) for each in (before, config)]
        if any(tables[0].get(key) != tables[1].get(key) for key in (TRAIN, FROM)):
            raise ConfigError(
                f"modules.{module_id}: a resumed run keeps its modules: leave train and "
                "from unchanged"
            )
    for where, was, now in _modules(config, before):
        must_keep_its_algorithm(was.learner.algorithm, now.learner.algorithm, where)


def changes(config: RunConfig, before: RunConfig) -> list[str]:
    """Describe changes of connectors or replay keys in a resumed run."""
    connectors, sums = [], []
    for where, was, now in _modules(config, before):
        for place in PLACES:
            had, has = (list(each.connectors.parsed().pipeline(place)) for each in (was, now))
            if had != has:
                connectors.append(
                    f"{where}connectors.{place} had {_named(had)}, and now has {_named(has)}: the "
                    "weights were learned with the former"
                    + ("; statistics of new connectors start again" if has else "")
                )
        # Rewards are summed when steps enter the replay.
        for key in now.learner.keys_of_kept_steps():
            if key not in was.learner.keys_of_kept_steps():
                continue
            old, new = (getattr(each.learner, key) for each in (was, now))
            if old != new:
                sums.append(
                    f"{where}{key} was {old}, and is now {new}: steps in the replay of the "
                    "checkpoint keep their sums of rewards from before; "
                    "save_replay = false begins without them"
                )
    return connectors + sums


def _modules(config: RunConfig, before: RunConfig) -> Iterator[tuple[str, RunConfig, RunConfig]]:
    """Yield each module's name for messages, and its old and new configuration."""
    for module_id in config.module_ids:
        where = f"modules.{module_id}: " if before.agents.agents else ""
        yield where, before.of(module_id), config.of(module_id)


def _named(pieces: Sequence[Piece]) -> str:
    return (
        all_of(
            f"{piece.name} with {dict(piece.options)}" if piece.options else piece.name
            for piece in pieces
        )
        or "nothing"
    )


def _league_must_be_the_same(config: RunConfig, before: RunConfig) -> None:
    """Check that a league has the same first players as before."""
    had, has = before.agents, config.agents
    if bool(had.league) != bool(has.league):
        raise ConfigError(
            f"league: this run has {'a' if had.league else 'no'} league, and a resumed run keeps it"
        )
    if not has.league:
        return
    began_with = had.acting_ids
    players = players_of(has.league, before.agent_names, had.modules)
    if {*players} != {*began_with}:
        raise ConfigError(
            f"league: this run began with the players {listed(began_with)}, and now "
            f"has {listed(players)}: a resumed run keeps its players"
        )


_MOST_LINES = 1000  # lines that wait for a reader


class StartedRun:
    """A run in a thread, returned by `juggler.start`.

    If the program ends before the run, the run ends normally, with a last checkpoint.
    """

    def __init__(self, train_with: Callable[[Callback], Result]) -> None:
        """Start training.

        Args:
            train_with: trains with one callback, and returns when the run has ended.
        """
        must_not_be_imported()  # in this thread, as the run has its own
        self._train_with = train_with
        self._follower = _Follower()
        self._result: Future[Result] = Future()
        # The forkserver ends with the thread that starts it, and runs share one. The main thread
        # outlives them all.
        self._shares = threading.current_thread() is threading.main_thread()
        if self._shares:
            share_forkserver()
        self._thread = threading.Thread(target=self._work, name="juggler run")
        self._thread.start()
        try:
            self._follower.wait_for_begin()
        except BaseException:
            self._follower.stop("interrupted")
            raise
        if self._follower.run is None:
            self._result.result()  # raises errors of the start

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        assert self._follower.run is not None
        return self._follower.run.run_dir

    @property
    def running(self) -> bool:
        """Whether the run has not ended yet."""
        return not self._result.done()

    def metrics(self) -> Iterator[MetricsLine]:
        """Yield the lines of metrics until the run ends.

        The first is the newest. The keys are the same as in callbacks. The newest 1000 lines wait
        for a reader.
        """
        return self._follower.lines()

    def stop(self, reason: str = "stopped") -> None:
        """End the run normally, with a last checkpoint.

        This does not wait: `result` does.

        Args:
            reason: the `reason_for_stop` of the summary.

        Raises:
            ValueError: the reason is empty, or one that only the run itself may give.
        """
        self._follower.stop(reason)

    def set(self, key: str, value: float | None, module_id: str | None = None) -> None:
        """Replace a schedule by a number: see `juggler.Run.set`.

        Args:
            key: as in `juggler.Run.set`.
            value: as in `juggler.Run.set`.
            module_id: as in `juggler.Run.set`.

        Raises:
            ValueError: as in `juggler.Run.set`; or the run has ended.
        """
        if not self.running:
            raise ValueError("the run has ended")
        assert self._follower.run is not None
        self._follower.run.set(key, value, module_id)

    def result(self, timeout: float | None = None) -> Result:
        """Wait until the run has ended.

        Args:
            timeout: in seconds; None: no limit.

        Raises:
            TimeoutError: the run is still running.
            Exception: the exception that `juggler.train` would raise.
        """
        # Not by Thread.join: if interrupted there, Python 3.11 forgets the thread, and so the run.
        if not wait([self._result], timeout).done:
            raise TimeoutError(f"the run in {self.run_dir} is still running after {timeout} s")
        return self._result.result()

    def __repr__(self) -> str:
        state = "is running" if self.running else "has ended: see result()"
        return f"<run in {self.run_dir}, which {state}>"

    def _work(self) -> None:
        result, failure = None, None
        try:
            result = self._train_with(self._follower)
        except BaseException as error:
            failure = error
        try:
            if self._shares:
                release_forkserver()
        finally:
            if result is None:
                self._result.set_exception(failure)
            else:
                self._result.set_result(result)
            self._follower.end_lines()


class _Follower(Callback):
    """Passes events of a run to other threads."""

    def __init__(self) -> None:
        self.run: Run | None = None  # None before it has begun
        self._changed = threading.Condition()
        self._stop = ""
        self._over = False
        self._newest: MetricsLine = {}
        self._readers: list[deque[MetricsLine]] = []

    def wait_for_begin(self) -> None:
        """Wait until the run has its directory, or has failed before."""
        with self._changed:
            self._changed.wait_for(lambda: self.run or self._over)

    def stop(self, reason: str) -> None:
        with self._changed:
            run, self._stop = self.run, reason
        if run is not None:
            run.stop(reason)

    def on_start(self, run: Run) -> None:
        with self._changed:
            self.run = run
            self._changed.notify_all()
        if self._stop:  # the caller no longer waits for it
            run.stop(self._stop)

    def on_metrics(self, run: Run, metrics: MetricsLine) -> None:
        with self._changed:
            self._newest = metrics
            for reader in self._readers:
                reader.append(metrics)
            self._changed.notify_all()
        if not threading.main_thread().is_alive():  # the interpreter waits for this thread
            run.stop("program_ended")

    def end_lines(self) -> None:
        """End the lines."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def lines(self) -> Iterator[MetricsLine]:
        # A slow reader loses the oldest lines.
        with self._changed:
            waiting = deque([self._newest] if self._newest else [], maxlen=_MOST_LINES)
            self._readers.append(waiting)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: waiting or self._over)
                    if not waiting:
                        return
                    line = waiting.popleft()
                yield line
        finally:
            # Not `remove`, which would take another reader with the same lines.
            with self._changed:
                self._readers = [each for each in self._readers if each is not waiting]


def start(
    config: str | Path | RunConfig | None = None,
    *,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    callbacks: Iterable[Callback] = (),
    **keys: Any,
) -> StartedRun:
    """Train alongside the caller, like `juggler.train` in a thread.

    It returns when the run has its directory and starts its workers. Ctrl-C and SIGTERM stay with
    the program; when the program ends, the run ends normally.

    Args:
        config: as in `train`.
        env: as in `train`.
        module: as in `train`.
        callbacks: as in `train`, but called in the run's thread.
        keys: of the configuration, as in `train`.

    Returns:
        A handle to read metrics, to stop the run and to wait for it.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    listeners = checked(callbacks)
    return StartedRun(
        lambda follower: train(
            config, env=env, module=module, callbacks=(follower, *listeners), **keys
        )
    )
