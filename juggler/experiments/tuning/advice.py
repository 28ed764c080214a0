"""`juggler tune` from beginning to end."""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from juggler.driver.checkpoint.beginning import other_run, own_checkpoints, rescaled_before
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.defaults import settled, with_models
from juggler.driver.given_config import differing
from juggler.driver.preflight import PreflightError, check_names, rehearse
from juggler.driver.record.run_directory import to_toml
from juggler.experiments.tuning.speeds import Expected, Sizes, Speeds, advised, expected
from juggler.learner.algorithms.off_policy.config import OffPolicyConfig
from juggler.runtime.actors.attachment import describe
from juggler.runtime.actors.processes import (
    WorkerProgram,
    ended,
    let_go_of_forkserver,
    share_forkserver,
    start,
)
from juggler.runtime.actors.supervisor import how_it_ended

_PROGRESS_SECONDS = 10.0  # without a word
_MORE_SECONDS = 60.0  # for each measurement: the process itself gives up before, unless it hangs
_STACK_BYTES = 1 << 16
_DOES, _SAYS, _FOUND, _FAILED = "does", "says", "found", "failed"


@dataclass(frozen=True, slots=True)
class _Task:
    """The arguments of the process.

    Attributes:
        values: of the configuration, by key.
        seconds: for all measurements, about.
        told: receives what the process is doing, lines for people, and what came of it.
        stack: receives the stack if the process crashes.
    """

    values: Mapping[str, Any]
    seconds: float
    told: Connection
    stack: Connection


def main(task: _Task) -> None:
    """Measure, tell what came of it, and end the process, even if threads still run."""
    faulthandler.enable(task.stack.fileno())
    try:
        from juggler.experiments.tuning.measuring import Measurements  # it brings torch

        measurements = Measurements(
            RunConfig.from_flat(dict(task.values)),
            task.seconds,
            tell=lambda line: task.told.send((_SAYS, line)),
            does=lambda what: task.told.send((_DOES, what)),
        )
        said: tuple[str, Any] = _FOUND, measurements.all()
    except BaseException as error:  # user code may call sys.exit
        failure = describe(error)
        said = _FAILED, (failure.message, failure.traceback)
    task.told.send(said)
    os._exit(0)


def measure(config: RunConfig, seconds: float, tell: Callable[[str], None]) -> Speeds:
    """Measure the parts of a run with one agent, in a process of the forkserver.

    Args:
        config: of the run, complete.
        seconds: for all measurements, about.
        tell: called with lines for people: each figure, and what takes long.

    Raises:
        PreflightError: something failed or took too long, or its process ended; the message says
            what.
    """
    told, tells = Pipe(duplex=False)
    stack, writes = Pipe(duplex=False)
    with told, stack:
        with tells, writes:
            task = _Task(config.flat(), seconds, tells, writes)
            process = start(WorkerProgram(f"{__name__}:main", task), "tune")
        try:
            return _outcome(process, told, stack, tell, 2 * seconds + _MORE_SECONDS)
        finally:
            process.kill()
            process.join()
            ended(process)


def _outcome(
    process: ForkServerProcess,
    told: Connection,
    stack: Connection,
    tell: Callable[[str], None],
    limit: float,
) -> Speeds:
    """What the process measures, if nothing that it does takes longer than so many seconds."""
    doing, began = "starting", time.monotonic()
    while True:
        wait([told, process.sentinel], _PROGRESS_SECONDS)
        if message := _received(told):  # messages come before the process's end
            kind, said = message
            if kind == _FOUND:
                assert isinstance(said, Speeds)
                return said
            if kind == _FAILED:
                raise PreflightError(*said)
            if kind == _SAYS:
                tell(said)
            else:
                doing, began = said, time.monotonic()
        elif not process.is_alive():
            how, words = how_it_ended(process.exitcode), ended(process)
            how = f"{how}, {words}" if words else how
            written = os.read(stack.fileno(), _STACK_BYTES) if stack.poll() else b""
            raise PreflightError(
                f"its process ended while {doing}: {how}", written.decode(errors="backslashreplace")
            )
        elif (spent := time.monotonic() - began) >= limit:
            raise PreflightError(
                f"{doing} took longer than {limit:g} s, and its process was ended: it hangs, or "
                "needs more --seconds"
            )
        elif spent >= _PROGRESS_SECONDS:
            tell(f"{doing}: {spent:.0f} s so far")


def _received(told: Connection) -> tuple[str, Any] | None:
    """What the process has said; None: nothing."""
    try:
        received: tuple[str, Any] | None = told.recv() if told.poll() else None
    except (EOFError, OSError):
        return None
    return received


