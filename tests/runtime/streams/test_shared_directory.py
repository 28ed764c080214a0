"""Sockets in a directory that containers share, through which they share memory."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.changes import SkippedTime
from support.learner_end import PATIENCE, LearnerEnd, Senders, tree
from support.sharing import FURTHER, SIZE, mapped, send_each
from support.weights_learner import Join, Learner, names_of, readers_stay, relaying

from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams import memory_socket, shared_directory
from juggler.runtime.streams.host_weights import Meeting, WeightsRelay
from juggler.runtime.streams.memory_socket import MemorySocket, connect, memory_path
from juggler.runtime.streams.shared_directory import dial, learner_socket, shared_address

pytestmark = pytest.mark.usefixtures("everything_is_large")

A_LISTENER = """
import signal
from juggler.runtime.streams.memory_socket import MemorySocket
from juggler.runtime.streams.shared_directory import shared_address
held = MemorySocket(shared_address("of a process that is killed"))
print("listens", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory."""
    made = tmp_path / "shared"
    made.mkdir(mode=0o700)
    monkeypatch.setenv("JUGGLER_SHARED_DIR", str(made))
    return made


@pytest.fixture
def learner(tmp_path: Path, shared: Path, every_thread_ends: None) -> Iterator[LearnerEnd]:
    """Over TCP it shares memory in the directory."""
    end = LearnerEnd(tmp_path, shared=learner_socket("secret", "run", "learner"))
    yield end
    end.stop()
    assert list(shared.iterdir()) == []


def _taken(listener: MemorySocket, token: str) -> list[socket.socket]:
    """The connections that it takes with a token."""
    taken: list[socket.socket] = []
    listener.expect(token, taken.append)
    return taken


def _close(*connections: socket.socket) -> None:
    for each in connections:
        each.close()


# -- sharers --------------------------------------------------------------------------------------


def test_over_tcp_batches_lie_in_memory_if_both_ends_have_the_directory(
    learner: LearnerEnd, senders: Senders
) -> None:
    memory = learner_socket("secret", "run", "learner")
    sender = senders.open(learner.tcp_address, memory=memory)

    def lies_in_memory() -> bool:
        send_each(senders, sender, next(FURTHER))
        return bool(mapped())

    while not lies_in_memory():
        pass
    learner.taken.clear()
    send_each(senders, sender, *range(1, 10))
    for frame in learner.taken:
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, SIZE))
    assert senders.inline == []


def test_readers_of_weights_meet_in_the_directory(
    server: Learner, meeting: Meeting, shared: Path, join: Join, publish: Callable[..., Version]
) -> None:
    readers = [join(server.tcp_address) for _ in range(4)]
    publish(*readers)
    readers_stay(server, 1)
    assert len(relaying(readers)) == 1
    publish(*readers)
    assert names_of(meeting) == [0]
    assert [each.name for each in shared.iterdir()] == [Path(memory_path(meeting.address(0))).name]
    while len(mapped()) > 1:  # all of them map one memory, once they have released the one before
        publish(*readers)


# -- sockets that are left behind -----------------------------------------------------------------


@pytest.mark.slow
def test_the_next_to_listen_removes_what_killed_processes_left_and_nothing_else(
    shared: Path,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", A_LISTENER], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "listens\n"
    lives = MemorySocket(shared_address("of a process that lives"))
    taken = _taken(lives, "token")
    path = memory_path(shared_address("of a process that is killed"))
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    process.stdout.close()
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    elsewhere = shared / "juggler-anotherhost-name"  # it looks abandoned from here
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(elsewhere))
    (shared / "notes.txt").write_text("not of Juggler")
    kept = memory_path(shared_address("a file"))
    Path(kept).write_text("no socket")
    with pytest.raises(ConnectionRefusedError):
        connect(path, "token")

    again = MemorySocket(shared_address("of a process that is killed"))
    also = _taken(again, "token")
    connections = [
        connect(memory_path(shared_address(f"of a process that {what}")), "token")
        for what in ("lives", "is killed")
    ]
    again.close()
    lives.close()
    _close(*connections, *taken, *also)
    left = {each.name for each in shared.iterdir()}
    assert left == {elsewhere.name, "notes.txt", Path(kept).name}


def test_a_socket_that_replaced_an_abandoned_one_is_not_removed(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = shared_address("replaced")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(memory_path(address))
    dial, begun = shared_directory.dial, list[MemorySocket]()

    def dial_and_replace(path: str, seconds: float | None) -> socket.socket:
        try:
            return dial(path, seconds)
        except ConnectionRefusedError:
            if not begun:  # another process is faster
                monkeypatch.setattr(shared_directory, "dial", dial)
                begun.append(MemorySocket(address))
            raise

    monkeypatch.setattr(shared_directory, "dial", dial_and_replace)
    shared_directory.remove_abandoned()
    (taken,) = begun
    _taken(taken, "known")
    connect(memory_path(address), "known", PATIENCE).close()
    taken.close()


def test_a_closed_listener_leaves_the_socket_of_its_successor(shared: Path) -> None:
    first = MemorySocket(shared_address("name"))
    path = str(*shared.iterdir())
    os.unlink(path)
    successor = MemorySocket(shared_address("name"))
    taken = _taken(successor, "token")
    first.close()
    connect(path, "token", PATIENCE).close()
    successor.close()
    _close(*taken)
    assert list(shared.iterdir()) == []


def test_only_one_process_listens_at_a_path(shared: Path) -> None:
    first = MemorySocket(shared_address("name"))
    try:
        with pytest.raises(OSError, match="Address already in use"):
            MemorySocket(shared_address("name"))
        assert len(list(shared.iterdir())) == 1
    finally:
        first.close()
    MemorySocket(shared_address("name")).close()
    assert list(shared.iterdir()) == []


def test_a_token_that_is_expected_no_more_is_refused(shared: Path) -> None:
    made = MemorySocket(shared_address("name"))
    made.expect("token", socket.socket.close)
    made.forget("token")
    with pytest.raises(ConnectionResetError):
        connect(str(*shared.iterdir()), "token")
    made.close()


def test_a_client_that_sends_no_token_is_dropped_and_no_other(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SkippedTime()
    monkeypatch.setattr(memory_socket, "time", clock)
    made = MemorySocket(shared_address("name"))
    taken = _taken(made, "token")
    path = str(*shared.iterdir())
    with dial(path, PATIENCE) as silent, connect(path, "token", PATIENCE) as other:
        clock.sleep(2.0)
        with connect(path, "token", PATIENCE):  # wakes the thread
            assert silent.recv(1) == b""
        taken[0].send(b"x")
        assert other.recv(1) == b"x"
    made.close()
    _close(*taken)


def test_a_socket_is_its_owners_alone(shared: Path) -> None:
    before = os.umask(0)
    try:
        made = MemorySocket(shared_address("name"))
    finally:
        os.umask(before)
    (path,) = shared.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made.close()


# -- other writers -------------------------------------------------------------------------------


def test_no_reader_is_kept_from_weights_by_a_file_in_the_place_of_the_relay(
    server: Learner,
    meeting: Meeting,
    shared: Path,
    join: Join,
    publish: Callable[..., Version],
    notes: list[str],
) -> None:
    for number in range(3):
        Path(memory_path(meeting.address(number))).write_text("no socket")
    readers = [join(server.tcp_address) for _ in range(2)]
    publish(*readers)
    publish(*readers)
    readers_stay(server, 2)
    assert len(notes) == 2, "each says so once"
    assert all("not a socket" in each for each in notes)


# -- what the variable may say --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("/nowhere/at/all", "No such file or directory"),
        ("relative", "not the absolute path of a directory"),
        ("{tmp}/file", "not the absolute path of a directory"),
        ("{tmp}/open", "other users may write there"),
    ],
)
def test_a_directory_that_cannot_be_used_is_an_error_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relative").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    said = said.format(tmp=tmp_path)
    monkeypatch.setenv("JUGGLER_SHARED_DIR", said)
    with pytest.raises(EndpointError, match=f"JUGGLER_SHARED_DIR={said}: .*{why}"):
        learner_socket("secret", "run", "learner")


def test_without_the_variable_nobody_has_an_address_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUGGLER_SHARED_DIR")
    assert learner_socket("secret", "run", "learner") == ""
    assert memory_path(Meeting("secret").address(0)).startswith("\0juggler-")


def test_nobody_meets_a_process_of_another_user(
    monkeypatch: pytest.MonkeyPatch, meeting: Meeting
) -> None:
    monkeypatch.delenv("JUGGLER_SHARED_DIR")
    relay = meeting.find(may_relay=True)
    assert isinstance(relay, WeightsRelay)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match="another user"):
        connect(memory_path(meeting.address(0)), meeting.token)
    relay.close()
