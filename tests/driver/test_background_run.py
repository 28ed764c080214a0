"""A background run: its metrics, its end, and the program's end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import juggler
from juggler.driver import start_run
from juggler.driver.callbacks import ChangedValues
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.reporting.wording import Progress
from juggler.driver.start_run import StartedRun


class Trains:
    """Replace `juggler.train` by a scripted run."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.over = threading.Event()
        self.began = threading.Event()
        self.error: Exception | None = None

    def __call__(self, follower: juggler.Callback) -> juggler.Result:
        nobody, values = cast(DriverCore, None), cast(ChangedValues, None)
        self.run = juggler.Run(Path("runs/one"), {}, nobody, Progress(), self.stop, values, nobody)
        self.follower = follower
        follower.on_start(self.run)
        self.began.set()
        assert self.over.wait(60)
        if self.error:
            raise self.error
        return juggler.Result({"reason_for_stop": "stop_steps"}, self.run.run_dir, None)

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)
        self.over.set()

    def line(self, number: int) -> None:
        self.follower.on_metrics(self.run, {"updates": number})


@pytest.fixture(autouse=True)
def _no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_run, "share_forkserver", lambda: None)
    monkeypatch.setattr(start_run, "release_forkserver", lambda: None)


def test_metrics_come_one_by_one_until_the_run_is_over() -> None:
    trains = Trains()
    run = StartedRun(trains)
    assert (run.run_dir, run.running) == (Path("runs/one"), True)
    trains.line(1)
    trains.line(2)
    lines = run.metrics()
    assert next(lines) == {"updates": 2}, "the newest is there at once"
    trains.line(3)
    assert next(lines) == {"updates": 3}
    trains.line(4)
    trains.over.set()
    assert list(lines) == [{"updates": 4}]
    assert run.result(10).summary == {"reason_for_stop": "stop_steps"}
    assert not run.running
    assert list(run.metrics()) == [{"updates": 4}], "also when it is over"


class Values:
    """Takes the place of `ChangedValues`: keeps what was set."""

    def __init__(self) -> None:
        self.were_set: list[tuple[object, ...]] = []
        self.by_the_run = threading.Event()

    def set(self, key: str, value: float | None, module_id: str | None = None) -> None:
        if key == "lrr":
            raise ValueError("did you mean 'lr'?")
        self.were_set.append((key, value, module_id))


def test_numbers_are_set_and_errors_come_back() -> None:
    trains, values = Trains(), Values()
    run = StartedRun(trains)
    trains.run._values = cast(ChangedValues, values)
    run.set("lr", 1e-3)
    run.set("lr", None, module_id="default")
    assert values.were_set == [("lr", 1e-3, None), ("lr", None, "default")]
    with pytest.raises(ValueError, match="did you mean 'lr'"):
        run.set("lrr", 1e-3)
    trains.over.set()
    run.result(10)
    with pytest.raises(ValueError, match="the run has ended"):
        run.set("lr", 1e-3)


def test_stop_ends_it_and_a_result_can_be_waited_for_with_a_limit() -> None:
    trains = Trains()
    run = StartedRun(trains)
    with pytest.raises(TimeoutError, match=r"runs/one is still running after 0\.01 s"):
        run.result(0.01)
    run.stop("pruned")
    assert run.result(10).run_dir == Path("runs/one")
    assert trains.stopped == ["pruned"]


def test_what_fails_before_it_begins_is_raised_at_once() -> None:
    def fails(follower: juggler.Callback) -> juggler.Result:
        raise juggler.ConfigError("lr = x")

    with pytest.raises(juggler.ConfigError, match="lr = x"):
        StartedRun(fails)


def test_what_fails_later_is_raised_by_the_result_and_ends_the_metrics() -> None:
    trains = Trains()
    trains.error = juggler.RunFailed("the learner is lost")
    run = StartedRun(trains)
    trains.over.set()
    assert list(run.metrics()) == []
    with pytest.raises(juggler.RunFailed, match="the learner is lost"):
        run.result(10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_ever_where_the_end_of_the_processes_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise ChildProcessError("another thread has waited for the forkserver")

    monkeypatch.setattr(start_run, "release_forkserver", fails)
    trains = Trains()
    run = StartedRun(trains)
    trains.over.set()
    assert run.result(timeout=30).run_dir == Path("runs/one")
    assert list(run.metrics()) == []


def test_an_interrupt_while_it_begins_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trains = Trains()

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    begins: Callable[[], Any] = start_run._Follower

    def interrupted() -> Any:
        follower = begins()
        follower.begun = Interrupted()
        return follower

    monkeypatch.setattr(start_run, "_Follower", interrupted)
    with pytest.raises(KeyboardInterrupt):
        StartedRun(trains)
    assert trains.over.wait(60)
    assert trains.stopped == ["interrupted"]


PROGRAM = """
import threading
from pathlib import Path
import juggler
from juggler.driver import started

started.share_forkserver = started.release_forkserver = lambda: None

def trains(follower):
    over = threading.Event()
    stop = lambda reason: (print(reason), over.set())
    run = juggler.Run(Path("one"), {}, None, None, stop, None, None)
    follower.on_start(run)
    while not over.wait(0.02):
        follower.on_metrics(run, {"updates": 1})

run = started.StartedRun(trains)
"""


@pytest.mark.long
def test_a_program_that_ends_ends_its_run_in_order() -> None:
    program = PROGRAM + "print('the program is over')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.stdout.decode().split("\n")[:2] == ["the program is over", "program_ended"]
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_an_interrupt_while_a_result_is_waited_for_ends_the_run_in_order() -> None:
    program = PROGRAM + "print('waits', flush=True)\nrun.result()"
    begun = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert begun.stdout is not None
    assert begun.stdout.readline() == "waits\n"
    time.sleep(0.3)
    begun.send_signal(signal.SIGINT)
    assert begun.communicate(timeout=60)[0] == "program_ended\n"
    assert begun.returncode == -signal.SIGINT
