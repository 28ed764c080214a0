"""Checks a run before it has a directory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeAlias

import cloudpickle
import numpy as np

from juggler.driver.agents_found import FoundGroup
from juggler.driver.checkpoint.beginning import Origins
from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.checkpoint.restoring import learner_state
from juggler.driver.config import ConfigError, DriverConfig, RunConfig
from juggler.envrunner.config import words_of
from juggler.envrunner.environments.naming import check_name
from juggler.runtime.actors.commands import must_be_there
from juggler.runtime.actors.processes import WorkerProgram, ended, forkserver_pid, start
from juggler.runtime.actors.resources import seconds_used
from juggler.runtime.actors.supervisor import how_it_ended
from juggler.runtime.checkpoints.checkpoint import REPLAY, Checkpoint
from juggler.runtime.checkpoints.weights import is_frozen, weights_in
from juggler.runtime.connectors.config import PLACES
from juggler.runtime.modules.by_name import check_there
from juggler.runtime.wire.trees import Path as TreePath
from juggler.runtime.wire.trees import flatten

#: The shape and dtype of an array.
Layout: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]

_LOOK_SECONDS = 0.2
_ABORT_SECONDS = 2.0  # for an aborted process to write its stack
_STACK_BYTES = 1 << 16
#: Stacks are cut at this file: neither it nor its callers are shown.
_OF_REHEARSALS = "juggler/driver/rehearsal.py"
_STACK_OF_MAIN = "(most recent call first):\n"  # that of the main thread is the last one
_STACK_OF_C = "C stack trace ("  # below those of Python, from 3.14 on


class PreflightError(ConfigError):
    """The run cannot work: its environment or its module cannot be made.

    Attributes:
        traceback: of the code that failed, where that helps; else "".
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback.rstrip()
        if self.traceback:
            self.add_note(self.traceback)


@dataclass(frozen=True, slots=True)
class GoesOn:
    """What a run that is resumed goes on from."""

    checkpoint: Path | None
    # By module id, the shape and dtype of each of its parameters and buffers. Modules that keep
    # none by name are missing.
    layouts: Mapping[str, Mapping[str, Layout]]
    # By module id, the same of all that its learner keeps but for its replay, by path
    states: Mapping[str, Mapping[TreePath, Layout]]
    # By module id, those of its agents, as a checkpoint has them
    spaces: Mapping[str, Mapping[str, Any]]
    # By module id, the name of the core whose state it is; "": unknown
    algorithms: Mapping[str, str]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> GoesOn:
        layouts = {
            module_id: {name: (array.shape, array.dtype) for name, array in arrays.items()}
            for module_id, arrays in weights_in(checkpoint.tree).items()
        }
        states = {
            module_id: {
                path: (array.shape, array.dtype)
                for path, array in flatten(learner_state(module_id, checkpoint))
                if path[0] != REPLAY
            }
            for module_id in layouts
        }
        spaces = {module_id: checkpoint.spaces_of(module_id) for module_id in layouts}
        algorithms = {
            module_id: str(module.get("extra", {}).get("algorithm", ""))
            for module_id, module in checkpoint.modules.items()
        }
        return cls(checkpoint.path, layouts, states, spaces, algorithms)


