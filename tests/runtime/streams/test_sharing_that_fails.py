"""Ends of a stream that share no memory, although they are on one host: batches go inline."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders, tree
from support.sharing import FURTHER, SIZE, begin_to_share, mapped, open_memories, send_each, soon

from juggler.runtime.streams import memory_reader, sharing
from juggler.runtime.streams.memory_reader import Reader
from juggler.runtime.streams.memory_sockets import MemorySocket, memory_path, token_in
from juggler.runtime.streams.memory_writer import Writer
from juggler.runtime.streams.shared_memory import Memory, least_bytes
from juggler.runtime.streams.sharing import Dialled
from juggler.runtime.wire.errors import WireError

pytestmark = pytest.mark.usefixtures("everything_is_large")


def test_without_the_socket_batches_go_inline_and_that_is_said_once(
    learner: LearnerEnd, senders: Senders
) -> None:
    os.unlink(memory_path(learner.address))
    sender = senders.open(learner.address)
    send_each(senders, sender, *range(1, 20))
    assert len(learner.taken) == 19
    for frame in learner.taken:
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, SIZE))
    (said,) = senders.inline
    assert "No such file" in said
    assert memory_path(learner.address) in said
    assert not mapped()


def test_over_tcp_batches_go_inline_on_the_same_host_too(
    learner: LearnerEnd, senders: Senders
) -> None:
    send_each(senders, senders.open(learner.tcp_address), *range(1, 20))
    assert len(learner.taken) == 19
    assert senders.inline == []
    assert not mapped()


def test_a_host_without_memory_left_is_no_crash(
    learner: LearnerEnd, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = begin_to_share(learner, senders)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    send_each(senders, sender, *range(20_000, 20_010), size=3 * SIZE)
    (said,) = senders.inline
    assert "No space left" in said
    for frame in learner.taken:
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, 3 * SIZE))


def test_a_python_without_memfds_sends_bytes_and_says_so_once(
    learner: LearnerEnd, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    sender = senders.open(learner.address)
    send_each(senders, sender, *range(1, 20))
    assert len(learner.taken) == 19
    for frame in learner.taken:
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, SIZE))
    (said,) = senders.inline
    assert said.endswith("this Python was built without os.memfd_create")
    assert not mapped()


def test_a_python_that_lacks_the_names_of_seals_shares_memory(
    run_python: Callable[..., str],
) -> None:
    program = """
import fcntl, os
for module, begins in ((fcntl, ("F_SEAL", "F_ADD_SEALS", "F_GET_SEALS")), (os, "MFD_")):
    for name in [each for each in dir(module) if each.startswith(begins)]:
        delattr(module, name)

from juggler.runtime.streams.memory_reader import map_memory
from juggler.runtime.streams.shared_memory import Memory

memory = Memory.frozen([memoryview(b"what is shared")], 14)
mapped, frozen = map_memory(memory._descriptor, 14)
print(bytes(mapped).decode(), frozen)
"""
    assert run_python("-c", program) == "what is shared True\n"


@pytest.mark.parametrize(
    ("probed", "room"),
    [(False, 0), (False, 8), (True, 0)],
    ids=["not one", "few from the start", "no more"],
)
def test_a_reader_that_may_open_no_more_files_shares_nothing_and_its_stream_goes_on(
    probed: bool, room: int, run_python: Callable[..., str]
) -> None:
    program = f"""
import os, resource, socket
from juggler.runtime.streams.memory_reader import Reader
from juggler.runtime.streams.memory_writer import Writer

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
reader, writer = Reader(ours), Writer(theirs)
if {probed}:
    reader.hear()
    assert writer.place([memoryview(bytes(4096))], 4096) == 0
