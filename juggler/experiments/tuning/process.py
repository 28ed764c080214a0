"""Measures in a process of its own, which an environment can end without ending the command."""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from juggler.driver.config import RunConfig
from juggler.driver.preflight import PreflightError
from juggler.experiments.tuning.speeds import Speeds
from juggler.runtime.actors.attachment import describe
from juggler.runtime.actors.processes import WorkerProgram, ended, start
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
