"""Episodes through memory that an EnvRunner and a learner share."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders, header, tree
from support.processes import eventually
from support.sharing import FURTHER, SIZE, begin_to_share, mapped, open_memories, send_each

from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.streams import memory_socket, shared_memory
from juggler.runtime.streams.memory_socket import MemorySocket, memory_path
from juggler.runtime.streams.shared_memory import (
    MOST_SLOTS,
    SharedMemory,
    SharedMemoryReader,
    least_bytes,
)
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.trees import flatten

pytestmark = pytest.mark.usefixtures("everything_is_large")

A_SENDER = """
import signal, sys
from support.learner_end import Senders, header, tree
from support.processes import eventually
from support.sharing import FURTHER, mapped
senders = Senders()
sender = senders.open(sys.argv[1])
def send():
    batch_id = next(FURTHER)
    sender.send(header(batch_id), tree(batch_id, int(sys.argv[2])))
    senders.wait_for(batch_id)
    return mapped()
eventually(send, "a batch lies in shared memory")
for _ in range(8):
    send()
print("sent", flush=True)
signal.pause()
"""

A_LEARNER = """
import signal, sys
from pathlib import Path
from support.learner_end import LearnerEnd
learner = LearnerEnd(Path(sys.argv[1]))
print("listens", flush=True)
signal.pause()
"""


def _run(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process, and wait for its first line."""
    here = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(here)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def _kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    assert process.stdout is not None
    process.stdout.close()


# -- what arrives ---------------------------------------------------------------------------------


def test_episodes_arrive_the_same_through_memory_and_inline(
    learner: LearnerEnd, senders: Senders, make_batch: Callable[..., EpisodeBatch]
) -> None:
    sender = begin_to_share(learner, senders)
    inline = senders.open(learner.address)
    inline.send(header(20_000), tree(20_000))
    senders.wait_for(20_000)
    learner.taken.clear()
    before = mapped()
    for seed in range(6):
        batch = {"default": make_batch(seed=seed, rows=5, steps=30 + seed).to_tree()}
        sender.send(header(30_000 + seed), batch)
        senders.wait_for(30_000 + seed)
        frame = learner.taken.pop()
        came, sent = flatten(frame.tree), flatten(batch)
        assert [path for path, _ in came] == [path for path, _ in sent]
        for (path, one), (_, other) in zip(came, sent, strict=True):
            assert one.dtype == other.dtype, path
            assert not one.flags.writeable
            np.testing.assert_array_equal(one, other)
        del frame, came, one
    assert mapped() >= before, "these were not inline"
    assert senders.inline == []


def test_memory_is_used_again_only_when_nothing_reads_it(
    learner: LearnerEnd, senders: Senders
) -> None:
    sender = begin_to_share(learner, senders)
    send_each(senders, sender, *range(10_001, 10_006))
    held = list(learner.taken)
    learner.taken.clear()
    for batch_id in range(10_006, 10_100):
        send_each(senders, sender, batch_id)
        learner.taken.pop()
    for frame in held:
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, SIZE))
    # The held ones, the ones released before them, and one or two that were used in turn.
    assert len(mapped()) <= len(held) + 4


def test_a_batch_that_finds_no_memory_free_goes_inline(
    learner: LearnerEnd, senders: Senders
) -> None:
    sender = begin_to_share(learner, senders)
    send_each(senders, sender, *range(10_001, 10_001 + 2 * MOST_SLOTS))
    assert len(learner.taken) == 2 * MOST_SLOTS
    for frame in learner.taken:
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, SIZE))
    assert len(mapped()) == MOST_SLOTS
    assert senders.inline == []


# -- deaths ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_batches_of_a_killed_writer_stay_and_then_nothing_is_left_of_it(
    learner: LearnerEnd,
) -> None:
    process = _run(A_SENDER, learner.address, str(SIZE))
    _kill(process)
    assert len(learner.taken) >= 9
    assert mapped()
    for frame in learner.taken:
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, SIZE))
    del frame
    learner.taken.clear()
    eventually(lambda: not mapped() and not open_memories(), "no memory of the dead is left")


