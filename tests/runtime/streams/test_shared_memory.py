"""Episodes through memory that an EnvRunner and a learner share."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders, header, tree
from support.sharing import (
    FURTHER,
    SIZE,
    Peer,
    begin_to_share,
    mapped,
    open_files,
    open_memories,
    send_each,
    soon,
)

from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.streams.memory_sockets import memory_path
from juggler.runtime.streams.shared_memory import MOST_SLOTS, Memory, least_bytes
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.trees import flatten

pytestmark = pytest.mark.usefixtures("everything_is_large")

A_SENDER = """
import signal, sys
from support.learner_end import Senders, header, tree
from support.sharing import mapped, soon
senders = Senders()
sender = senders.open(sys.argv[1])
for batch_id in range(1, 9):
    sender.send(header(batch_id), tree(batch_id, int(sys.argv[2])))
    senders.wait_for(batch_id)
assert mapped()
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


@pytest.mark.usefixtures("grpc_api")
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
    # Those that are held, those released before them, and one or two that were used in turn.
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


def test_views_of_a_batch_keep_its_memory(learner: LearnerEnd, senders: Senders) -> None:
    sender = begin_to_share(learner, senders)
    send_each(senders, sender, 10_001)
    frame = learner.taken.pop()
    assert isinstance(frame.tree, dict)
    part = frame.tree["default"]["observations"][5:10]
    expected = part.copy()
    del frame
    for batch_id in range(10_002, 10_030):
        send_each(senders, sender, batch_id)
        learner.taken.clear()
    np.testing.assert_array_equal(part, expected)


def test_nothing_is_left_of_many_batches_and_streams(learner: LearnerEnd, senders: Senders) -> None:
    def all_sizes() -> None:
        sender = begin_to_share(learner, senders)
        for size in range(1000, 30_000, 531):
            send_each(senders, sender, next(FURTHER), size=size)
            learner.taken.clear()
        sender.close()
        soon(lambda: not mapped() and not open_memories(), "no memory is left")

    all_sizes()
    before = open_files()
    for _ in range(3):
        all_sizes()
    soon(lambda: open_files() <= before, "no file is left open")


def test_what_is_checked_cannot_be_changed_afterwards(learner: LearnerEnd, peer: Peer) -> None:
    content = {
        "default": {
            "observations": np.ones(8, np.float32),
            "pixels": np.ones(8, np.uint8),
            "live": np.ones(8, np.bool_),
            "actions": np.ones(8, np.int64),
            "segment_updates": np.ones(8, np.uint64),
        }
    }
    pieces: list[Any] = []

    def keep(given: Any, size: int) -> int:
        pieces.extend(given)
        return 0

    list(encode_frame(header(1), content, place=keep))
    memory = Memory(4096)
    memory.fill(pieces)
    memory.hand_over(peer.connection, 0)
    assert peer.shared(0, content) == ""
    memory.fill([np.full(4096, 255, np.uint8)])
    (frame,) = learner.taken
    assert isinstance(frame.tree, dict)
    columns = frame.tree["default"]
    for name in ("live", "actions", "segment_updates"):
        np.testing.assert_array_equal(columns[name], content["default"][name])
    assert columns["pixels"].min() == 255, "it is a view"


# -- the fallback ---------------------------------------------------------------------------------


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


def test_a_learner_that_cannot_map_gets_bytes(learner: LearnerEnd, senders: Senders) -> None:
    learner.memory.close()  # and somebody else listens there, who answers nothing
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(memory_path(learner.address))
        listener.listen()

        def take_and_close() -> None:
            with listener.accept()[0] as connection:
                assert len(connection.recv(64)) == 32  # the token
                assert len(connection.recv(64)) == 12  # the probe

        closing = threading.Thread(target=take_and_close)
        closing.start()
        sender = senders.open(learner.address)
        send_each(senders, sender, 1)
        closing.join(PATIENCE)
        send_each(senders, sender, *range(2, 10))
    (said,) = senders.inline
    assert "cannot map" in said
    assert len(learner.taken) == 9


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


# -- who dies -------------------------------------------------------------------------------------


def test_batches_of_a_killed_writer_stay_and_then_nothing_is_left_of_it(
    learner: LearnerEnd,
) -> None:
    process = _run(A_SENDER, learner.address, str(SIZE))
    _kill(process)
    assert len(learner.taken) == 8
    assert mapped()
    for frame in learner.taken:
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, SIZE))
    del frame
    learner.taken.clear()
    soon(lambda: not mapped() and not open_memories(), "no memory of the dead is left")


def test_a_writer_shares_with_the_successor_of_a_killed_reader(
    tmp_path: Path, senders: Senders
) -> None:
    process = _run(A_LEARNER, str(tmp_path))
    sender = senders.open(f"unix:{tmp_path / 'l'}")

    def shares() -> bool:
        send_each(senders, sender, next(FURTHER))
        return bool(mapped())

    soon(shares, "it shares memory")
    _kill(process)
    soon(lambda: not mapped() and not open_memories(), "no memory is kept for the dead")
    learner = LearnerEnd(tmp_path)
    try:
        senders.send_until_one_arrives(sender, 20_000)
        soon(shares, "it shares memory with the successor")
    finally:
        learner.stop()


def test_what_a_peer_wants_in_vain_is_forgotten(learner: LearnerEnd) -> None:
    peer = Peer(learner.address)
    peer.close()
    soon(lambda: not learner.memory._expected, "its token is forgotten")