held = os.dup(0)
os.close(held)
resource.setrlimit(resource.RLIMIT_NOFILE, (held + {room},) * 2)
reader.hear()
print(reader.why_not)
print(writer.place([memoryview(bytes(4096))], 4096))
"""
    assert run_python("-c", program) == "Too many open files\nNone\n"


def test_memory_that_cannot_be_mapped_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(Reader(ours)) as reader, theirs:
        Memory(4096).hand_over(theirs, 0)
        monkeypatch.setattr(memory_reader, "map_file", full)
        with pytest.raises(WireError, match="in slot 0: Cannot allocate memory"):
            reader.lease(0, 4096)


def test_a_reader_that_hands_nothing_on_keeps_no_descriptors_for_that() -> None:
    memory = Memory.frozen([memoryview(bytes(4096))], 4096)
    held = []
    for hands_on in False, True:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with closing(Reader(ours, hands_on)) as reader, theirs:
            before = open_memories()
            for slot in range(4):
                memory.hand_over(theirs, slot)
            reader.hear()
            held.append(open_memories() - before)
            reader.lease(0, 4096)
            assert (reader.frozen is not None) == hands_on
    assert held[1] - held[0] == 4


def test_a_learner_that_cannot_map_gets_bytes(
    learner: LearnerEnd, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner.memory.close()  # and somebody else listens there, who does not answer the probe
    taken: SimpleQueue[socket.socket] = SimpleQueue()
    monkeypatch.setattr(sharing, "new_token", lambda: "known")
    listener = MemorySocket(learner.address)
    listener.expect("known", taken.put)
    sender = senders.open(learner.address)
    send_each(senders, sender, 1)
    with taken.get(timeout=PATIENCE) as connection:
        connection.settimeout(PATIENCE)
        assert len(connection.recv(64)) == 12  # the probe
    send_each(senders, sender, *range(2, 10))
    listener.close()
    (said,) = senders.inline
    assert "cannot map" in said
    assert len(learner.taken) == 9


def test_a_system_that_passes_no_descriptor_on_is_said(
    learner: LearnerEnd, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = begin_to_share(learner, senders)

    def full(*_: Any) -> None:
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    monkeypatch.setattr(Memory, "hand_over", full)
    send_each(senders, sender, *range(20_000, 20_010), size=3 * SIZE)
    (said,) = senders.inline
    assert "Too many references" in said


def test_an_end_that_is_closed_as_it_connects_is_no_error(learner: LearnerEnd) -> None:
    said: list[str] = []
    taken: list[socket.socket] = []
    shared = Dialled(learner.address, Writer, said.append, "")
    learner.memory.expect(token_in(shared.in_metadata(())), taken.append)
    assert shared.is_large(SIZE)

    class AndClosed(AbstractContextManager[None]):
        """A lock that another thread takes at once when it is released, to close."""

        def __exit__(self, *_: object) -> None:
            shared._lock = threading.Lock()
            shared.close()

    shared._lock = AndClosed()  # type: ignore[assignment]
    shared.hear()
    assert shared.end is None
    assert said == []
    soon(lambda: taken, "the learner has its end")
    taken[0].close()


def test_what_goes_wrong_with_one_connection_ends_no_other(
    learner: LearnerEnd,
    senders: Senders,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no reader today")

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "__init__", broken)
        sender = senders.open(learner.address)
        soon(lambda: send_each(senders, sender, next(FURTHER)) or senders.inline, "it says why")
    assert "ValueError: no reader today" in capsys.readouterr().err
    begin_to_share(learner, senders)


def test_the_variable_turns_sharing_off(
    learner: LearnerEnd, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUGGLER_SHARED_MEMORY", "off")
    assert least_bytes() is None
    send_each(senders, senders.open(learner.address), *range(1, 10))
    assert not mapped()
    assert senders.inline == []


def test_a_variable_that_says_nonsense_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUGGLER_SHARED_MEMORY", "on")
    with pytest.raises(ValueError, match="JUGGLER_SHARED_MEMORY=on: it may be 'off'"):
        least_bytes()


def test_small_batches_go_inline_and_nobody_connects(
    learner: LearnerEnd, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUGGLER_SHARED_MEMORY")
    os.unlink(memory_path(learner.address))
    send_each(senders, senders.open(learner.address), *range(1, 10), size=100)
    assert senders.inline == []
