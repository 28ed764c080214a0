"""Episodes through memory that an EnvRunner and a learner share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
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

from juggler.runtime.actors.credentials import CallMetadata, call_metadata
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.streams.episodes import EpisodeReceiver
from juggler.runtime.streams.memory_sockets import MEMORY_METADATA, new_token
from juggler.runtime.streams.shared_memory import MOST_SLOTS, Memory
from juggler.runtime.streams.weights_publisher import WeightsPublisher
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.trees import flatten

pytestmark = pytest.mark.usefixtures("everything_is_large")

A_SENDER = """
import signal, sys
from support.learner_end import Senders, header, tree
from support.sharing import FURTHER, mapped, soon
senders = Senders()
sender = senders.open(sys.argv[1])
def send():
    batch_id = next(FURTHER)
    sender.send(header(batch_id), tree(batch_id, int(sys.argv[2])))
    senders.wait_for(batch_id)
    return mapped()
soon(send, "a batch lies in shared memory")
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


# -- who dies -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("stream", ["episodes", "weights"])
def test_a_call_that_ends_as_it_begins_leaves_nothing(
    learner: LearnerEnd, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUGGLER_GRPC", "public")  # of which the context is

    class Gone:
        """The context of a client that is gone when its handler begins."""

        def invocation_metadata(self) -> CallMetadata:
            return (*call_metadata("secret", "run", "peer"), (MEMORY_METADATA, new_token()))

        def peer(self) -> str:
            return "unix:"

        def add_callback(self, callback: Callable[[], None]) -> bool:
            raise grpc.RpcError("the call is over")

    path = f"/juggler.v1.{'Episodes/Push' if stream == 'episodes' else 'Weights/Subscribe'}"
    server: Any = (
        EpisodeReceiver(lambda frame: "", lambda _: None, Limits(), memory=learner.memory)
        if stream == "episodes"
        else WeightsPublisher(lambda _: None, learner.memory)
    )
    details: Any = SimpleNamespace(method=path)
    handle = server.handler().service(details).stream_stream
    with pytest.raises(grpc.RpcError):
        list(handle(iter([b""]), Gone()))
    assert not learner.memory._expected, "no token is expected any more"


def test_what_a_peer_wants_in_vain_is_forgotten(learner: LearnerEnd) -> None:
    peer = Peer(learner.address)
    peer.close()
    soon(lambda: not learner.memory._expected, "its token is forgotten")