@pytest.mark.slow
def test_a_writer_shares_with_the_successor_of_a_killed_reader(
    tmp_path: Path, senders: Senders
) -> None:
    process = _run(A_LEARNER, str(tmp_path))
    sender = senders.open(f"unix:{tmp_path / 'l'}")

    def shares() -> bool:
        send_each(senders, sender, next(FURTHER))
        return bool(mapped())

    eventually(shares, "it shares memory")
    _kill(process)
    eventually(lambda: not mapped() and not open_memories(), "no memory is kept for the dead")
    learner = LearnerEnd(tmp_path)
    try:
        senders.send_until_one_arrives(sender, 20_000)
        eventually(shares, "it shares memory with the successor")
    finally:
        learner.stop()


# Ends of a stream that share no memory, although they are on one host: batches go inline.


@pytest.mark.parametrize("lacks", ["the socket", "memfds"])
def test_without_what_sharing_takes_batches_go_inline_and_that_is_said_once(
    learner: LearnerEnd, senders: Senders, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    if lacks == "the socket":
        os.unlink(memory_path(learner.address))
    else:
        monkeypatch.delattr(os, "memfd_create")
    sender = senders.open(learner.address)
    send_each(senders, sender, *range(1, 20))
    assert len(learner.taken) == 19
    for frame in learner.taken:
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, SIZE))
    (said,) = senders.inline
    if lacks == "the socket":
        assert "No such file" in said
        assert memory_path(learner.address) in said
    else:
        assert said.endswith("this Python was built without os.memfd_create")
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


@pytest.mark.slow
@pytest.mark.parametrize("probed", [False, True], ids=["not one", "no more"])
def test_a_reader_that_may_open_no_more_files_shares_nothing_and_its_stream_goes_on(
    probed: bool, run_python: Callable[..., str]
) -> None:
    program = f"""
import os, resource, socket
from juggler.runtime.streams.shared_memory import SharedMemoryReader, SharedMemoryWriter

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
reader, writer = SharedMemoryReader(ours), SharedMemoryWriter(theirs)
if {probed}:
    reader.receive_offers()
    assert writer.place([memoryview(bytes(4096))], 4096) == 0
held = os.dup(0)
os.close(held)
resource.setrlimit(resource.RLIMIT_NOFILE, (held,) * 2)
reader.receive_offers()
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
    with closing(SharedMemoryReader(ours)) as reader, theirs:
        SharedMemory(4096).hand_over(theirs, 0)
        monkeypatch.setattr(shared_memory, "map_file", full)
        with pytest.raises(WireError, match="in slot 0: Cannot allocate memory"):
            reader.lease(0, 4096)


def test_a_learner_that_cannot_map_gets_bytes(
    learner: LearnerEnd, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner.memory.close()  # and another process listens there, and does not answer the probe
    taken: SimpleQueue[socket.socket] = SimpleQueue()
    monkeypatch.setattr(memory_socket.secrets, "token_hex", lambda size: "known")
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


def test_what_goes_wrong_with_one_connection_ends_no_other(
    learner: LearnerEnd,
    senders: Senders,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no reader today")

    with monkeypatch.context() as patch:
        patch.setattr(SharedMemoryReader, "__init__", broken)
        sender = senders.open(learner.address)
        while not senders.inline:  # it says why
            send_each(senders, sender, next(FURTHER))
    assert "ValueError: no reader today" in capsys.readouterr().err
    begin_to_share(learner, senders)


def test_other_users_are_refused_before_they_say_anything(
    learner: LearnerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_socket, "is_of_this_user", lambda _: False)
    monkeypatch.setattr(memory_socket, "_TOKEN_SECONDS", 2 * PATIENCE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(PATIENCE)
        stranger.connect(memory_path(learner.address))
        assert stranger.recv(1) == b""


def test_an_error_with_one_socket_drops_it_and_no_other(
    learner: LearnerEnd, senders: Senders, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: socket.socket) -> None:
        raise MemoryError

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        learner.memory.watch(ours, broken)
        theirs.settimeout(PATIENCE)
        theirs.send(b"x")
        with pytest.raises(ConnectionResetError):
            theirs.recv(1)
    assert "MemoryError" in capsys.readouterr().err
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
