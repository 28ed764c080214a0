"""Starts and resumes runs, from Python and from the command line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from juggler.driver.agents_config import listed
from juggler.driver.agents_found import FoundGroup, needs_environment, with_agents
from juggler.driver.checkpoint.beginning import beginning_of, other_run
from juggler.driver.checkpoint.frozen_modules import (
    frozen_modules,
    kept_modules,
    must_fit,
    with_digests,
)
from juggler.driver.checkpoint.restoring import must_be_sound
from juggler.driver.checkpoint.shared_parts import shared_parts_must_agree
from juggler.driver.config import ConfigError, RunConfig, read_toml
from juggler.driver.defaults import settled
from juggler.driver.driver import Driver, Listen
from juggler.driver.league_players import copies_of
from juggler.driver.monitoring import MonitoringOptions
from juggler.driver.preflight import check_names, rehearse
from juggler.driver.record.progress import Progress, make_progress
from juggler.driver.record.run_directory import CONFIG_FILE, SUMMARY_FILE, RunDirectory
from juggler.driver.result import Result, goal_reached, nothing_to_do
from juggler.driver.script_classes import (
    give_names,
    must_be_given_again,
    own_classes,
    own_module,
    pack,
)
from juggler.driver.shipped import read_shipped, shipped_configs
from juggler.driver.signals import as_exception
from juggler.envrunner.environments.naming import is_name
from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.actors.open_files import allow_many_open_files
from juggler.runtime.actors.processes import let_go_of_forkserver, share_forkserver
from juggler.runtime.checkpoints.checkpoint import Checkpoint, read
from juggler.runtime.checkpoints.frozen import FROM, TRAIN
from juggler.runtime.nearest import closest


def load_config(name: str | Path | None, algorithm: str | None = None) -> RunConfig:
    """Load a configuration as `load_given` does, without the keys."""
    return load_given(name, algorithm)[0]


def load_given(
    name: str | Path | None, algorithm: str | None = None
) -> tuple[RunConfig, frozenset[str]]:
    """Load a configuration and the keys that it gives. Shipped configurations give all keys.

    Args:
        name: a file, or the name of a shipped configuration; None: the defaults. "cartpole" with
            the algorithm "ppo" means cartpole-ppo, if that ships.
        algorithm: replaces the configuration's algorithm; None: keeps it.

    Raises:
        ConfigError: there is no such configuration, or it has an invalid key or value.
    """
    keys = {} if algorithm is None else {"algorithm": algorithm}
    if name is None:
        return RunConfig.from_flat(keys), frozenset(keys)
    if not isinstance(name, str | Path):
        raise ConfigError(f"a configuration is a name, a file or a RunConfig, not {name!r}")
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        values = {**read_toml(path), **keys}
        return RunConfig.from_flat(values, where=str(path)), frozenset(values)
    shipped = shipped_configs()
    found = f"{name}-{algorithm}" if f"{name}-{algorithm}" in shipped else str(name)
    if found not in shipped:
        if is_name(str(name)):
            raise ConfigError(
                f"{name!r} is an environment: give it as `--env {name}`, or env={str(name)!r}"
            )
        near = closest(found, shipped)
        hint = f" (did you mean {near!r}?)" if near else ""
        raise ConfigError(
            f"there is no configuration {found!r}{hint}: give a .toml file or one "
            f"of those that ship: {', '.join(shipped)}"
        )
    config = read_shipped(found).config
    if algorithm not in (None, config.learner.algorithm):
        RunConfig.from_flat(keys)  # raises if the algorithm is unknown
        raise ConfigError(
            f"{found!r} has settings for algorithm = {config.learner.algorithm!r}, and none ship "
            f"for {algorithm!r}: give a .toml file or one of those that ship: {', '.join(shipped)}"
        )
    return config, frozenset(config.flat())


def train(
    config: str | Path | RunConfig | None = None,
    *,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    **keys: Any,
) -> Result:
    """Train until the run's stop conditions hold.

    Ctrl-C and SIGTERM end the run with a checkpoint, and then raise KeyboardInterrupt and
    SystemExit, which have the run's result as their `result`.

    Args:
        config: a shipped configuration's name ("cartpole"), a TOML file, or a `RunConfig`. Keys
            that a file leaves out are chosen as the guide to algorithms says.
        env: a Gymnasium id, "module:callable", or any callable that makes an environment.
        module: "package.module:Class", an RLModule or Catalog class of this script or notebook, or
            an `RLModuleSpec` whose config has such classes.
        keys: of the configuration, in place of what it says: `lr=1e-3, stop_return=475`.
            `algorithm`, and what `connectors` names, may be classes of this script or notebook.

    Returns:
        The summary, and the paths of the run directory and the newest checkpoint.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
        RunFailed: something failed; the message says what.
        KeyboardInterrupt: on Ctrl-C.
        SystemExit: on SIGTERM or SIGHUP; its status is 128 plus the signal's number.
    """
    started = time.monotonic()
    if "resume" in keys:
        raise ConfigError(
            "resume is no key of a configuration: to go on with a run, call "
            f"juggler.resume({str(keys['resume'])!r})"
        )
    own = own_classes(keys)
    give_names(env, module, keys)
    if isinstance(config, RunConfig):
        base, given = config, frozenset(config.flat())
    else:
        base, given = load_given(config, keys.get("algorithm"))
    final = RunConfig.from_flat({**base.flat(), **keys})
    own_code = pack(env, own_module(final, module, own), own)
    return start_run(final, given | keys.keys(), started=started, own_code=own_code)


def resume(
    run_dir: str | Path,
    *,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    **keys: Any,
) -> Result:
    """Resume a run from its newest good checkpoint. Signals end it as in `train`.

    Args:
        run_dir: of the run.
        env: as in `train`; a run that was trained on a callable needs it again.
        module: likewise.
        keys: of the configuration, to be other than before; an `algorithm` that is a class of a
            script is needed again.

    Raises:
        CheckpointError: there is no good checkpoint.
        RunFailed: something failed; the message says what.
    """
    started = time.monotonic()
    own = own_classes(keys)
    give_names(env, module, keys)
    checkpoint = read(Path(run_dir))
    where = f"{checkpoint.path}, with what is given" if keys else str(checkpoint.path)
    config = RunConfig.from_flat({**checkpoint.config, **keys}, where=where)
    module = own_module(config, module, own)
    must_be_given_again(config, env, module, own)
    own_code = pack(env, module, own)
    return resume_run(Path(run_dir), checkpoint, config, started=started, own_code=own_code)


def start_run(
    config: RunConfig,
    given: Collection[str],
    *,
    started: float,
    own_code: bytes = b"",
    over: bool = False,
    listen: Listen | None = None,
    monitoring: MonitoringOptions | None = None,
) -> Result:
    """Start a new run of a complete configuration. See `Driver` for the other arguments.

    Args:
        given: the keys that somebody gave; the run may choose values for the others.
        over: start over in the directory of a run that was killed before its first checkpoint.

    Raises:
        ConfigError: the configuration names something that this host does not have or cannot make,
            or weights that the run cannot begin with.
    """
    progress = make_progress(config.driver.progress)
    other, frozen = other_run(config), frozen_modules(config)
    config = with_digests(config, frozen)
    with _checked(config, own_code, listen, progress, started) as groups:
        config = with_agents(config, groups)
        must_fit(config, frozen, groups)
        config, said = settled(config, given, groups)
        beginning = beginning_of(config, other)
        if said:
            progress.message(said)
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
        )
        path = Path(config.driver.run_dir) if config.driver.run_dir else None
        if over and path is not None and (path / CONFIG_FILE).is_file():
            return drive(RunDirectory.open(path, config.flat()))
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
) -> Result:
    """Resume a run, unless it has reached its goal. See `Driver` for the arguments.

    Raises:
        CheckpointError: the checkpoint has content that no run writes.
        RunDirectoryError: this is not a run directory.
        ConfigError: the algorithm or the starting weights have changed.
    """
    must_be_sound(checkpoint)
    began = checkpoint.config.get("from_checkpoint")
    if config.driver.from_checkpoint != began:
        raise ConfigError(
            f"from_checkpoint = {config.driver.from_checkpoint!r}: a run that is resumed goes on "
            "with its own weights; to begin with others, start a new run"
        )
    _must_be_of_one_run(config, checkpoint)
    progress = make_progress(config.driver.progress)
    if reached := goal_reached(run_dir, RunConfig.from_flat(checkpoint.config), config):
        progress.message(nothing_to_do(run_dir, reached, config))
        summary = json.loads((run_dir / SUMMARY_FILE).read_text())
        return Result(summary, run_dir, checkpoint.path)
    frozen = frozen_modules(config, run_dir)
    config = with_digests(config, frozen)
    if config.agents.league:
        frozen |= kept_modules(run_dir, copies_of(checkpoint.counters.get("league", {})))
    with _checked(config, own_code, listen, progress, started, run_dir) as groups:
        config = with_agents(config, groups)
        must_fit(config, frozen, groups)
        _must_be_of_one_run(config, checkpoint)  # now that it is known who plays which agent
        return _drive(
            config,
            RunDirectory.open(run_dir, config.flat()),
            progress,
            started=started,
            own_code=own_code,
            resume=checkpoint,
            frozen=frozen,
            listen=listen,
            monitoring=monitoring,
        )


def _must_be_of_one_run(config: RunConfig, checkpoint: Checkpoint) -> None:
    """
    Raises:
        ConfigError: a module, or the algorithm of one, is not that of the checkpoint.
    """
    before = RunConfig.from_flat(checkpoint.config)
    had, has = before.agents.acting_ids, config.agents.acting_ids
    if {*has} != {*had}:
        raise ConfigError(
            f"agents: this run has the modules {listed(had)}, and with what is given "
            f"{listed(has)}: a run that is resumed keeps its modules"
        )
    if config.agents.shared != before.agents.shared:
        raise ConfigError(
            f"shared = {config.agents.shared}: this run has {before.agents.shared}, and a run that "
            "is resumed keeps what its modules share"
        )
    shared_parts_must_agree(checkpoint, config.agents.shared)
    for module_id in has:
        tables = [each.agents.modules.get(module_id, {}) for each in (before, config)]
        if any(tables[0].get(key) != tables[1].get(key) for key in (TRAIN, FROM)):
            raise ConfigError(
                f"modules.{module_id}: a run that is resumed keeps its modules: leave train and "
                "from as they were"
            )
    for module_id in config.module_ids:
        was, now = (each.of(module_id).learner.algorithm for each in (before, config))
        if now != was:
            where = f"modules.{module_id}: " if before.agents.agents else ""
            raise ConfigError(
                f"{where}algorithm = {now!r}: this run is one of {was!r}, and a run that is "
                "resumed keeps its algorithm"
            )


@contextmanager
def _checked(
    config: RunConfig,
    own_code: bytes,
    listen: Listen | None,
    progress: Progress,
    started: float,
    run_dir: Path | None = None,
) -> Iterator[tuple[FoundGroup, ...]]:
    """Check a configuration before its run has a directory, and yield the agents of its
    environment if they are known.

    A run with workers on other hosts is not checked, since what it names is on those hosts, unless
    its modules depend on which agents there are: then its environment has to be here too.
    """
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
                run_dir,
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
    resume = arguments.get("resume")
    for problem in resume.problems if resume else ():
        progress.message(problem, "error")
    for doubt in config.doubts():
        progress.message(doubt, "warning")
    if resume is None:
        for module in arguments["frozen"].values():
            module.keep(directory.path)
    driver = Driver(config, directory, progress, **arguments)
    summary = driver.run()
    newest = summary["checkpoint"]
    result = Result(summary, directory.path, Path(newest) if newest else None)
    if driver.signal:
        end: Any = as_exception(driver.signal)
        end.result = result  # a subclass would change how Python ends the program
        raise end
    return result
