"""A parent may leave a command closed streams, blocked signals, and worse."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import os, pathlib, signal, subprocess, sys, types
from juggler import cli

def run(arguments):
    print("nobody reads this")
    found = [
        signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        subprocess.run(["false"]).returncode,
        *(os.readlink(f"/proc/self/fd/{number}") for number in range(3)),
    ]
    pathlib.Path(arguments[0]).write_text(repr(found))
    return 0

sys.modules["probe"] = types.SimpleNamespace(run=run)
cli.COMMANDS["new"] = ("probe", "")
cli.command_line()
"""


def _spoil() -> None:
    os.closerange(0, 3)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@pytest.mark.long
def test_a_command_needs_no_streams_and_neither_its_parents_signals(tmp_path: Path) -> None:
    found = tmp_path / "found"
    command = [sys.executable, "-c", PROGRAM, "new", str(found)]
    assert subprocess.Popen(command, preexec_fn=_spoil).wait(50) == 0
    assert found.read_text() == repr([set(), 1, *["/dev/null"] * 3])


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="making a namespace takes root")
def test_a_first_process_of_a_container_is_terminated_before_its_command_listens() -> None:
    program = """
import sys, time, types
from juggler import cli

def run(arguments):
    print("here", flush=True)
    time.sleep(600)

sys.modules["probe"] = types.SimpleNamespace(run=run)
cli.COMMANDS["new"] = ("probe", "")
cli.command_line()
"""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", program, "new"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as namespace:
        assert namespace.stdout is not None
        assert namespace.stdout.readline() == "here\n"
        (first,) = psutil.Process(namespace.pid).children()
        first.terminate()
        try:
            assert namespace.wait(10) == 128 + signal.SIGTERM
        finally:
            namespace.kill()


@pytest.mark.long
def test_a_working_directory_that_was_deleted_is_one_sentence(tmp_path: Path) -> None:
    def lose() -> None:
        os.rmdir(os.getcwd())

    gone = tmp_path / "gone"
    gone.mkdir()
    command = [sys.executable, "-m", "juggler", "runs"]
    done = subprocess.run(
        command, cwd=gone, preexec_fn=lose, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "working directory was deleted" in done.stderr