#: In the order in which people are told of them.
KEYS = {
    "num_env_runners": "runners",
    "envs_per_runner": "environments",
    "fragment_steps": "fragment_steps",
    "batch_size": "batch_size",
    "learner_threads": "threads",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """What was found.

    Attributes:
        config: complete, with the advised sizes.
        given: the keys that a file needs so that a run has this configuration.
        now: what the configuration as given should do.
        best: what the advised sizes should do.
        larger: what larger updates should do, where the algorithm forbids to just take them.
        waits: whether environments wait more than they compute.
    """

    config: RunConfig
    given: frozenset[str]
    now: Expected
    best: Expected
    larger: Expected | None
    waits: bool


def advise(
    config: RunConfig,
    given: Collection[str],
    seconds: float,
    tell: Callable[[str], None],
) -> Advice:
    """Measure the parts of a run on this machine, and find sizes that suit it.

    Args:
        config: as given.
        given: the keys that somebody gave a value to.
        seconds: for the measurements, about.
        tell: called with lines for people.

    Raises:
        ConfigError: the run cannot be measured; the message says why.
    """
    _must_be_measurable(config)
    check_names(config)
    config = with_models(config, given)
    share_forkserver()
    try:
        tell("trying the configuration out")
        groups = rehearse(config)
        if groups and groups[0].agents:
            raise ConfigError(
                f"{config.env_runner.env} has several agents, and only environments with one can "
                "be measured: start short runs, and compare their steps/s"
            )
        rescaled = rescaled_before(config, other_run(config), own_checkpoints(config))
        config, said = settled(config, given, groups, rescaled)
        if said:
            tell(said)
        tell(f"measuring {config.env_runner.env} for about {seconds:g} s")
        speeds = measure(config, seconds, tell)
    finally:
        let_go_of_forkserver()
    return advice_for(config, given, speeds)


def advice_for(config: RunConfig, given: Collection[str], speeds: Speeds) -> Advice:
    """What follows from measurements for a complete configuration."""
    now = Sizes(
        config.driver.num_env_runners,
        config.env_runner.envs_per_runner,
        config.env_runner.fragment_steps,
        config.learner.batch_size,
        config.driver.learner_threads,
    )

    def best_of(batch_sizes: list[int]) -> Expected:
        return advised(
            speeds,
            now,
            synchronous=config.driver.synchronous,
            open_updates=config.staleness.open_updates,
            learners=config.driver.learners,
            allowed=lambda sizes: _is_valid(config, sizes),
            batch_sizes=batch_sizes,
        )

    own = now.batch_size
    most = speeds.updating[-1].steps
    sizes = [own, *(own * k for k in (2, 4, 8) if own * k <= 1.1 * most)]
    larger = best_of(sizes)
    best = larger if batch_size_is_free(config) else best_of([own])
    if larger.rate < 1.2 * best.rate:
        larger = best
    changed = {key: getattr(best.sizes, name) for key, name in KEYS.items()}
    values = {**config.flat(), **changed}
    return Advice(
        RunConfig.from_flat(values),
        frozenset((values.keys() & given) | changed.keys()),
        expected(speeds, now, synchronous=config.driver.synchronous),
        best,
        None if larger is best else larger,
        waits=speeds.wait,
    )


def batch_size_is_free(config: RunConfig) -> bool:
    """Whether the number of new steps in an update changes nothing of what is learned from each: a
    replay draws in proportion to them."""
    return isinstance(config.learner, OffPolicyConfig)


def lines_of(advice: Advice) -> list[str]:
    """The advice for people."""
    now, best = advice.now, advice.best
    lines = [
        "",
        f"as configured: {_told(now)}",
        f"advised:       {_told(best)}"
        + (f", {best.rate / now.rate:.1f} times as many" if best.rate > 1.05 * now.rate else ""),
    ]
    for key, name in KEYS.items():
        before, after = getattr(now.sizes, name), getattr(best.sizes, name)
        lines.append(f"  {key} = {after}" + (f"  (was {before})" if before != after else ""))
    if best.sizes == now.sizes:
        lines.append("No other sizes are expected to be faster by more than a twentieth.")
    algorithm = advice.config.learner.algorithm
    if not batch_size_is_free(advice.config):
        lines.append(
            f"batch_size stays: {algorithm} learns from steps of its own policy, and an update of "
            "another size changes what is learned."
        )
    if advice.larger is not None:
        sizes = advice.larger.sizes
        lines.append(
            f"With batch_size = {sizes.batch_size}: {_told(advice.larger)}. Try whether it learns "
            "as much from as many steps."
        )
    if advice.waits and advice.config.env_runner.vectorize != "async":
        lines.append(
            "The environments wait more than they compute: --vectorize async has those of an "
            "EnvRunner wait side by side; tune with it, too, and compare."
        )
    return lines


def write(advice: Advice, path: Path) -> None:
    """Write a file that `juggler train` takes, with the sizes and what else is not as by default.

    Raises:
        ConfigError: the file is there, or cannot be written.
    """
    flat = advice.config.flat()
    values = differing({key: flat[key] for key in flat if key in advice.given}, KEYS)
    about = f"# The sizes that `juggler tune` advised. Expected: {_told(advice.best)}.\n"
    try:
        with path.open("xb") as file:
            file.write(about.encode() + to_toml(values))
    except FileExistsError:
        raise ConfigError(f"--write {path}: it is there, and is not overwritten") from None
    except OSError as error:
        raise ConfigError(f"--write {path}: {error.strerror}") from error


def _told(found: Expected) -> str:
    sizes = found.sizes
    shape = f"{sizes.runners} × {sizes.environments} environments, {sizes.fragment_steps} steps"
    if sizes.threads > 1:
        shape += f", {sizes.threads} threads of the learner"
    return f"{shape}: about {_rounded(found.rate):,} steps/s, limited by {found.limit}"


def _rounded(rate: float) -> int:
    """Two digits, since more would not be true."""
    return int(float(f"{rate:.2g}"))


def _is_valid(config: RunConfig, sizes: Sizes) -> bool:
    try:
        replace(config.learner, batch_size=sizes.batch_size).validate()
        config.learner.validate_rows(sizes.fragment_steps)
    except ValueError:
        return False
    return True


def _must_be_measurable(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: a part of it is elsewhere, or it has several agents.
    """
    runner = config.env_runner
    for there, what in (
        (runner.gateway, "the simulators of a gateway are elsewhere"),
        (runner.is_served, f"the simulators at {runner.env} are elsewhere"),
        (runner.dataset, "a run that learns from a data set samples nothing"),
        (config.agents.first_given, "this run has a table for several agents or modules"),
    ):
        if there:
            raise ConfigError(
                f"only environments of this host with one agent can be measured, and {what}: "
                "start short runs, and compare their steps/s"
            )
