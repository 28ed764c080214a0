"""Streams that begin a frame and leave it at that."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders, header, tree

from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.streams import episodes as stream
from juggler.runtime.streams import unfinished
from juggler.runtime.streams.unfinished import Unfinished
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import episodes_pb2

pytestmark = pytest.mark.usefixtures("grpc_api")

CHUNK = 40_000  # bytes; a frame has two such chunks and a third


class Laggard:
    """Sends a frame by hand, chunk by chunk, on a stream of its own."""

    def __init__(self, address: str, batch_id: int) -> None:
        self._chunks = encode_frame(header(batch_id), tree(batch_id, 20_000), chunk_bytes=CHUNK)
        self._sent: SimpleQueue[bytes | None] = SimpleQueue()
        self._channel = dial(address)
        push = self._channel.stream_stream(
            stream.PUSH_METHOD,
            request_serializer=None,
            response_deserializer=episodes_pb2.Acknowledgement.FromString,
        )
        self.call = push(iter(self._sent.get, None), metadata=call_metadata("secret", "run", "i"))

    def send(self) -> None:
        """The next chunk."""
        self._sent.put(next(self._chunks))

    def code(self) -> grpc.StatusCode:
        """How its stream ended."""
        with pytest.raises(grpc.RpcError) as error:
            next(self.call)
        return error.value.code()

    def close(self) -> None:
        self._sent.put(None)
        self._channel.close()


@pytest.fixture
def open_laggard(every_thread_ends: None) -> Iterator[Callable[[LearnerEnd, int], Laggard]]:
    opened: list[Laggard] = []

    def open_one(learner: LearnerEnd, batch_id: int) -> Laggard:
        opened.append(Laggard(learner.address, batch_id))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def test_a_frame_that_stalls_loses_its_stream_when_others_say_something(
    learner: LearnerEnd,
    senders: Senders,
    open_laggard: Callable[[LearnerEnd, int], Laggard],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    laggard, quiet = open_laggard(learner, 101), open_laggard(learner, 102)
    laggard.send()
    for _ in range(3):
        quiet.send()  # all of it
    assert next(quiet.call).batch_id == 102
    monkeypatch.setattr(unfinished, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(unfinished, "_SLOWEST", 1e9)
    sender = senders.open(learner.address)
    deadline = time.monotonic() + PATIENCE
    for batch_id in itertools.count(1):
        sender.send(header(batch_id), tree(batch_id))
        assert senders.wait_for(batch_id) == {batch_id: ("", "")}
        if laggard.call.done():
            break
        assert time.monotonic() < deadline
    assert laggard.code() is grpc.StatusCode.CANCELLED
    assert not quiet.call.done(), "one that has no frame under way may be silent"


def test_all_unfinished_frames_together_hold_no_more_than_they_may(
    tmp_path: Path,
    open_laggard: Callable[[LearnerEnd, int], Laggard],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "Unfinished", lambda: Unfinished(most_bytes=CHUNK * 5 // 2))
    learner = LearnerEnd(tmp_path)
    try:
        first, second = open_laggard(learner, 101), open_laggard(learner, 102)
        for _ in range(2):
            first.send()
            second.send()
        calls = {first.call: first, second.call: second}
        deadline = time.monotonic() + PATIENCE
        while not (refused := [call for call in calls if call.done()]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (call,) = refused
        assert calls.pop(call).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "bytes of unfinished frames wait here already" in str(call.details())
        (other,) = calls.values()
        other.send()
        assert next(other.call).batch_id in (101, 102), "there was room for one"
    finally:
        learner.stop()
