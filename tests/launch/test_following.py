"""Runs that are followed to their end, with a scripted engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from support.changes import SkippedTime

from juggler.launch import engine as following
from juggler.launch.engine import DriverState, EngineRun, LaunchError, NoAnswer, ask, follow

RUNS, OVER, WAITS = DriverState(running=True), DriverState(status=3), DriverState("waits")


class _Engine(EngineRun):
    """Answers questions in order, and records its commands."""

    def __init__(self, *answers: DriverState | Exception | Callable[[], DriverState]) -> None:
        self._answers = list(answers)
        self.done: list[str] = []
        self.ending: list[bool] = []
        self.signals: list[int] = []

    def driver_state(self, ending: bool) -> DriverState:
        self.ending.append(ending)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, DriverState) else answer()

    def plan(self) -> str:
        raise AssertionError

    def submit(self) -> None:
        raise AssertionError

    def end(self) -> None:
        self.done.append("end")

    def tear_down(self) -> None:
        self.done.append("take down")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "time", SkippedTime())


def _signalled(number: int) -> Callable[[], DriverState]:
    def answer() -> DriverState:
        os.kill(os.getpid(), number)
        return RUNS

    return answer


def test_a_run_that_ends_is_taken_down_and_its_exit_status_returned() -> None:
    engine, said = _Engine(WAITS, WAITS, RUNS, OVER), list[str]()
    assert follow(engine, said.append) == 3
    assert engine.done == ["take down"]
    assert said == ["the driver: waits"]


def test_an_engine_that_does_not_answer_for_a_while_ends_no_run() -> None:
    silence = NoAnswer("`squeue` gave no answer within 60 s")
    engine, said = _Engine(RUNS, silence, silence, RUNS, silence, OVER), list[str]()
    assert follow(engine, said.append) == 3
    assert said == [f"{silence}; the run continues, and this command will ask again"] * 2


def test_a_run_that_is_gone_is_told() -> None:
    engine = _Engine(RUNS, LaunchError("it is gone"))
    with pytest.raises(LaunchError, match="it is gone"):
        follow(engine, lambda text: None)
    assert engine.done == ["take down"]


def test_a_signal_ends_the_run_in_order() -> None:
    engine = _Engine(RUNS, _signalled(signal.SIGTERM), RUNS, RUNS, DriverState(status=-1))
    before = signal.getsignal(signal.SIGTERM)
    assert follow(engine, lambda text: None) == 143
    assert engine.done == ["end", "take down"]
    assert engine.ending == [False, False, False, True, True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_ends_everything_at_once() -> None:
    engine = _Engine(RUNS, _signalled(signal.SIGINT), RUNS, _signalled(signal.SIGTERM))
    assert follow(engine, lambda text: None) == 130
    assert engine.done == ["end", "take down"]


def test_a_signal_to_a_driver_that_runs_since_the_last_question_ends_it_in_order() -> None:
    engine = _Engine(lambda: (_signalled(signal.SIGINT)(), WAITS)[1], RUNS, DriverState(status=-1))
    assert follow(engine, lambda text: None) == 130
    assert engine.done == ["end", "take down"]


def test_a_driver_that_does_not_end_in_time_is_ended() -> None:
    engine = _Engine(RUNS, _signalled(signal.SIGINT), *[RUNS] * 999)
    assert follow(engine, lambda text: None) == 130
    assert engine.done == ["end", "take down"]


def test_an_engine_that_gives_no_answer_while_it_removes_a_run_is_asked_again() -> None:
    answers: list[bool | Exception] = [True, NoAnswer("it is busy"), True, False]

    def there() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    following.wait_until_removed(there, "the engine")
    assert not answers
    answers = [NoAnswer("it is busy")] * 999
    with pytest.raises(LaunchError, match="removed"):
        following.wait_until_removed(there, "the engine")


@pytest.mark.slow
def test_what_a_command_of_an_engine_says_is_told() -> None:
    assert ask("echo", "-n", "text", advice="") == "text"
    with pytest.raises(NoAnswer, match=r"`ls /none` failed: .*No such file"):
        ask("ls", "/none", advice="")
    with pytest.raises(LaunchError, match="install"):
        ask("no-engine", advice="install it")


def test_a_launch_that_nohup_started_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        engine = _Engine(RUNS, _signalled(signal.SIGHUP), RUNS, OVER)
        assert follow(engine, lambda text: None) == 3
    finally:
        signal.signal(signal.SIGHUP, before)
    assert engine.ending == [False] * 4
    assert engine.done == ["take down"]
