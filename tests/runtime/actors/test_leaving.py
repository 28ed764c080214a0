"""A worker that is let go leaves, whatever its main loop does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, time
from juggler.runtime.actors import worker
from juggler.runtime.actors.hub import Hub, HubSettings
from juggler.runtime.actors.hub_events import Joined
from juggler.runtime.actors.mailbox import Mailbox

worker._LEAVE_SECONDS = 1.5
events = Mailbox()
hub = Hub(HubSettings(run_id="run", roles=("worker",)), events)
(address,) = hub.start(["127.0.0.1:0"])

def let_go():
    (joined,) = events.gather(10)
    assert isinstance(joined, Joined)
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
time.sleep(2)  # it may do other things then
hub.close()
"""


def _leave(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, str(program), how], capture_output=True, text=True, timeout=50
    )


def test_one_that_hangs_is_ended_and_says_where(tmp_path: Path) -> None:
    done = _leave(tmp_path, "hangs")
    assert done.returncode == 1
    line = next(i for i, text in enumerate(PROGRAM.splitlines(), 1) if "# in here" in text)
    assert f'program.py", line {line} in run' in done.stderr


def test_one_that_leaves_by_itself_is_left_alone(tmp_path: Path) -> None:
    done = _leave(tmp_path, "leaves")
    assert done.returncode == 1, done.stderr  # it was let go for a reason
    assert "the driver let this worker go: enough" in done.stderr


def test_one_that_waits_for_its_driver_is_interrupted_at_once() -> None:
    program = """
from juggler.runtime.actors.worker import Contact, attach_and_run
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
    program = """
import signal
from juggler.runtime.actors import worker
print(*(each.name for each in worker.heeded_signals()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=50,
        preexec_fn=lambda: signal.signal(
            signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL
        ),
    )
    assert done.stdout.split() == ["SIGTERM", "SIGINT"] + ["SIGHUP"] * (not ignored), done.stderr