@dataclass(frozen=True, slots=True)
class Trial:
    """A configuration to try, and what the driver has read for it."""

    config: RunConfig
    before: GoesOn | None = None  # what the run continues from; None: it is new
    origins: Origins | None = None  # the checkpoints that modules begin with
    # The modules that are not trained
    frozen: Mapping[str, FrozenModule] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The arguments of the process that makes a trial."""

    trial: bytes  # cloudpickled, as an algorithm's config may be of a class of a script
    own_code: bytes
    # Receives pairs: (DOES or WARNS, text), and then (FOUND, the agents of its environment) or
    # (FAILED, (message, traceback))
    told: Connection
    stack: Connection  # receives the stack if the process crashes


DOES, WARNS, FOUND, FAILED = "does", "warns", "found", "failed"


def check_names(config: RunConfig) -> None:
    """Check the names in a configuration, without importing user code.

    Raises:
        ConfigError: there is no such environment, simulator or Python module, or the environment
            needs a package that is not installed.
    """
    try:
        if config.plays and not config.env_runner.gateway:
            check_name(config.env_runner.env)
        if config.env_runner.simulator:
            must_be_there(words_of(config.env_runner.simulator))
        for what, name in named_parts(config):
            check_there(name, what)
    except FileNotFoundError as error:
        raise ConfigError(f"simulator = {config.env_runner.simulator!r}: {error}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def named_parts(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield what a configuration names as "package.module:Class": a kind and the name."""
    named: list[tuple[str, object]] = [("mapping", config.agents.mapping)]
    for module_id in dict.fromkeys([*config.module_ids, *config.agents.modules]):
        if is_frozen(config.agents.modules.get(module_id)):
            continue  # it is built from what its checkpoint names
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
    tell: Callable[[str], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> tuple[FoundGroup, ...]:
    """Try environment, modules and learners in a process of their own.

    The process comes from the forkserver, as workers do, and may crash or hang without harm to this
    one. It counts as hung after worker_timeout_seconds without processor time, or after
    hang_seconds of processor time in one step, so that a loaded host does not fail it.

    Args:
        tell: called again and again with what the process is doing.
        warn: called with each thing that people should know, and that does not stop the run.

    Returns:
        The agents of one environment, and their spaces; () if the run has none on this host.

    Raises:
        PreflightError: something cannot be made, crashed or hung, or does not fit what the run goes
            on from; the message says what.
    """
    told, tells = Pipe(duplex=False)
    stack, writes = Pipe(duplex=False)
    with told, stack:
        with tells, writes:
            rehearsal = Rehearsal(cloudpickle.dumps(trial), own_code, tells, writes)
            process = _started(rehearsal, trial.config.driver, tell)
        try:
            return _outcome(process, told, stack, trial.config.driver, tell, warn)
        finally:
            process.kill()
            process.join()
            ended(process)


def _started(
    rehearsal: Rehearsal, driver: DriverConfig, tell: Callable[[str], None]
) -> ForkServerProcess:
    """Start the process, which waits until the forkserver has imported torch."""
    started: Future[ForkServerProcess] = Future()
    program = WorkerProgram("juggler.driver.rehearsal:main", rehearsal)

    def work() -> None:
        try:
            started.set_result(start(program, "rehearsal"))
        except BaseException as error:  # the forkserver died, or was ended
            started.set_exception(error)

    threading.Thread(target=work, name="rehearsal", daemon=True).start()
    progress = _Progress(forkserver_pid(), driver)
    while True:
        tell("importing torch")
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
    told: Connection,
    stack: Connection,
    driver: DriverConfig,
    tell: Callable[[str], None],
    warn: Callable[[str], None],
) -> tuple[FoundGroup, ...]:
    """Watch a rehearsal until it has found the agents of the environment."""
    doing = "trying the environment and the module in a process of their own"
    progress = _Progress(process.pid or 0, driver)

    def written() -> str:
        """What the process wrote as it ended: its stack, if anything."""
        with suppress(OSError):
            if stack.poll():
                return os.read(stack.fileno(), _STACK_BYTES).decode(errors="backslashreplace")
        return ""

    while True:
        tell(doing)
        is_over = process.sentinel in wait([told, process.sentinel], _LOOK_SECONDS)
        said: tuple[str, Any] | None = None
        with suppress(EOFError, OSError):
            said = told.recv() if told.poll() else None
        if said is not None:  # messages come before the process's end
            kind, what = said
            if kind == FOUND:
                return tuple(what)
            if kind == FAILED:
                raise PreflightError(*what)
            if kind == WARNS:
                warn(what)
            else:
                doing, progress = what, _Progress(process.pid or 0, driver)
        elif is_over:
            process.join(_ABORT_SECONDS)
            how, words = how_it_ended(process.exitcode), ended(process)
            how = f"{how}, {words}" if words else how
            raise PreflightError(f"its process ended while {doing}: {how}", written())
        elif problem := progress.problem():
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGABRT)  # makes it write its stack
            process.join(_ABORT_SECONDS)
            raise PreflightError(f"{doing} hangs: {problem}", _where_it_was(written()))


def _where_it_was(written: str) -> str:
    """Word where an aborted process hung, or "".

    It writes the stacks of all its threads, below words that suit a crash: "Fatal Python error".
    """
    of_python = written.partition(_STACK_OF_C)[0]
    main = of_python.rpartition(_STACK_OF_MAIN)[2].partition("\n\n")[0].splitlines()
    calls = list(takewhile(lambda line: _OF_REHEARSALS not in line, main))
    return "\n".join(["It was here, in the call of the first line:", *calls]) if calls else ""
