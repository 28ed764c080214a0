"""A worker that waits for its driver to come back ends as any program does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

PROGRAM = """
from juggler.cli import reattaching
from juggler.runtime.actors import worker
from juggler.runtime.actors.mailbox import Mailbox
for number, reason in worker.heeded_signals().items():
    worker._stop_on(number, reason, Mailbox())  # as it leaves them that has lost its driver
reattaching._is_back(worker.Contact("127.0.0.1:9", reattach_seconds=100.0))
"""


@pytest.mark.long
@pytest.mark.parametrize("ignored", [False, True], ids=["of a terminal", "of nohup"])
def test_it_ends_with_its_terminal_unless_nohup_started_it(ignored: bool) -> None:
    hangs_up = signal.SIG_IGN if ignored else signal.SIG_DFL
    waits = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hangs_up),
    )
    assert waits.stderr is not None
    with waits:
        assert "waiting up to 100 s" in waits.stderr.readline()
        waits.send_signal(signal.SIGHUP)
        if ignored:
            with pytest.raises(subprocess.TimeoutExpired):
                waits.wait(0.5)
            waits.send_signal(signal.SIGTERM)
        assert waits.wait(60) == -(signal.SIGTERM if ignored else signal.SIGHUP)


@pytest.mark.skipif(os.getuid() != 0, reason="making a namespace takes root")
def test_it_ends_also_as_process_1() -> None:
    waits = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", PROGRAM],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waits.stderr is not None
    with waits:
        assert "waiting up to 100 s" in waits.stderr.readline()
        (first,) = psutil.Process(waits.pid).children()
        first.terminate()
        try:
            assert waits.wait(30) == 128 + signal.SIGTERM
        finally:
            if waits.returncode is None:
                first.kill()
