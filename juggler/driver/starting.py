"""Starts and resumes runs of complete configurations."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from juggler.driver.agents_found import FoundGroup, needs_environment, with_agents
from juggler.driver.callbacks import Callback
from juggler.driver.checkpoint import beginning as beginnings
from juggler.driver.checkpoint.beginning import (
    Beginning,
    beginning_of,
    other_run,
    own_checkpoints,
    rescaled_before,
)
from juggler.driver.checkpoint.books import must_be_sound
from juggler.driver.checkpoint.frozen_modules import (
    frozen_modules,
    kept_modules,
    must_fit,
    with_digests,
)
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.defaults import settled, with_models
from juggler.driver.driver import Driver, Listen
from juggler.driver.driver_config import DriverConfig
from juggler.driver.league_players import copies_of
from juggler.driver.learners_here import must_be_alone
from juggler.driver.monitoring import MonitoringOptions
from juggler.driver.preflight import GoesOn, check_names, rehearse
from juggler.driver.record.progress import Progress, make_progress
from juggler.driver.record.run_directory import (
    CONFIG_FILE,
    SUMMARY_FILE,
    RunDirectory,
    must_be_free,
    must_go_on,
)
from juggler.driver.record.wording import Level
from juggler.driver.result import Result, goal_reached, goals_behind, nothing_to_do
from juggler.driver.same_run import changes, must_be_of_one_run
from juggler.driver.signals import as_exception
from juggler.driver.trackers.tracking import tracking
from juggler.driver.watching.beside import PageBeside
from juggler.driver.with_dataset import with_dataset
from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.actors.open_files import allow_many_open_files
from juggler.runtime.actors.processes import let_go_of_forkserver, share_forkserver
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError
from juggler.runtime.importing import must_not_be_imported
from juggler.runtime.plain_files import read_json


def callbacks_of(config: DriverConfig) -> tuple[Callback, ...]:
    """Those of the keys `track` and `web`.

    Raises:
        ConfigError: a tracker is not usable.
    """
    page = (PageBeside(),) if config.web else ()
    return (*tracking(config.track), *page)


def start_run(
    config: RunConfig,
    given: Collection[str],
    *,
    started: float,
    own_code: bytes = b"",
    over: bool = False,
    listen: Listen | None = None,
    monitoring: MonitoringOptions | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Start a new run of a complete configuration. See `Driver` for the other arguments.

    Args:
        given: the keys that somebody gave; the run may choose values for the others.
        over: start over in the directory of a run that was killed before its first checkpoint.

    Raises:
        ConfigError: the configuration names something that this host does not have or cannot make,
            or weights that the run cannot begin with.
    """
    must_not_be_imported()
    callbacks = (*callbacks_of(config.driver), *callbacks)
    progress = make_progress(config.driver.progress)
    path = Path(config.driver.run_dir) if config.driver.run_dir else None
    before = path if over and path and (path / CONFIG_FILE).is_file() else None
    if before:  # said at once, and not when all else has been tried
        must_go_on(before)
    else:
        must_be_free(path, "train" if listen is None else "driver")
    config = with_dataset(config, given, is_here=listen is None, is_new=before is None)
    other, frozen = other_run(config), frozen_modules(config)
    config = with_digests(config, frozen)
    rehearsed = with_models(config, given)
    said = list[tuple[str, Level]]()
    with _checked(rehearsed, own_code, listen, progress, started, said) as groups:
        config = with_agents(config, groups)
        must_fit(config, frozen, groups)
        own = own_checkpoints(config)
        config, chosen = settled(config, given, groups, rescaled_before(config, other, own))
        if chosen:
            said.append((chosen, "info"))
        beginning = beginning_of(config, other, own)
        drive = partial(
            _drive,
            config,
            progress=progress,
            started=started,
            own_code=own_code,
            beginning=beginning,
            frozen=frozen,
            listen=listen,
            monitoring=monitoring,
            callbacks=callbacks,
            before=said,
        )
        if before:
            return drive(RunDirectory.open(before, config.flat()))
        name = config.env_runner.env.rpartition(":")[2]
        directory = RunDirectory.create(path, config.flat(), name)
        try:
            return drive(directory)
        except EndpointError:
            directory.discard()
            raise


