"""Checks a configuration before the run directory is created."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import cloudpickle
import numpy as np

from juggler.driver.agent_tables import FoundGroup
from juggler.driver.checkpoint.first_weights import FirstCheckpoints, FrozenModule
from juggler.driver.config import ConfigError, DriverConfig, RunConfig
from juggler.driver.driver_config import config_errors
from juggler.envrunner.config import words_of
from juggler.envrunner.environments.find_environment import check_name
from juggler.runtime.actors.command_processes import must_be_executable
from juggler.runtime.actors.processes import WorkerProgram, forkserver_pid
from juggler.runtime.actors.resources import seconds_used
from juggler.runtime.actors.supervisor import how_it_ended
from juggler.runtime.checkpoints.checkpoint import REPLAY, Checkpoint
from juggler.runtime.checkpoints.weights import is_frozen
from juggler.runtime.connectors.config import PLACES
from juggler.runtime.modules.import_by_name import check_there
from juggler.runtime.wire.structures import tree_map

_LOOK_SECONDS = 0.2
_ABORT_SECONDS = 2.0  # for an aborted process to write its stack
_STACK_BYTES = 1 << 16
#: Stacks are cut at this file: neither it nor its callers are shown.
_OF_REHEARSALS = "juggler/driver/rehearsal.py"
_STACK_OF_MAIN = "(most recent call first):\n"  # the main thread's stack is the last one
_STACK_OF_C = "C stack trace ("  # below the Python stacks, from 3.14 on


class PreflightError(ConfigError):
    """The run cannot work: its environment or its module cannot be made."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback.rstrip()  # of the code that failed, if it helps; else ""
        if self.traceback:
            self.add_note(self.traceback)


class _Zeros(np.ndarray[Any, Any]):
    """Zeros that are pickled as their shape and dtype."""

    def __reduce__(self) -> tuple[Any, ...]:
        return np.zeros, (self.shape, self.dtype)


