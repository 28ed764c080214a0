"""Batches over gRPC: they arrive whole and in order, or the sender hears why not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders, header, tree

from juggler.runtime.actors.calls import calls
from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.streams import acknowledgements
from juggler.runtime.streams import episodes as stream
from juggler.runtime.streams.episodes import PUSH_METHOD
from juggler.runtime.wire.frames import DEFAULT_CHUNK_BYTES, encode_frame
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.v1 import episodes_pb2

pytestmark = pytest.mark.usefixtures("grpc_api")

LARGE = 5 * DEFAULT_CHUNK_BYTES // 4  # elements of float32: five chunks


def _push(learner: LearnerEnd, messages: list[bytes]) -> grpc.StatusCode:
    """How a stream ends on which these messages come, whatever they are."""
    with dial(learner.address) as channel:
        push = channel.stream_stream(PUSH_METHOD)
        call = push(iter(messages), metadata=call_metadata("secret", "run", "i"), timeout=PATIENCE)
        with pytest.raises(grpc.RpcError):
            list(call)
        code: grpc.StatusCode = call.code()
        return code


# -- what arrives ---------------------------------------------------------------------------------


def test_batches_arrive_whole_and_in_order_and_each_is_acknowledged(
    learner: LearnerEnd, senders: Senders
) -> None:
    sender = senders.open(learner.address)
    for batch_id in range(1, 101):
        sender.send(header(batch_id), tree(batch_id))
    senders.wait_for(*range(1, 101))
    assert senders.settled == [(batch_id, "", "") for batch_id in range(1, 101)]
    assert [frame.header for frame in learner.taken] == [header(i) for i in range(1, 101)]
    for frame in learner.taken:
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id))
    assert learner.opened == 1


def test_a_batch_of_several_chunks_arrives_whole(learner: LearnerEnd, senders: Senders) -> None:
    assert len(list(encode_frame(header(1), tree(1, LARGE)))) > 4
    sender = senders.open(learner.address)
    for batch_id, size in ((1, LARGE), (2, 4), (3, LARGE)):
        sender.send(header(batch_id), tree(batch_id, size))
    assert set(senders.wait_for(1, 2, 3).values()) == {("", "")}
    for frame, size in zip(learner.taken, (LARGE, 4, LARGE), strict=True):
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, size))


def test_a_batch_waits_as_it_is_until_those_before_it_have_left(
    learner: LearnerEnd,
    senders: Senders,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serialized: list[int] = []  # the sizes of chunks

    def watched(*frame: Any, place: Any) -> Iterator[bytes]:
        for chunk in encode_frame(*frame):
            serialized.append(len(chunk))
            yield chunk

    monkeypatch.setattr(stream, "encode_frame", watched)
    sender = senders.open(learner.address)
    for batch_id in range(2, 7):  # the learner does not go on behind the first
        sender.send(header(batch_id), tree(batch_id, LARGE))
    assert len(serialized) < 18, "that is three of the five"
    gate.set()
    senders.wait_for(*range(2, 7))
    assert len(serialized) == 30
    for frame in learner.taken:
        np.testing.assert_equal(frame.tree, tree(frame.header.batch_id, LARGE))


def test_two_senders_do_not_mix_their_batches(learner: LearnerEnd, senders: Senders) -> None:
    first, second = senders.open(learner.address), senders.open(learner.address)
    for batch_id in range(1, 41, 2):
        first.send(header(batch_id), tree(batch_id, 300_000))
        second.send(header(batch_id + 1), tree(batch_id + 1))
    assert set(senders.wait_for(*range(1, 41)).values()) == {("", "")}
    came = [frame.header.batch_id for frame in learner.taken]
    assert [i for i in came if i % 2] == list(range(1, 41, 2))
    assert [i for i in came if not i % 2] == list(range(2, 41, 2))
    assert learner.opened == 2


def test_who_reads_no_acknowledgements_is_not_heard_for_ever(
    learner: LearnerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    ServerStream = calls().ServerStream

    def stuck(requests: Any, context: Any, next_message: Any) -> Any:
        """As if all were full on the way to a client that reads nothing."""
        return ServerStream(requests, context, lambda: None)

    monkeypatch.setattr(acknowledgements, "_MOST_UNREAD", 100)
    monkeypatch.setattr(acknowledgements, "calls", lambda: SimpleNamespace(ServerStream=stuck))
    frames = [next(encode_frame(header(n), tree(n))) for n in range(200)]
    with dial(learner.address) as channel:
        push = channel.stream_stream(PUSH_METHOD)
        call = push(iter(frames), metadata=call_metadata("secret", "run", "i"), timeout=PATIENCE)
        with pytest.raises(grpc.RpcError, match="101 acknowledgements were not read"):
            list(call)
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(learner.taken) == 101


# -- what is refused ------------------------------------------------------------------------------


def test_the_reason_for_a_refusal_comes_back_and_the_stream_goes_on(
    learner: LearnerEnd, senders: Senders
) -> None:
    learner.answer = lambda frame: "no room" if frame.header.batch_id % 2 else ""
    sender = senders.open(learner.address)
    for batch_id in range(1, 5):
        sender.send(header(batch_id), tree(batch_id))
    senders.wait_for(1, 2, 3, 4)
    assert senders.settled == [
        (1, "refused", "no room"),
        (2, "", ""),
        (3, "refused", "no room"),
        (4, "", ""),
    ]
    assert learner.opened == 1


@pytest.mark.parametrize(
    ("token", "run_id", "words"),
    [
        ("guess", "run", "the token is missing or wrong"),
        ("", "run", "the token is missing or wrong"),
        ("secret", "other", "this is run run, not 'other'"),
        ("secret", "", "this is run run, not ''"),
    ],
)
def test_a_stream_with_the_wrong_token_or_run_is_not_let_in(
    learner: LearnerEnd, senders: Senders, token: str, run_id: str, words: str
) -> None:
    senders.open(learner.address, token, run_id).send(header(1), tree(1))
    reason, explanation = senders.wait_for(1)[1]
    assert reason == "learner_lost"
    assert explanation == words
    assert learner.taken == []


def test_the_reason_why_a_stream_is_not_let_in_always_comes_back(
    learner: LearnerEnd, senders: Senders
) -> None:
    for batch_id in range(1, 200):
        sender = senders.open(learner.address, token="guess")
        sender.send(header(batch_id), tree(batch_id))
        lost = ("learner_lost", "the token is missing or wrong")
        assert senders.wait_for(batch_id) == {batch_id: lost}
        sender.close()


def _first_half() -> bytes:
    return next(encode_frame(header(1), tree(1, LARGE)))


@pytest.mark.parametrize(
    "messages",
    [
        [b"\xff" * 50],
        [b""],
        [next(encode_frame(header(1), tree(1)))[:-3]],
        [_first_half(), _first_half()],
        [_first_half(), b"\xff"],
    ],
    ids=["noise", "nothing", "cut", "a frame within a frame", "noise within a frame"],
)
def test_garbage_ends_its_own_stream_and_no_other(
    learner: LearnerEnd, senders: Senders, messages: list[bytes]
) -> None:
    sender = senders.open(learner.address)
    sender.send(header(1), tree(1))
    senders.wait_for(1)
    assert _push(learner, messages) is grpc.StatusCode.INVALID_ARGUMENT
    sender.send(header(2), tree(2))
    assert senders.wait_for(1, 2) == {1: ("", ""), 2: ("", "")}
    assert learner.opened == 2, "the good stream was opened again"


def test_a_good_batch_before_garbage_is_acknowledged(learner: LearnerEnd) -> None:
    (good,) = encode_frame(header(1), tree(1))
    with dial(learner.address) as channel:
        push = channel.stream_stream(
            PUSH_METHOD, response_deserializer=episodes_pb2.Acknowledgement.FromString
        )
        metadata = call_metadata("secret", "run", "i")
        call = push(iter([good, b"\xff"]), metadata=metadata, timeout=PATIENCE)
        assert next(call) == episodes_pb2.Acknowledgement(batch_id=1)
        with pytest.raises(grpc.RpcError):
            next(call)


def test_a_batch_over_the_limit_is_lost_and_smaller_ones_still_pass(
    tmp_path: Path, senders: Senders
) -> None:
    learner = LearnerEnd(tmp_path, Limits(payload_bytes=1000))
    try:
        sender = senders.open(learner.address)
        sender.send(header(1), tree(1, size=1000))
        reason, explanation = senders.wait_for(1)[1]
        assert reason == "learner_lost"
        assert "over the limit, 1000" in explanation
        arrived = senders.send_until_one_arrives(sender, first_id=2)
        assert [frame.header.batch_id for frame in learner.taken] == [arrived]
        assert senders.settled_more_than_once() == []
    finally:
        learner.stop()
