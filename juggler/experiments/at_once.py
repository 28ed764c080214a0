"""Runs beside each other, as many as the cores allow."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Protocol

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.record.wording import here
from juggler.driver.signals import as_exception, signals_become
from juggler.experiments.board import Board
from juggler.experiments.run_process import RunEnd, RunProcess
from juggler.runtime.actors.resources import usable_cores

_LOOK_SECONDS = 0.25


class Plan(Protocol):
    """Which runs there are to be, and what becomes of them."""

    def next(self) -> RunProcess | None:
        """Start the next run; None: there is none for the time being."""

    def heard(self, run: RunProcess) -> None:
        """Hear what is new of a run that goes on; it may be stopped."""

    def over(self, run: RunProcess, end: RunEnd) -> None:
        """Hear how a run has ended."""

    def show(self, running: Sequence[RunProcess], stopping: bool) -> None:
        """Show people how things stand; called again and again."""


def must_be_some(what: str, number: object) -> None:
    """
    Raises:
        ConfigError: so many runs, or so many at once, are none.
    """
    if not isinstance(number, Integral) or number < 1:
        raise ConfigError(f"{what} = {number!r}: must be a whole number of at least 1")


def jobs_for(config: RunConfig) -> int:
    """How many runs of a configuration this host has cores for; 1 at least."""
    workers = config.driver.num_env_runners + config.driver.learners
    return max(1, int(usable_cores() // workers))


def run_all(plan: Plan, board: Board, what: str, where: Path, jobs: int) -> None:
    """Have a plan's runs, until it has no more.

    Ctrl-C and SIGTERM end all of them in order, and are raised when they have ended; the second
    signal kills them.

    Args:
        plan: starts runs and hears of them.
        board: shows them.
        what: they are, for people.
        where: they are.
        jobs: how many there may be at once.

    Raises:
        KeyboardInterrupt: on Ctrl-C.
        SystemExit: on SIGTERM or SIGHUP.
    """
    running: list[RunProcess] = []
    stopping = threading.Event()
    board.say(f"{what}{f', {jobs} at once' if jobs > 1 else ''}, in {here(where)}")
    try:
        with board.shown(), signals_become(lambda _: stopping.set()) as caught:
            while True:
                while len(running) < jobs and not stopping.is_set() and (run := plan.next()):
                    running.append(run)
                if not running:
                    break
                _look(plan, running, stopping)
        if caught.number:
            raise as_exception(caught.number)
    finally:
        for run in running:
            run.kill()


def _look(plan: Plan, running: list[RunProcess], stopping: threading.Event) -> None:
    """Hear of every run once, and wait a little."""
    for run in [*running]:
        ended = not run.running  # asked first, so that no last line is missed
        plan.heard(run)
        if ended:
            running.remove(run)
            plan.over(run, run.end())
        elif stopping.is_set():
            run.stop()
    plan.show(running, stopping.is_set())
    if running:
        time.sleep(_LOOK_SECONDS)
