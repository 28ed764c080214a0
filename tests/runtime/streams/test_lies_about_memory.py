"""Peers of a learner that lie about the memory that they share, and strangers."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from contextlib import closing, suppress

import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders, tree
from support.sharing import Peer, begin_to_share, mapped, open_memories, send_each, soon

from juggler.runtime.streams import memory_sockets
from juggler.runtime.streams.memory_reader import Reader
from juggler.runtime.streams.memory_sockets import memory_path, new_token, proofs
from juggler.runtime.streams.shared_memory import MOST_SLOTS, Memory

NOBODY = 65534

pytestmark = pytest.mark.usefixtures("everything_is_large")


# -- who lies -------------------------------------------------------------------------------------


def _unsealed(size: int) -> int:
    descriptor = os.memfd_create("juggler", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, size)
    return descriptor


def _only_fixed_in_size(size: int) -> int:
    """Its pages could still be given back."""
    descriptor = _unsealed(size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def _full_of_holes(size: int) -> int:
    descriptor = os.memfd_create("juggler", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _with_a_hole_in_front(size: int) -> int:
    """As many bytes as the offer says are there, but behind those that it means."""
    descriptor = os.memfd_create("juggler", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2 * size)
    os.posix_fallocate(descriptor, size, size)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _counted_behind_its_end(size: int) -> int:
    """As many bytes as the offer says are there, but none of them in the memory itself."""
    descriptor = os.memfd_create("juggler", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long
    keep_size = 0x1
    assert fallocate(descriptor, keep_size, size, size) == 0
    assert os.fstat(descriptor).st_blocks * 512 == size
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _truncated(size: int) -> int:
    descriptor = _unsealed(size // 2)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _a_file(size: int) -> int:
    return os.open(__file__, os.O_RDONLY)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_unsealed, "not sealed"),
        (_only_fixed_in_size, "not sealed"),
        (_full_of_holes, "has only 0"),
        (_counted_behind_its_end, "has only 0"),
        (_with_a_hole_in_front, "of 16384 bytes was offered as 8192"),
        (_truncated, "of 4096 bytes was offered as 8192"),
        (_a_file, "no memory that can be sealed"),
    ],
)
def test_memory_that_may_vanish_ends_the_stream(
    learner: LearnerEnd, senders: Senders, peer: Peer, make: Callable[[int], int], reason: str
) -> None:
    honest = begin_to_share(learner, senders)
    descriptor = make(8192)
    peer.offer(descriptor, 0, 8192)
    os.close(descriptor)
    said = peer.shared(0)
    assert said.startswith("INVALID_ARGUMENT"), said
    assert reason in said, said
    send_each(senders, honest, 20_000)


def _nothing_there(peer: Peer) -> str:
    return peer.shared(3)


def _too_large(peer: Peer) -> str:
    Memory(4096).hand_over(peer.connection, 0)
    return peer.shared(0, tree(1, 5000))


def _still_read(peer: Peer) -> str:
    Memory(4096).hand_over(peer.connection, 0)
    assert peer.shared(0) == ""
    return peer.shared(0)


def _replaced_while_read(peer: Peer) -> str:
    Memory(4096).hand_over(peer.connection, 0)
    assert peer.shared(0) == ""
    Memory(4096).hand_over(peer.connection, 0)
    return peer.shared(1)


def _one_slot_too_many(peer: Peer) -> str:
    Memory(4096).hand_over(peer.connection, MOST_SLOTS)
    return peer.shared(MOST_SLOTS)


def _no_descriptor(peer: Peer) -> str:
    peer.connection.send(b"\0" * 12)
    return peer.shared(0)


def _nonsense(peer: Peer) -> str:
    peer.connection.send(b"hello")
    return peer.shared(0)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (_nothing_there, "there is no memory in slot 3: none was offered"),
        (_too_large, "do not fit slot 0"),
        (_still_read, "still being read"),
        (_replaced_while_read, "still being read"),
        (_one_slot_too_many, "in slot 16 of 16"),
        (_no_descriptor, "without its descriptor"),
        (_nonsense, "without its descriptor"),
    ],
)
def test_a_writer_that_lies_loses_its_stream_and_nobody_else_notices(
    learner: LearnerEnd, senders: Senders, peer: Peer, lie: Callable[[Peer], str], reason: str
) -> None:
    honest = begin_to_share(learner, senders)
    said = lie(peer)
    assert said.startswith("INVALID_ARGUMENT"), said
    assert reason in said, said
    send_each(senders, honest, 20_000)


def test_a_writer_that_offers_on_and_on_does_not_hold_up_the_thread() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(Reader(ours)) as reader, theirs:
        memory = Memory(4096)
        for number in range(64):
            memory.hand_over(theirs, number % MOST_SLOTS)
        reader.hear()
        waiting = 0
        with suppress(BlockingIOError):
            while ours.recv(64):
                waiting += 1
        assert waiting == 64 - (MOST_SLOTS + 1), "a reader takes no more at once"


def test_a_stream_that_shares_no_memory_cannot_name_any(learner: LearnerEnd) -> None:
    peer = Peer(learner.address)
    try:
        assert "there is no memory" in (said := peer.shared(0)) or "not shared" in said
    finally:
        peer.close()


# -- strangers ------------------------------------------------------------------------------------


def _stranger(learner: LearnerEnd) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE)
    connection.connect(memory_path(learner.address))
    return connection


def _shown(learner: LearnerEnd, token: str) -> bytes:
    """What proves to the learner to know a token."""
    (_, place), *_ = learner.memory._listeners
    return proofs(token, place)[0]


def test_the_socket_belongs_to_its_owner_alone(learner: LearnerEnd) -> None:
    mode = os.stat(memory_path(learner.address)).st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_a_wrong_token_ends_the_connection_and_its_descriptor_is_discarded(
    learner: LearnerEnd, peer: Peer
) -> None:
    memory = Memory(4096)
    before = mapped(), open_memories()
    for token in (new_token(), "", "x" * 32, "é" * 200, new_token()[:-1]):
        with _stranger(learner) as stranger:
            descriptor = _unsealed(4096)
            socket.send_fds(stranger, [_shown(learner, token)], [descriptor])
            os.close(descriptor)
            assert stranger.recv(64) == b""
    assert (mapped(), open_memories()) == before
    memory.hand_over(peer.connection, 0)
    assert peer.shared(0) == ""


def test_a_token_lets_one_connection_in(learner: LearnerEnd, senders: Senders) -> None:
    taken: list[socket.socket] = []
    token = new_token()
    learner.memory.expect(token, taken.append)
    with _stranger(learner) as first, _stranger(learner) as second:
        first.send(_shown(learner, token))
        soon(lambda: taken, "the first one is in")
        second.send(_shown(learner, token))
        assert second.recv(64) == b""
    taken[0].close()


def test_strangers_that_say_nothing_are_sent_away(
    learner: LearnerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_sockets, "_STRANGER_SECONDS", 0.2)
    with _stranger(learner) as stranger:
        assert stranger.recv(64) == b""


def test_the_oldest_of_many_strangers_is_sent_away(learner: LearnerEnd, peer: Peer) -> None:
    strangers = [_stranger(learner) for _ in range(65)]
    try:
        assert strangers[0].recv(64) == b""
        strangers[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[-1].recv(64)
        Memory(4096).hand_over(peer.connection, 0)
        assert peer.shared(0) == ""
    finally:
        for each in strangers:
            each.close()


def test_another_users_process_is_not_let_in(
    learner: LearnerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_sockets, "_user_and_process", lambda connection: (NOBODY, 1))
    with _stranger(learner) as stranger:
        assert stranger.recv(64) == b""
    with pytest.raises(PermissionError, match="another user"):
        memory_sockets.connect(memory_path(learner.address), new_token())