def without_arrays(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with zeros for arrays, and without replays."""

    def zeros(array: Any) -> Any:
        return np.broadcast_to(np.zeros((), array.dtype), array.shape).view(_Zeros)

    kept = {key: each for key, each in checkpoint.tree.items() if key.split(":")[-1] != REPLAY}
    return replace(checkpoint, tree=tree_map(zeros, kept))


@dataclass(frozen=True, slots=True)
class Trial:
    """A configuration to try, and the checkpoints read for it."""

    config: RunConfig
    # The checkpoint that the run continues from, `without_arrays`; None: it is new
    before: Checkpoint | None = None
    origins: FirstCheckpoints | None = None  # the checkpoints that modules begin with
    # The modules that are not trained
    frozen: Mapping[str, FrozenModule] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Arguments of the process that tries a configuration."""

    trial: bytes  # cloudpickled, as an algorithm's config may be an instance of a script's class
    own_code: bytes
    # Receives pairs: (DOES or WARNS, text), and then (FOUND, the agents of its environment) or
    # (FAILED, (message, traceback))
    reports: Connection
    stack: Connection  # receives the stack if the process crashes


DOES, WARNS, FOUND, FAILED = "does", "warns", "found", "failed"


def check_names(config: RunConfig) -> None:
    """Check the names in a configuration, without importing user code.

    Raises:
        ConfigError: there is no such environment, simulator or Python module, or the environment
            needs a package that is not installed.
    """
    runner = config.env_runner
    with config_errors():
        if config.plays and not runner.gateway:
            check_name(runner.env)
        try:
            if runner.simulator:
                must_be_executable(words_of(runner.simulator))
        except FileNotFoundError as error:
            raise ConfigError(f"simulator = {runner.simulator!r}: {error}") from None
        for what, name in named_parts(config):
            check_there(name, what)


def named_parts(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield kind and name of each "package.module:Class" in a configuration."""
    named: list[tuple[str, object]] = [("mapping", config.agents.mapping)]
    for module_id in dict.fromkeys([*config.module_ids, *config.agents.modules]):
        if is_frozen(config.agents.modules.get(module_id)):
            continue  # it is built from the names in its checkpoint
        named += parts_of(config.of(module_id))
    for piece in config.env_runner.env_wrappers:
        named.append(("wrapper", piece["use"] if isinstance(piece, dict) else piece))
    for what, name in dict.fromkeys(named):
        if isinstance(name, str) and ":" in name:
            yield what, name


def parts_of(config: RunConfig) -> list[tuple[str, object]]:
    """Return kinds and values of parts that a module may name."""
    module, connectors = config.module, config.connectors.parsed()
    return [
        ("module", module.module),
        ("distribution", module.distribution),
        ("encoder", module.model.get("encoder")),
        *(("connector", piece.path) for at in PLACES for piece in connectors.pipeline(at)),
    ]


def rehearse(
    trial: Trial,
    own_code: bytes = b"",
    report: Callable[[str], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> tuple[FoundGroup, ...]:
    """Try environment, modules and learners in a separate process.

    The process comes from the forkserver, like workers, and may crash or hang without harm to this
    process. It counts as hung after worker_timeout_seconds without processor time, or after
    hang_seconds of processor time in one step, so that a loaded host does not fail it.

    Returns:
        The agents of one environment, and their spaces; () if the run has no environment on this
        host.

    Raises:
        PreflightError: a part cannot be made, crashed, hung, or does not fit the checkpoint; the
            message names it.
    """
    received, sender = Pipe(duplex=False)
    stack, writes = Pipe(duplex=False)
    with received, stack:
        with sender, writes:
            rehearsal = Rehearsal(cloudpickle.dumps(trial), own_code, sender, writes)
            process = _started(rehearsal, trial.config.driver, report)
        try:
            return _outcome(process, received, stack, trial.config.driver, report, warn)
        finally:
            process.kill()
            process.join()
            WorkerProgram.ended(process)


def _started(
    rehearsal: Rehearsal, driver: DriverConfig, report: Callable[[str], None]
) -> ForkServerProcess:
    """Start the process, which waits until the forkserver has imported torch."""
    started: Future[ForkServerProcess] = Future()
    program = WorkerProgram("juggler.driver.rehearsal:main", rehearsal)

    def work() -> None:
        try:
            started.set_result(program.start("rehearsal"))
        except BaseException as error:  # the forkserver died, or was ended
            started.set_exception(error)

    threading.Thread(target=work, name="rehearsal", daemon=True).start()
    progress = _Progress(forkserver_pid(), driver)
    while True:
        report("importing torch")
        with suppress(TimeoutError):
            return started.result(_LOOK_SECONDS)
        if problem := progress.problem():
            raise PreflightError(f"the forkserver does not answer: {problem}")


class _Progress:
    """Detects a hung process by the processor time that it uses."""

    def __init__(self, pid: int, driver: DriverConfig) -> None:
        self._pid = pid
        self._idle_seconds, self._busy_seconds = driver.worker_timeout_seconds, driver.hang_seconds
        self._began_with = self._used = seconds_used([pid])
        self._got_on = time.monotonic()

    def problem(self) -> str:
        """Return why the process counts as hung; "" if it does not."""
        used, now = seconds_used([self._pid]), time.monotonic()
        if used > self._used:
            self._used, self._got_on = used, now
        if used - self._began_with > self._busy_seconds:
            return f"it has used {self._busy_seconds:g} s of a processor (hang_seconds)"
        if now - self._got_on > self._idle_seconds:
            return f"it has done nothing for {self._idle_seconds:g} s (worker_timeout_seconds)"
        return ""


def _outcome(
    process: ForkServerProcess,
    received: Connection,
    stack: Connection,
    driver: DriverConfig,
    report: Callable[[str], None],
    warn: Callable[[str], None],
) -> tuple[FoundGroup, ...]:
    """Watch a rehearsal until it has found the agents of the environment."""
    doing = "trying the environment and the module in a separate process"
    progress = _Progress(process.pid or 0, driver)

    def written() -> str:
        """Return the stack that the process wrote as it ended, or ""."""
        with suppress(OSError):
            if stack.poll():
                return os.read(stack.fileno(), _STACK_BYTES).decode(errors="backslashreplace")
        return ""

    while True:
        report(doing)
        has_ended = process.sentinel in wait([received, process.sentinel], _LOOK_SECONDS)
        message: tuple[str, Any] | None = None
        with suppress(EOFError, OSError):
            message = received.recv() if received.poll() else None
        # Before its end is checked: the last message may come with it.
        if message is not None:
            kind, what = message
            if kind == FOUND:
                return tuple(what)
            if kind == FAILED:
                raise PreflightError(*what)
            if kind == WARNS:
                warn(what)
            else:
                doing, progress = what, _Progress(process.pid or 0, driver)
        # Without an outcome, it has crashed.
        elif has_ended:
            process.join(_ABORT_SECONDS)
            how, words = how_it_ended(process.exitcode), WorkerProgram.ended(process)
            how = f"{how}, {words}" if words else how
            raise PreflightError(f"its process ended while {doing}: {how}", written())
        elif problem := progress.problem():
            # It writes its stack when it is aborted.
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGABRT)
            process.join(_ABORT_SECONDS)
            raise PreflightError(f"{doing} hangs: {problem}", _where_it_was(written()))


def _where_it_was(written: str) -> str:
    """Describe where an aborted process hung, or ""."""
    of_python = written.partition(_STACK_OF_C)[0]
    main = of_python.rpartition(_STACK_OF_MAIN)[2].partition("\n\n")[0].splitlines()
    calls = list(takewhile(lambda line: _OF_REHEARSALS not in line, main))
    return "\n".join(["It was here, in the call of the first line:", *calls]) if calls else ""
