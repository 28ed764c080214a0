"""Checks a run before it has a directory: names, environment, module and learner."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeAlias

import cloudpickle
import numpy as np

from juggler.driver.agents_found import FoundGroup, from_bytes
from juggler.driver.checkpoint.restoring import learner_state
from juggler.driver.config import ConfigError, DriverConfig, RunConfig
from juggler.envrunner.environments.naming import check_name
from juggler.runtime.actors.processes import WorkerProgram, ended, forkserver_pid, start
from juggler.runtime.actors.processor_time import seconds_used
from juggler.runtime.actors.supervisor import how_it_ended
from juggler.runtime.checkpoints.checkpoint import REPLAY, Checkpoint
from juggler.runtime.checkpoints.frozen import is_frozen
from juggler.runtime.checkpoints.weights import weights_in
from juggler.runtime.connectors.built_in import PLACES
from juggler.runtime.modules.by_name import check_there
from juggler.runtime.wire.trees import Path as TreePath
from juggler.runtime.wire.trees import flatten
from juggler.runtime.wire.v1 import attach_pb2

#: The shape and dtype of an array.
Layout: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]

_LOOK_SECONDS = 0.2
_ABORT_SECONDS = 2.0  # for an aborted process to write its stack
_STACK_BYTES = 1 << 16
#: What called these interests nobody.
_OF_REHEARSALS = "juggler/driver/rehearsal.py", "juggler/driver/trial_"
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
    """What a run that is resumed goes on from.

    Attributes:
        run_dir: has kept what modules play with that are not trained.
        checkpoint: where it is.
        layouts: by module id, the shape and dtype of each of its parameters and buffers. Modules
            that keep none by name are missing.
        states: by module id, the same of all that its learner keeps but for its replay, by path.
        spaces: by module id, those of its agents, as a checkpoint has them.
        algorithms: by module id, the name of the core whose state it is; "": nobody knows it.
    """

    run_dir: Path
    checkpoint: Path | None
    layouts: Mapping[str, Mapping[str, Layout]]
    states: Mapping[str, Mapping[TreePath, Layout]]
    spaces: Mapping[str, Mapping[str, Any]]
    algorithms: Mapping[str, str]

    @classmethod
    def of(cls, checkpoint: Checkpoint, run_dir: Path) -> GoesOn:
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
        return cls(run_dir, checkpoint.path, layouts, states, spaces, algorithms)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The arguments of the process that tries a configuration out.

    Attributes:
        config: of the run, cloudpickled: an algorithm's may be of a class of a script.
        own_code: as in `EnvRunnerProgram`.
        told: receives what the process is doing, and what it warns of, as text, and then the agents
            of its environment or a Failure.
        stack: receives the stack if the process crashes.
        before: what the run goes on from; None: it is new.
    """

    config: bytes
    own_code: bytes
    told: Connection
    stack: Connection
    before: GoesOn | None


#: First bytes of a rehearsal's messages.
DOES, WARNS, FOUND, FAILED = b"d", b"w", b"a", b"f"


def check_names(config: RunConfig) -> None:
    """Check the names in a configuration, without importing user code.

    Raises:
        ConfigError: there is no such environment or Python module, or the environment needs a
            package that is not installed.
    """
    try:
        if config.plays and not config.env_runner.gateway:
            check_name(config.env_runner.env)
        for what, name in named_parts(config):
            check_there(name, what)
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
    """What a module's configuration may name as "package.module:Class": kinds, and what they are
    there."""
    module, connectors = config.module, config.connectors.parsed()
    return [
        ("module", module.module),
        ("distribution", module.distribution),
        ("encoder", module.model.get("encoder")),
        *(("connector", piece.path) for at in PLACES for piece in connectors.pipeline(at)),
    ]


def rehearse(
    config: RunConfig,
    own_code: bytes = b"",
    tell: Callable[[str], None] = lambda _: None,
    before: GoesOn | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> tuple[FoundGroup, ...]:
    """Make the environment, and each module with its learner, once, in a process of their own.

    The process comes from the forkserver, as workers do, and may crash or hang without harm to this
    one. It counts as hung after worker_timeout_seconds without processor time, or after
    hang_seconds of processor time in one step, so that a loaded host does not fail it.

    Args:
        config: of a run whose workers are on this host.
        own_code: as in `EnvRunnerProgram`.
        tell: called again and again with what the process is doing.
        before: as in `Rehearsal`.
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
            rehearsal = Rehearsal(cloudpickle.dumps(config), own_code, tells, writes, before)
            process = _started(rehearsal, config.driver, tell)
        try:
            return _Watched(process, told, stack, config.driver, tell, warn).outcome()
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


class _Watched:
    """Watches a running rehearsal for the driver."""

    def __init__(
        self,
        process: ForkServerProcess,
        told: Connection,
        stack: Connection,
        driver: DriverConfig,
        tell: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._process, self._told, self._stack = process, told, stack
        self._driver = driver
        self._tell, self._warn = tell, warn
        self._begins("trying the environment and the module in a process of their own")

    def outcome(self) -> tuple[FoundGroup, ...]:
        while True:
            self._tell(self._doing)
            is_over = self._process.sentinel in wait(
                [self._told, self._process.sentinel], _LOOK_SECONDS
            )
            if said := self._said():  # messages come before the process's end
                kind, rest = said[:1], said[1:]
                if kind == FOUND:
                    return from_bytes(rest)
                if kind == FAILED:
                    failure = attach_pb2.Failure.FromString(rest)
                    raise PreflightError(failure.message, failure.traceback)
                (self._warn if kind == WARNS else self._begins)(rest.decode())
            elif is_over:
                self._process.join(_ABORT_SECONDS)
                how, words = how_it_ended(self._process.exitcode), ended(self._process)
                how = f"{how}, {words}" if words else how
                told = f"its process ended while {self._doing}: {how}"
                raise PreflightError(told, self._written())
            elif problem := self._progress.problem():
                with suppress(ProcessLookupError):
                    os.kill(self._process.pid or 0, signal.SIGABRT)  # makes it write its stack
                self._process.join(_ABORT_SECONDS)
                raise PreflightError(
                    f"{self._doing} hangs: {problem}", _where_it_was(self._written())
                )

    def _begins(self, doing: str) -> None:
        self._doing = doing
        self._progress = _Progress(self._process.pid or 0, self._driver)

    def _said(self) -> bytes:
        try:
            return self._told.recv_bytes() if self._told.poll() else b""
        except (EOFError, OSError):
            return b""

    def _written(self) -> str:
        """What the process has written as it ended: its stack, if anything."""
        try:
            stack = os.read(self._stack.fileno(), _STACK_BYTES) if self._stack.poll() else b""
        except OSError:
            stack = b""
        return stack.decode(errors="backslashreplace")


def _where_it_was(written: str) -> str:
    """For people: where a process was that was aborted because it hung; "": it has not said.

    It writes the stacks of all its threads, below words that suit a crash: "Fatal Python error".
    """
    of_python = written.partition(_STACK_OF_C)[0]
    main = of_python.rpartition(_STACK_OF_MAIN)[2].partition("\n\n")[0].splitlines()
    calls = list(takewhile(lambda line: not any(each in line for each in _OF_REHEARSALS), main))
    return "\n".join(["It was here, in the call of the first line:", *calls]) if calls else ""
