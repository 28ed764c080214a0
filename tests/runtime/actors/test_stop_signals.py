"""A worker ignores stop signals; what its environments start does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

_BEGIN = """
import multiprocessing, os, signal, subprocess, time
from juggler.driver.signals import signals_become
from juggler.runtime.actors.stop_signals import STOP_SIGNALS, ignore_stop_signals
from juggler.runtime.actors.worker import _stop_on
"""
_WAYS = {
    "a worker": "ignore_stop_signals()",
    "a worker that dialed in": "[_stop_on(each, 'terminated', None) for each in STOP_SIGNALS]",
    "a driver": "run = signals_become(print); run.__enter__()",
}


def _prints(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + program], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("way", _WAYS)
def test_programs_and_pools_that_an_environment_starts_can_be_ended(way: str) -> None:
    program = f"""
{_WAYS[way]}
for number in STOP_SIGNALS:
    simulator = subprocess.Popen(["sleep", "1000"])
    simulator.send_signal(number)
    print(simulator.wait(5))
for _ in range(20):  # a signal may come at any moment of a fork
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(abs, [-1, -2])
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    assert _prints(program).split() == ["-2", "-15", "-1", "set()"]


def test_a_worker_and_what_a_forkserver_forks_ignore_stop_signals() -> None:
    program = """
def is_left():
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)
    time.sleep(0)
    print("left", flush=True)
ignore_stop_signals()
is_left()
ignore_stop_signals(inherited=True)
process = multiprocessing.get_context("fork").Process(target=is_left)
process.start()
process.join()
"""
    assert _prints(program).split() == ["left", "left"]


def test_what_was_ignored_before_a_run_stays_ignored() -> None:
    program = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
ignore_stop_signals()
program = subprocess.Popen(["sleep", "1000"])
program.send_signal(signal.SIGHUP)
program.terminate()
print(program.wait(5))
"""
    assert _prints(program).split() == ["-15"]
