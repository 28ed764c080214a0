"""Receiver processes: what they pass on to a learner, and what becomes of it when they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import psutil
import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders, header, tree
from support.sharing import mapped, soon

from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.endpoints import dial, split_address
from juggler.runtime.streams import pulse
from juggler.runtime.streams.batch_relay import EpisodeRelay
from juggler.runtime.streams.episodes import PUSH_METHOD, BatchFrame, EpisodeSender
from juggler.runtime.streams.permits import Permits
from juggler.runtime.streams.receivers import ReceiverProgram, Receivers
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import DEFAULT_CHUNK_BYTES, encode_frame
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.v1 import episodes_pb2

PERMITS = Permits.new()
SIZE = 100_000  # elements of float32: large enough for shared memory
LARGE = 5 * DEFAULT_CHUNK_BYTES // 8  # elements of float32: three chunks
MOST_BYTES = 32 * LARGE  # half of it for those that wait: four of these

A_LEARNER = """
import signal, sys
from pathlib import Path
from test_receivers import World
world = World(Path(sys.argv[1]))
print(*world.pids(), flush=True)
signal.pause()
"""


class World:
    """Two receivers, in front of a learner that may come and go."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.told: list[str] = []
        self.failures: list[Exception] = []
        self._receivers = Receivers("127.0.0.1:0")
        self.address = self._receivers.address
        program = ReceiverProgram(
            self.address, f"unix:{directory}/l", "run", "secret", PERMITS.key, MOST_BYTES
        )
        self._receivers.start([program, program], self.told.append, self.failures.append)
        soon(lambda: len(self.listening()) == 2, "both listen")

    def pids(self) -> list[int]:
        return list(self._receivers._supervisor.pids().values())

    def listening(self) -> list[int]:
        """The processes that listen."""
        return [pid for pid in self.pids() if _has(pid, psutil.CONN_LISTEN)]

    def serving(self) -> list[int]:
        """The processes that have a connection from elsewhere."""
        return [pid for pid in self.pids() if _has(pid, psutil.CONN_ESTABLISHED)]

    def answered(self) -> list[int]:
        """The processes that have shown that they live."""
        assert self._receivers._pulse is not None
        return list(self._receivers._pulse._answered.values())

    def close(self) -> None:
        self._receivers.close()


def _has(pid: int, status: str) -> bool:
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(each.status == status for each in found)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="jr-") as directory:
        made = World(Path(directory))
        yield made
        made.close()


@pytest.fixture
def learner(world: World, every_thread_ends: None) -> Iterator[LearnerEnd]:
    end = LearnerEnd(world.directory)
    yield end
    end.stop()


def _header(batch_id: int) -> episodes_pb2.BatchHeader:
    asked = header(batch_id)
    asked.permit = PERMITS.of(batch_id, asked.module_id)
    return asked


def _send(sender: EpisodeSender, *batch_ids: int, size: int = SIZE) -> None:
    for batch_id in batch_ids:
        sender.send(_header(batch_id), tree(batch_id, size))


def _push(address: str, *messages: bytes, token: str = "secret") -> tuple[list[Any], grpc.RpcError]:
    """What is answered to these messages, and how their stream ends."""
    answers = []
    with dial(address) as channel:
        push = channel.stream_stream(PUSH_METHOD)
        call = push(iter(messages), metadata=call_metadata(token, "run", "i"), timeout=PATIENCE)
        with pytest.raises(grpc.RpcError) as raised:
            answers.extend(episodes_pb2.Acknowledgement.FromString(each) for each in call)
    return answers, raised.value


# -- what arrives ---------------------------------------------------------------------------------


def test_batches_reach_the_learner_through_shared_memory_whole_and_in_order(
    world: World, learner: LearnerEnd, senders: Senders
) -> None:
    before, sender = mapped(), senders.open(world.address)
    for batch_id in range(1, 31):
        _send(sender, batch_id)
        assert senders.wait_for(batch_id)[batch_id] == ("", "")
    assert mapped() > before
    assert [frame.header for frame in learner.taken] == [_header(i) for i in range(1, 31)]
    for frame in learner.taken:
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, SIZE))


