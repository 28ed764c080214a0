"""A user's directory, where readers of weights meet."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.learner_end import PATIENCE
from support.processes import eventually

from juggler.driver.workers.local_workers import LocalWorkers
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.streams import memory_socket
from juggler.runtime.streams.host_weights import Meeting, WeightsRelay

A_RELAY_THAT_FORKS = """
import os, signal, sys
from juggler.runtime.streams.host_weights import Meeting
relay = Meeting(*sys.argv[1:]).find(may_relay=True)
if child := os.fork():
    print(child, flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("JUGGLER_SHARED_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"juggler-{os.geteuid()}"


def _leave_a_relays_socket(secret: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", A_RELAY_THAT_FORKS, secret], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    os.kill(child, signal.SIGKILL)
    process.wait(PATIENCE)
    process.stdout.close()
    eventually(lambda: not _holds_files(child))


def _holds_files(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _relay(meeting: Meeting) -> WeightsRelay:
    found = meeting.find(may_relay=True)
    assert isinstance(found, WeightsRelay)
    return found


def test_the_directory_and_what_is_in_it_are_the_users_alone(directory: Path) -> None:
    relay = _relay(Meeting("secret"))
    (made,) = directory.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    other = _relay(Meeting("other"))
    relay.close()
    assert len(list(directory.iterdir())) == 1
    other.close()
    assert not directory.exists()


def test_a_relay_makes_the_directory_anew_that_the_last_one_removed_meanwhile(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Path] = []

    def leaving(*args: Any) -> Any:
        if not left:
            directory.rmdir()
            left.append(directory)
        return listen(*args)

    listen = memory_socket.listen
    monkeypatch.setattr(memory_socket, "listen", leaving)
    relay = _relay(Meeting("secret"))
    assert left
    relay.close()


def _others_may_write(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o770)


def _a_link(directory: Path) -> None:
    (directory.parent / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to("elsewhere")


def _a_file(directory: Path) -> None:
    directory.touch(0o600)


@pytest.mark.parametrize("make", [_others_may_write, _a_link, _a_file])
def test_nobody_meets_in_what_is_not_a_directory_of_this_user_alone(
    directory: Path, make: Callable[[Path], None]
) -> None:
    make(directory)
    for may_relay in True, False:
        with pytest.raises(PermissionError, match="not a directory in which only this user"):
            Meeting("secret").find(may_relay=may_relay)


@pytest.mark.slow
def test_a_run_removes_what_killed_relays_have_left_as_it_begins_and_ends(directory: Path) -> None:
    _leave_a_relays_socket("secret")
    lives = _relay(Meeting("other"))
    _leave_a_relays_socket("another secret")
    assert len(list(directory.iterdir())) == 2
    workers = LocalWorkers(Mailbox(), "run", "token", b"")
    assert len(list(directory.iterdir())) == 1, "that of the relay which lives"
    lives.close()
    assert not directory.exists()
    _leave_a_relays_socket("secret")
    workers.close(0.0)
    assert not directory.exists()