def resume_run(
    run_dir: Path,
    checkpoint: Checkpoint,
    config: RunConfig,
    *,
    started: float,
    own_code: bytes = b"",
    listen: Listen | None = None,
    monitoring: MonitoringOptions | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Resume a run, unless it has reached its goal. See `Driver` for the arguments.

    Raises:
        CheckpointError: the checkpoint has content that no run writes.
        RunDirectoryError: this is not a run directory, or nothing can be written in it.
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
            f"from_checkpoint = {config.driver.from_checkpoint!r}: a run that is resumed goes on "
            "with its own weights; to begin with others, start a new run"
        )
    must_be_of_one_run(config, checkpoint)
    config = with_dataset(config, config.flat(), is_here=listen is None, is_new=False)
    progress = make_progress(config.driver.progress)
    before = RunConfig.from_flat(checkpoint.config)
    if reached := goal_reached(run_dir, before, config):
        progress.message(nothing_to_do(run_dir, reached, before, config))
        summary = read_json(run_dir / SUMMARY_FILE)
        return Result(summary, run_dir, checkpoint.path)
    behind = goals_behind(checkpoint, before, config)
    must_go_on(run_dir)
    callbacks = (*callbacks_of(config.driver), *callbacks)
    frozen = frozen_modules(config, run_dir)
    config = with_digests(config, frozen)
    beginning, said = None, list[tuple[str, Level]]()
    said += [(text, "warning") for text in (*behind, *changes(config, before))]
    if config.agents.league:

        def warn(text: str) -> None:
            said.append((text, "warning"))

        frozen |= kept_modules(run_dir, copies_of(checkpoint.counters), warn)
        beginning = _kept_beginning(config, run_dir, warn)
    goes_on = GoesOn.of(checkpoint, run_dir)
    with _checked(config, own_code, listen, progress, started, said, goes_on) as groups:
        config = with_agents(config, groups)
        must_fit(config, frozen, groups)
        must_be_of_one_run(config, checkpoint)  # now that it is known who plays which agent
        return _drive(
            config,
            RunDirectory.open(run_dir, config.flat()),
            progress,
            started=started,
            own_code=own_code,
            resume=checkpoint,
            beginning=beginning,
            frozen=frozen,
            listen=listen,
            monitoring=monitoring,
            callbacks=callbacks,
            before=said,
        )


def _kept_beginning(
    config: RunConfig, run_dir: Path, warn: Callable[[str], None]
) -> Beginning | None:
    """What the players of a run's league began with that another run had learned."""
    try:
        return beginnings.kept(config, run_dir)
    except CheckpointError as error:
        text = "what the players began with is lost, so who is reset begins with new weights"
        warn(f"league: {text}: {error}")
        return None


@contextmanager
def _checked(
    config: RunConfig,
    own_code: bytes,
    listen: Listen | None,
    progress: Progress,
    started: float,
    said: list[tuple[str, Level]],
    goes_on: GoesOn | None = None,
) -> Iterator[tuple[FoundGroup, ...]]:
    """Check a configuration before its run has a directory, and yield the agents of its
    environment if they are known.

    A run with workers on other hosts is not checked, since what it names is on those hosts, unless
    its modules depend on which agents there are: then its environment has to be here too.

    Args:
        said: receives what the run is to warn of.
    """
    must_be_alone(config)
    allow_many_open_files(_files_open(config))  # before starting processes, which inherit the limit
    if listen is not None and not needs_environment(config):
        yield ()
        return
    if not own_code:
        check_names(config)
    share_forkserver()  # the workers will come from it too
    try:
        try:
            groups = rehearse(
                config,
                own_code,
                lambda text: progress.waiting(text, time.monotonic() - started),
                goes_on,
                lambda text: said.append((text, "warning")),
            )
        finally:
            progress.stop_waiting()
        yield groups
    finally:
        let_go_of_forkserver()


def _files_open(config: RunConfig) -> int:
    """Estimate the files that the driver has open at once with its own workers."""
    driver = config.driver
    return 32 + 4 * (driver.num_env_runners + driver.learners)


def _drive(
    config: RunConfig, directory: RunDirectory, progress: Progress, **arguments: Any
) -> Result:
    resume, before = arguments.get("resume"), list[tuple[str, Level]](arguments.pop("before"))
    before += [(problem, "error") for problem in (resume.problems if resume else ())]
    before += [(doubt, "warning") for doubt in config.doubts()]
    if resume is None:
        for module in arguments["frozen"].values():
            module.keep(directory.path)
        if config.agents.league and (beginning := arguments["beginning"]) is not None:
            beginnings.keep(beginning, config, directory.path)
    driver = Driver(config, directory, progress, before=before, **arguments)
    summary = driver.run()
    newest = summary["checkpoint"]
    result = Result(summary, directory.path, Path(newest) if newest else None)
    if driver.signal:
        end: Any = as_exception(driver.signal)
        end.result = result  # a subclass would change how Python ends the program
        raise end
    return result
