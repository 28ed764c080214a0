"""How the processes of workers end that a driver did not start itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from juggler.runtime.actors.hub import Hub, HubSettings
from juggler.runtime.actors.hub_events import Joined
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.wire.v1 import attach_pb2

_PATIENCE = 200.0  # seconds until a test fails; nothing takes as long

#: Threads are in C++ code, and come back to Python while the interpreter would be taken apart.
_BUSY = """
import atexit, sys, threading, time, torch
from juggler.cli import command_line

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

def multiply():
    the_end.wait()
    while True:
        matrix @ matrix

def begin_to_multiply():
    the_end.set()
    time.sleep(0.5)

matrix, sys.slow, the_end = torch.ones(500, 500), Slow(), threading.Event()
atexit.register(begin_to_multiply)
for _ in range(2):
    threading.Thread(target=multiply, daemon=True).start()
command_line()
"""

_LEAVES = """
import atexit, ctypes, sys, threading, time
from juggler.runtime.actors.processes import leave

class Kept:
    def __del__(self):
        print("taken apart")

def write():
    threading.main_thread().join(0.2)
    print("written by a thread")

sys.kept = Kept()
atexit.register(print, "registered")
ctypes.CDLL(None).puts(b"printed by C")
threading.Thread(target=write).start()
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
leave(CODE)
"""


@pytest.mark.long
@pytest.mark.parametrize("role", ["learner", "envrunner", "evaluator"])
def test_a_worker_whose_threads_are_busy_at_its_end_has_the_status_of_its_work(role: str) -> None:
    events: Mailbox[object] = Mailbox()
    hub = Hub(HubSettings(run_id="run", roles=(role,)), events)
    (address,) = hub.start(["127.0.0.1:0"])
    program = [sys.executable, "-c", _BUSY, role, "--driver", address]
    worker = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
    try:
        (joined,) = events.gather(_PATIENCE)
        assert isinstance(joined, Joined)
        assert hub.send(joined.worker, 1, attach_pb2.Stop())
        _, said = worker.communicate(timeout=_PATIENCE)
        assert worker.returncode == 0, said
        assert said.splitlines()[-1].endswith(": stopped by the driver"), said
    finally:
        worker.kill()
        worker.communicate()
        hub.close()


def _left(code: int | str | None) -> subprocess.CompletedProcess[str]:
    program = _LEAVES.replace("CODE", repr(code))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=_PATIENCE
    )


@pytest.mark.long
def test_who_leaves_does_all_that_python_does_at_its_end_but_take_itself_apart() -> None:
    done = _left(3)
    assert {*done.stdout.splitlines()} == {"printed by C", "written by a thread", "registered"}
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.long
def test_who_leaves_with_words_has_failed_and_says_them() -> None:
    done = _left("nobody listens")
    assert (done.returncode, done.stderr) == (1, "nobody listens\n")
    assert _left(None).returncode == 0


@pytest.mark.long
def test_a_worker_that_is_misused_says_so_by_its_status(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "juggler", "envrunner", "--dirver", "here"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
    )
    assert done.returncode == 2, done.stderr
    assert "--driver" in done.stdout + done.stderr