def test_small_batches_and_batches_of_several_chunks_arrive_whole(
    world: World, learner: LearnerEnd, senders: Senders
) -> None:
    sizes = (LARGE, 4, LARGE, LARGE, 4)
    sender = senders.open(world.address)
    for batch_id, size in enumerate(sizes):
        _send(sender, batch_id, size=size)
    assert set(senders.wait_for(*range(len(sizes))).values()) == {("", "")}
    assert [frame.header.batch_id for frame in learner.taken] == [*range(len(sizes))]
    for frame, size in zip(learner.taken, sizes, strict=True):
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, size))


def test_connections_are_spread_over_the_receivers(world: World) -> None:
    with ExitStack() as connections:
        for _ in range(32):  # all at one of two: once in two billion times
            connections.enter_context(socket.create_connection(split_address(world.address)))
        soon(lambda: len(world.serving()) == 2, "both have some")


# -- what does not --------------------------------------------------------------------------------


def test_the_learners_reason_for_a_refusal_comes_back_and_the_stream_goes_on(
    world: World, learner: LearnerEnd, senders: Senders
) -> None:
    learner.answer = lambda frame: "no room" if frame.header.batch_id % 2 else ""
    _send(senders.open(world.address), 1, 2, 3, 4)
    settled = senders.wait_for(1, 2, 3, 4)
    assert settled == {i: ("refused", "no room") if i % 2 else ("", "") for i in (1, 2, 3, 4)}
    assert learner.opened == 1


@pytest.mark.parametrize("where", ["a receiver", "the learner"])
def test_a_bad_batch_is_refused_and_ends_its_stream_wherever_it_is_sent_to(
    world: World, learner: LearnerEnd, where: str
) -> None:
    def answer(frame: BatchFrame) -> str:
        raise WireError(f"batch {frame.header.batch_id} is bad")

    learner.answer = answer
    address = world.address if where == "a receiver" else learner.address
    ends = threading.Event()

    def frames() -> Iterator[bytes]:
        yield next(encode_frame(_header(1), tree(1)))
        ends.wait(PATIENCE)  # the stream ends, though it could go on

    with dial(address) as channel:
        call = channel.stream_stream(PUSH_METHOD)(
            frames(), metadata=call_metadata("secret", "run", "i"), timeout=PATIENCE
        )
        answers = []
        with pytest.raises(grpc.RpcError) as raised:
            answers.extend(episodes_pb2.Acknowledgement.FromString(each) for each in call)
        ends.set()
    assert [(each.batch_id, each.refused) for each in answers] == [(1, "batch 1 is bad")]
    by_whom = "the learner refused a batch: " if where == "a receiver" else ""
    assert raised.value.details() == f"{by_whom}batch 1 is bad"  # type: ignore[attr-defined]
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_a_batch_that_nobody_asked_for_ends_at_the_receiver(
    world: World, learner: LearnerEnd
) -> None:
    frames = [next(encode_frame(_header(1), tree(1))), next(encode_frame(header(2), tree(2)))]
    _, error = _push(world.address, *frames)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert "batch 2 has no permit" in str(error)
    assert [frame.header.batch_id for frame in learner.taken] in ([], [1])


def test_a_wrong_token_ends_at_the_receiver(world: World, learner: LearnerEnd) -> None:
    _, error = _push(world.address, next(encode_frame(_header(1), tree(1))), token="guessed")
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    assert not learner.opened


def test_batches_that_the_learner_does_not_answer_take_bounded_memory(
    world: World, learner: LearnerEnd
) -> None:
    goes_on = threading.Event()
    learner.answer = lambda frame: "" if goes_on.wait(PATIENCE) else "never"
    frames = [chunk for n in range(20) for chunk in encode_frame(_header(n), tree(n, LARGE))]
    _, error = _push(world.address, *frames)
    goes_on.set()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert "bytes of batches wait for the learner already" in str(error)


