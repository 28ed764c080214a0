"""What runs have in common whose processes an engine keeps: how it is asked, and how they are
followed to their end."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from juggler.driver.signals import ending_signals
from juggler.launch.commands import LaunchError

Say = Callable[[str], None]

_ANSWER_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_ASK_SECONDS = 5.0  # between questions to the engine
_END_SECONDS = 90.0  # for a driver to end in order
_LAST_LINES_SECONDS = 3.0  # for a command that shows what a process prints
_REMOVED_SECONDS = 90.0  # for an engine, to end all processes


class NoAnswer(LaunchError):
    """An engine gave no answer, or an error: perhaps it does better the next time."""


def ask(*command: str, advice: str, given: str = "") -> str:
    """Run a command of an engine -> what it prints.

    Args:
        command: its words.
        advice: what to do where there is no such command.
        given: its standard input.

    Raises:
        LaunchError: there is no such command.
        NoAnswer: it does not end, or fails.
    """
    try:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
            start_new_session=True,  # Ctrl-C is for the run
        )
    except FileNotFoundError:
        raise LaunchError(f"there is no command `{command[0]}` here: {advice}") from None
    except subprocess.TimeoutExpired:
        said = f"`{command[0]}` gave no answer in {_ANSWER_SECONDS:.0f} s"
        raise NoAnswer(said) from None
    if done.returncode:
        raise NoAnswer(f"`{shlex.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


class Tail:
    """A command of an engine that shows what a process prints, as it comes."""

    def __init__(self, *command: str) -> None:
        """
        Args:
            command: its words.
        """
        # A group of its own: Ctrl-C is for the run, the end of which is to be shown.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """Wait for the last lines, and end the command."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_LINES_SECONDS)
        self._process.terminate()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class DriverState:
    """What an engine says of the process of a driver.

    Attributes:
        said: its state, for people, and the reason for it; "": there is nothing to tell, because
            it runs or is away for a moment.
        running: it runs now.
        status: the exit status with which the run has ended; -1: it has ended as it was asked to,
            and the engine knows no more; None: it goes on.
    """

    said: str = ""
    running: bool = False
    status: int | None = None


class EngineRun(Protocol):
    """A run whose processes an engine keeps."""

    def submit(self) -> None:
        """Hand everything to the engine.

        Raises:
            LaunchError: the engine is not here, or refuses; or it has the run already.
        """

    def driver_state(self, ending: bool) -> DriverState:
        """Ask for the driver.

        Args:
            ending: somebody has asked for the end of the run.

        Raises:
            NoAnswer: the engine gave none.
            LaunchError: the run is gone.
        """

    def show(self) -> None:
        """Print what the driver has printed since the last call."""

    def end(self) -> None:
        """Ask the driver to end in order."""

    def take_down(self) -> None:
        """End all processes at once, and remove what the engine has of the run."""


def follow(run: EngineRun, say: Say) -> int:
    """Show what the driver prints until it has ended, and take the run down -> the exit status of
    the driver. A signal ends the run in order; a second one ends all processes at once.

    Raises:
        LaunchError: the run is gone, or cannot be taken down.
    """
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    with ExitStack() as last:
        for number in ending_signals():
            last.callback(signal.signal, number, signal.signal(number, note))
        with taken_down(run):
            status = _follow(run, say, signals)
            run.show()
        run.take_down()
    return status


@contextmanager
def taken_down(run: EngineRun) -> Iterator[None]:
    """A run that is taken down if something goes wrong with it, Ctrl-C among others."""
    try:
        yield
    except BaseException:
        with suppress(LaunchError):  # the first error is the one to tell
            run.take_down()
        raise


def _follow(run: EngineRun, say: Say, signals: list[int]) -> int:
    state, due, silent = DriverState(), 0.0, False
    first, end, handled = 0, float("inf"), 0
    while True:
        run.show()
        now = time.monotonic()
        asked_to_end = handled < len(signals)
        if (asked_to_end and handled) or now > end:
            say("ending all processes at once")
            return 128 + first
        # A driver that was pending seconds ago may run by now, and then it is to end in order.
        if asked_to_end or now >= due:
            due = now + _ASK_SECONDS
            before = state
            try:
                state, silent = run.driver_state(bool(first)), False
            except NoAnswer as error:
                if not silent:
                    say(f"{error}; the run goes on, and this command asks again")
                silent = True
            if state.status is not None:
                return state.status if state.status >= 0 else 128 + first
            if state.said and state.said != before.said:
                say(f"the driver: {state.said}")
        if asked_to_end:
            first, handled = signals[0], len(signals)
            if not state.running:
                say("ending all processes at once")
                return 128 + first
            say("ending the run; once more ends all processes at once")
            try:
                run.end()
                end = now + _END_SECONDS
            except NoAnswer as error:
                say(str(error))
        time.sleep(_LOOK_SECONDS)


def wait_until_removed(there: Callable[[], object], advice: str) -> None:
    """Wait until an engine has nothing of a run any more. Without an answer it is asked again.

    Args:
        there: whether it has something.
        advice: what to look at if that takes too long.

    Raises:
        LaunchError: it took too long.
    """
    end = time.monotonic() + _REMOVED_SECONDS
    while True:
        why = ""
        try:
            if not there():
                return
        except NoAnswer as error:
            why = f" ({error})"
        if time.monotonic() > end:
            said = f"what was launched is not removed within {_REMOVED_SECONDS:.0f} s{why}"
            raise LaunchError(f"{said}: see {advice}")
        time.sleep(_LOOK_SECONDS)
