"""A worker ignores stop signals; what its environments start does not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from juggler.runtime.actors.worker import handled_signals

_BEGIN = """
import multiprocessing, os, signal, subprocess, time
from juggler.driver.signals import signals_become
from juggler.runtime.actors.stop_signals import STOP_SIGNALS, ignore_stop_signals
from juggler.runtime.actors.worker import _on_signals
"""
_WAYS = {
    "a worker": "ignore_stop_signals()",
    "a worker that dialed in": "_on_signals(print)",
    "a driver": "run = signals_become(print); run.__enter__()",
}


def _prints(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + program], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("way", _WAYS)
def test_programs_and_pools_that_an_environment_starts_can_be_ended(way: str) -> None:
    program = f"""
{_WAYS[way]}
for number in STOP_SIGNALS:
    simulator = subprocess.Popen(["sleep", "1000"])
    simulator.send_signal(number)
    print(simulator.wait(60))
for _ in range(8):  # a signal may come at any moment of a fork
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(abs, [-1, -2])
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    assert _prints(program).split() == ["-2", "-15", "-1", "set()"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_was_ignored_before_a_run_stays_ignored() -> None:
    program = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
ignore_stop_signals()
program = subprocess.Popen(["sleep", "1000"])
program.send_signal(signal.SIGHUP)
program.terminate()
print(program.wait(60))
"""
    assert _prints(program).split() == ["-15"]


# A released worker leaves, even if its main loop is busy.


PROGRAM = """
import sys, threading, time
from juggler.runtime.actors import worker
from juggler.runtime.actors.hub import Hub, HubSettings
from juggler.runtime.actors.hub import WorkerJoined
from juggler.runtime.actors.hub import Mailbox

worker._LEAVE_SECONDS = 1.0
events = Mailbox()
hub = Hub(HubSettings(run_id="run", roles=("worker",)), events)
(address,) = hub.start(["127.0.0.1:0"])

def let_go():
    (joined,) = events.gather(10)
    assert isinstance(joined, WorkerJoined)
    hub.dismiss(joined.worker, "enough")

class Body:
    def __init__(self, attachment, inbox):
        self.inbox = inbox
    def run(self):
        if sys.argv[1] == "hangs":
            time.sleep(60)  # in here
        return self.inbox.gather(10)[0].reason
    def close(self):
        pass

threading.Thread(target=let_go).start()
worker.attach_and_run(worker.Contact(address), "worker", Body)
time.sleep(1.3)  # it may do other things then
hub.close()
"""


def _leave(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, str(program), how], capture_output=True, text=True, timeout=200
    )


@pytest.mark.slow
def test_one_that_hangs_is_ended_and_says_where(tmp_path: Path) -> None:
    done = _leave(tmp_path, "hangs")
    if done.returncode == -signal.SIGSEGV:
        return  # Python reads the stacks of running threads, and rarely crashes while it does
    assert done.returncode == 1
    line = next(i for i, text in enumerate(PROGRAM.splitlines(), 1) if "# in here" in text)
    assert f'program.py", line {line} in run' in done.stderr


@pytest.mark.slow
def test_one_that_leaves_by_itself_is_left_alone(tmp_path: Path) -> None:
    done = _leave(tmp_path, "leaves")
    assert done.returncode == 1, done.stderr  # it was released for a reason
    assert "the driver dismissed this worker: enough" in done.stderr


@pytest.mark.slow
def test_one_that_waits_for_its_driver_is_interrupted_at_once() -> None:
    program = """
from juggler.runtime.actors.worker import attach_and_run
from juggler.runtime.actors.attachment import Contact
attach_and_run(Contact("127.0.0.1:9"), "worker", None)
"""
    worker = subprocess.Popen(
        [sys.executable, "-c", program],
        stderr=subprocess.PIPE,
        text=True,
        # A job of a shell that has none may have been told to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert worker.stderr is not None
    with worker:
        assert worker.stderr.readline() == "juggler worker: dials the driver at 127.0.0.1:9\n"
        worker.send_signal(signal.SIGINT)
        rest = worker.stderr.read()
    assert rest == "juggler worker: interrupted before a driver had answered\n"
    assert worker.returncode == 1


@pytest.mark.parametrize("ignored", [True, False])
def test_one_that_nohup_started_outlives_its_terminal(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        heeded = [each.name for each in handled_signals()]
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heeded == ["SIGTERM", "SIGINT"] + ["SIGHUP"] * (not ignored)