def test_batches_that_wait_and_unfinished_ones_take_no_more_than_they_may_together() -> None:
    relay = EpisodeRelay("unix:/none", (), lambda _: None, Limits(), lambda _: None, 100)
    one, other = cast(Any, object()), cast(Any, object())
    relay.unfinished.hold(one, 50)
    relay.hold(50)
    with pytest.raises(WireError, match="50 bytes of batches wait for the learner already"):
        relay.hold(1)
    with pytest.raises(WireError, match="51 bytes of unfinished frames wait here already"):
        relay.unfinished.hold(other, 1)


def test_a_batch_is_lost_where_no_learner_listens_and_the_next_one_arrives(
    world: World, senders: Senders, every_thread_ends: None
) -> None:
    sender = senders.open(world.address)
    _send(sender, 1)
    reason, explanation = senders.wait_for(1)[1]
    assert reason == "learner_lost"
    assert explanation.startswith("its receiver lost the learner: ")
    learner = LearnerEnd(world.directory)
    try:
        arrived = _send_until_one_arrives(senders, sender, 2)
        assert [frame.header.batch_id for frame in learner.taken] == [arrived]
    finally:
        learner.stop()


def _send_until_one_arrives(senders: Senders, sender: EpisodeSender, first_id: int) -> int:
    deadline = time.monotonic() + PATIENCE
    for batch_id in range(first_id, first_id + 10_000):
        _send(sender, batch_id)
        reason, _ = senders.wait_for(batch_id)[batch_id]
        if not reason:
            return batch_id
        assert reason == "learner_lost"
        assert time.monotonic() < deadline, "no batch arrives any more"
    raise AssertionError


# -- ends -----------------------------------------------------------------------------------------


def test_what_killed_receivers_held_is_lost_once_and_others_take_what_follows(
    world: World, learner: LearnerEnd, senders: Senders
) -> None:
    goes_on = threading.Event()
    taken: list[BatchFrame] = []

    def answer(frame: BatchFrame) -> str:
        taken.append(frame)
        assert frame.header.batch_id < 8 or goes_on.wait(PATIENCE)
        return ""

    learner.answer = answer
    opened = [senders.open(world.address) for _ in range(8)]
    for batch_id, sender in enumerate(opened):
        _send(sender, batch_id)
    assert set(senders.wait_for(*range(8)).values()) == {("", "")}
    for batch_id in range(8, 40):  # of which the learner answers none
        _send(opened[batch_id % 8], batch_id)
    killed = world.pids()
    world.told.clear()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    settled = senders.wait_for(*range(8, 40))
    assert {reason for reason, _ in settled.values()} == {"learner_lost"}
    goes_on.set()
    soon(lambda: len(world.listening()) == 2, "both have been started again")
    assert not set(world.pids()) & set(killed)
    for number in (0, 1):
        line = f"lost its receiver-{number} (killed by SIGKILL): it starts again in"
        soon(lambda line=line: line in "; ".join(world.told), line)  # type: ignore[misc]
    for number, sender in enumerate(opened):
        _send_until_one_arrives(senders, sender, 1000 * (number + 1))
    assert not senders.settled_more_than_once()
    assert not world.failures
    for frame in taken:  # also those whose receiver was killed while the learner held them
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, SIZE))


def test_a_receiver_that_stands_still_is_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(pulse, "_ANSWER_SECONDS", 0.5)
    before = world.pids()
    soon(lambda: set(world.answered()) == set(before), "each of them has answered once")
    world.told.clear()
    os.kill(before[0], signal.SIGSTOP)
    try:
        soon(lambda: before[0] not in world.pids(), "it is killed")
        soon(lambda: len(world.listening()) == 2, "another one listens")
    finally:
        with suppress(ProcessLookupError):
            os.kill(before[0], signal.SIGCONT)
    assert before[1] in world.pids()
    said = "kills its receiver-0, which stands still or hangs: nothing answers"
    assert said in world.told


def test_receivers_end_with_a_learner_that_is_killed(tmp_path: Path) -> None:
    here = Path(__file__)
    process = subprocess.Popen(
        [sys.executable, "-c", A_LEARNER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{here.parents[2]}{os.pathsep}{here.parent}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    receivers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(receivers) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    soon(lambda: not any(map(psutil.pid_exists, receivers)), "the receivers have ended")
