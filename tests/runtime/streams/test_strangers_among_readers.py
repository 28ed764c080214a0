"""Readers of weights on one host, where others have their names, lie, or have no memory."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.sharing import soon
from support.weights_learner import PATIENCE, Learner
from support.weights_readers import (
    Join,
    names_of,
    readers_at,
)

from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.host_weights import Meeting, RelayConnection, WeightsRelay
from juggler.runtime.streams.memory_sockets import MemorySocket, memory_path, proofs
from juggler.runtime.streams.shared_memory import DESCRIPTOR, OFFER

pytestmark = pytest.mark.usefixtures("everything_is_large")

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def _hears_as_nobody(path: str, shown: bytes) -> int:
    """How many bytes another user's process is sent, which proves to know the token."""
    child = os.fork()
    if child == 0:  # it does nothing for which another thread's lock could be missing
        heard = 0
        try:
            os.setresuid(NOBODY, NOBODY, NOBODY)
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.settimeout(PATIENCE)
            stranger.connect(path)
            stranger.send(shown)
            heard = len(stranger.recv(64))
        except (ConnectionError, PermissionError):  # it may not even enter the directory
            pass
        except BaseException:
            heard = 255
        finally:
            os._exit(heard)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_reader_that_cannot_be_watched_leaves_others_theirs(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = meeting.find(may_relay=True)
    assert isinstance(relay, WeightsRelay)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(relay._selector, "register", full)
            refused = meeting.find(may_relay=False)
            assert isinstance(refused, RelayConnection)
            with pytest.raises(ConnectionError):
                refused.next_chunk()
            refused.close()
        found = meeting.find(may_relay=False)
        assert isinstance(found, RelayConnection)
        assert found.next_chunk() is None
        found.close()
    finally:
        relay.close()


@as_root
def test_another_user_is_handed_nothing(meeting: Meeting) -> None:
    relay = meeting.find(may_relay=True)
    assert isinstance(relay, WeightsRelay)
    try:
        path = memory_path(meeting.address(0))
        assert _hears_as_nobody(path, proofs(meeting.token, path)[0]) == 0
        found = meeting.find(may_relay=True)  # its own user is let in
        assert isinstance(found, RelayConnection)
        found.close()
    finally:
        relay.close()


@as_root
def test_a_name_that_another_user_has_is_passed_over(
    meeting: Meeting, join: Join, publish: Callable[..., Version], server: Learner
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.bind(memory_path(meeting.address(0, make=True)))
        os.seteuid(NOBODY)
        stranger.listen()  # who does this is known to those that connect
        os.seteuid(0)
        readers = [join() for _ in range(3)]
        publish(*readers)
        soon(lambda: readers_at(server) == 1, "one relays at the next name")
        publish(*readers)
        assert names_of(meeting) == [0, 1]


def test_one_who_does_not_know_the_secret_relays_to_nobody(meeting: Meeting) -> None:
    impostor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    impostor.bind(memory_path(meeting.address(0, make=True)))
    impostor.listen()
    held: list[socket.socket] = []

    def echo() -> None:
        held.append(impostor.accept()[0])
        held[0].send(held[0].recv(128))

    echoing = threading.Thread(target=echo)
    echoing.start()
    try:
        found = meeting.find(may_relay=True)
        assert isinstance(found, WeightsRelay)
        assert names_of(meeting) == [0, 1]
        found.close()
    finally:
        echoing.join(PATIENCE)
        impostor.close()
        held[0].close()


def test_without_a_name_a_reader_reads_alone_and_says_so_once(
    meeting: Meeting, join: Join, publish: Callable[..., Version], notes: list[str]
) -> None:
    silent = [MemorySocket(meeting.address(number, make=True)) for number in range(3)]
    try:
        reader = join()
        for _ in range(3):
            publish(reader)
        (note,) = notes
        assert "reads weights from the learner itself" in note
    finally:
        for each in silent:
            each.close()


def test_memory_that_can_still_change_is_not_taken(
    meeting: Meeting, join: Join, publish: Callable[..., Version], notes: list[str]
) -> None:
    liar = MemorySocket(meeting.address(0, make=True))
    held: list[socket.socket] = []

    def taken(connection: socket.socket) -> None:
        held.append(connection)
        memory = os.memfd_create("liar", os.MFD_ALLOW_SEALING)
        os.truncate(memory, 4096)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, DESCRIPTOR.pack(memory))
        connection.sendmsg([OFFER.pack(0, 4096), b"chunk"], [rights])
        os.close(memory)

    liar.expect(meeting.token, taken, once=False)
    try:
        reader = join()
        publish(reader)
        soon(lambda: notes, "it says that it reads alone")
        publish(reader)
        assert "not sealed" in notes[0]
    finally:
        liar.close()
        for each in held:
            each.close()


def test_who_has_no_memory_left_hands_on_nothing_and_all_read_alone(
    server: Learner,
    join: Join,
    publish: Callable[..., Version],
    notes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    readers = [join(server.tcp_address) for _ in range(3)]

    def all_read_alone() -> bool:
        publish(*readers)
        return readers_at(server) == 3 and len(notes) >= 2

    soon(all_read_alone, "nobody can hand on")
    publish(*readers)
    assert len(notes) <= 3
    assert all("No space left" in each for each in notes)
