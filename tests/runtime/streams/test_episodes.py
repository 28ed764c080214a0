"""Batches over gRPC, and what becomes of them when a stream breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders, header, tree
from support.weights_learner import METADATA, Learner, same, subscribe_by_hand

from juggler.envrunner.learner_streams import LearnerStreams
from juggler.runtime.actors import calls
from juggler.runtime.actors.attachment import Contact
from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.endpoints import bind, dial
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams import episodes as stream
from juggler.runtime.streams.episodes import PUSH_METHOD, BatchFrame
from juggler.runtime.streams.weights_stream import WeightsSubscription
from juggler.runtime.wire.frames import DEFAULT_CHUNK_BYTES, encode_frame
from juggler.runtime.wire.v1 import training_pb2

LARGE = 5 * DEFAULT_CHUNK_BYTES // 4  # elements of float32: five chunks


def _push(learner: LearnerEnd, messages: list[bytes]) -> grpc.StatusCode:
    """How a stream with these messages, valid or not, ends."""
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


def test_a_batch_waits_as_it_is_until_those_before_it_have_left(
    learner: LearnerEnd, senders: Senders, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
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
        ("secret", "other", "this is run 'run', not 'other'"),
        ("secret", "", "this is run 'run', not ''"),
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


def test_a_batch_over_the_limit_is_lost_and_smaller_ones_still_pass(
    tmp_path: Path, senders: Senders
) -> None:
    learner = LearnerEnd(tmp_path, 1000)
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


# EpisodeSender when its stream breaks or closes: every batch is settled, and only once.


@pytest.mark.parametrize("end", ["the learner stops", "the sender closes"])
def test_what_is_not_acknowledged_when_a_stream_ends_is_lost_once(
    learner: LearnerEnd, senders: Senders, gate: threading.Event, end: str
) -> None:
    sender = senders.open(learner.address)
    for batch_id in range(1, 30):
        sender.send(header(batch_id), tree(batch_id, 100_000))
    senders.wait_for(1)
    if end == "the learner stops":
        learner.begin_to_stop()
    else:
        sender.close()
    settled = senders.wait_for(*range(1, 30))
    gate.set()  # the learner's thread goes on as if nothing had happened
    assert settled.pop(1) == ("", "")
    assert {reason for reason, _ in settled.values()} == {"learner_lost"}
    assert all(explanation for _, explanation in settled.values())
    sender.close()
    assert senders.settled_more_than_once() == []


def test_a_batch_for_a_learner_that_is_not_there_is_lost(tmp_path: Path, senders: Senders) -> None:
    senders.open(f"unix:{tmp_path / 'empty'}").send(header(1), tree(1))
    reason, explanation = senders.wait_for(1)[1]
    assert reason == "learner_lost"
    assert explanation


def test_a_learner_that_fails_over_a_batch_loses_what_it_had_not_acknowledged(
    learner: LearnerEnd, senders: Senders
) -> None:
    def answer(frame: BatchFrame) -> str:
        if frame.header.batch_id == 2:
            raise RuntimeError("out of order")
        return ""

    learner.answer = answer
    sender = senders.open(learner.address)
    sender.send(header(1), tree(1))
    senders.wait_for(1)
    sender.send(header(2), tree(2))
    reason, explanation = senders.wait_for(2)[2]
    assert reason == "learner_lost"
    assert "out of order" in explanation
    senders.send_until_one_arrives(sender, first_id=3)
    assert senders.settled_more_than_once() == []


def test_a_batch_that_no_message_can_be_made_of_is_lost(
    learner: LearnerEnd, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # a thread will raise

    def broken(*frame: Any, place: Any) -> Iterator[bytes]:
        yield from ()
        raise ZeroDivisionError

    sender = senders.open(learner.address)
    sender.send(header(1), tree(1))
    senders.wait_for(1)
    monkeypatch.setattr(stream, "encode_frame", broken)
    sender.send(header(2), tree(2))
    assert senders.wait_for(2)[2] == ("learner_lost", "a message could not be used")


def test_the_sender_opens_a_new_stream_to_a_learner_that_came_back(
    learner: LearnerEnd, senders: Senders
) -> None:
    sender = senders.open(learner.address)
    sender.send(header(1), tree(1))
    senders.wait_for(1)
    for _ in range(3):
        learner.stop()
        learner.start()
        arrived = senders.send_until_one_arrives(sender, first_id=len(senders.settled) + 1)
        assert learner.taken[-1].header.batch_id == arrived
        np.testing.assert_equal(learner.taken[-1].tree, tree(arrived))
    assert senders.settled_more_than_once() == []


# -- closing --------------------------------------------------------------------------------------


def test_what_comes_after_a_sender_was_closed_is_lost(
    learner: LearnerEnd, senders: Senders
) -> None:
    sender = senders.open(learner.address)
    sender.close()
    sender.send(header(1), tree(1))
    assert senders.wait_for(1)[1][0] == "learner_lost"
    assert senders.settled_more_than_once() == []


# Calls that are never answered are repeated on a new channel.


class Timers:
    """Replaces clock timers: each goes off on request, even when cancelled late."""

    def __init__(self) -> None:
        self._set: list[Callable[[], None]] = []
        self._changed = threading.Condition()

    def __call__(self, seconds: float, then: Callable[[], None]) -> Timers:
        with self._changed:
            self._set.append(then)
            self._changed.notify_all()
        return self

    def go_off(self, number: int) -> None:
        """Set off the timer of this number, once it exists."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._set) > number, PATIENCE)
        self._set[number]()

    def start(self) -> None:
        pass

    def cancel(self) -> None:
        pass


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    made = Timers()
    monkeypatch.setattr(calls, "Timer", made)
    return made


class Mute(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Listens at a path, and answers no call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._called, self._over = threading.Event(), threading.Event()
        self._threads = ThreadPoolExecutor(8)
        self._server = grpc.server(self._threads)
        self._server.add_generic_rpc_handlers((self,))
        bind(self._server, f"unix:{path}")
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        self._called.set()
        return grpc.stream_stream_rpc_method_handler(self._says_nothing)

    def wait_for_a_call(self) -> None:
        assert self._called.wait(PATIENCE)

    def make_way(self) -> None:
        """Let another server have the path; the connection stays."""
        self._path.unlink()

    def close(self) -> None:
        self._over.set()
        self._server.stop(grace=0).wait(PATIENCE)
        self._threads.shutdown()

    def _says_nothing(self, messages: Any, context: Any) -> Iterator[bytes]:
        self._over.wait(PATIENCE)
        yield from ()


@pytest.fixture
def mute(tmp_path: Path, every_thread_ends: None) -> Iterator[Mute]:
    made = Mute(tmp_path / "l")
    yield made
    made.close()


def test_batches_on_a_stream_that_is_not_answered_are_lost_and_later_ones_arrive(
    mute: Mute, tmp_path: Path, timers: Timers, senders: Senders
) -> None:
    sender = senders.open(f"unix:{tmp_path / 'l'}")
    sender.send(header(1), tree(1))
    mute.wait_for_a_call()
    mute.make_way()
    learner = LearnerEnd(tmp_path)
    try:
        timers.go_off(0)
        assert senders.wait_for(1)[1] == ("learner_lost", "the learner gave no answer for 25 s")
        sender.send(header(2), tree(2))
        assert senders.wait_for(2)[2] == ("", "")
        assert senders.settled_more_than_once() == []
    finally:
        learner.stop()


class Overdue(Mute):
    """Ends each call as a proxy does that lets none take longer."""

    def _says_nothing(self, messages: Any, context: Any) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the proxy's limit")
        yield from ()


def test_the_deadline_of_a_proxy_breaks_a_stream_that_was_answered(
    tmp_path: Path, senders: Senders, every_thread_ends: None
) -> None:
    proxy, ends = Overdue(tmp_path / "l"), SimpleQueue[calls.CallEnd]()
    try:
        sender = senders.open(f"unix:{tmp_path / 'l'}", ended=ends.put)
        channel = sender._channel
        for number in (1, 2):
            sender.send(header(number), tree(number))
            assert senders.wait_for(number)[number] == ("learner_lost", "the proxy's limit")
            assert not ends.get(timeout=PATIENCE).unanswered
        assert sender._channel is channel
    finally:
        proxy.close()


def test_people_are_told_of_a_learner_that_does_not_answer(
    mute: Mute, tmp_path: Path, timers: Timers
) -> None:
    reports: SimpleQueue[Any] = SimpleQueue()
    attachment: Any = SimpleNamespace(
        worker_id="envrunner-0", run_id="run", incarnation="i", report=reports.put
    )
    contact, settled = Contact("unix:nowhere", token="secret", local=True), SimpleQueue[Any]()
    streams = LearnerStreams("default", 0, attachment, contact, lambda *of: settled.put(of), set())
    told = training_pb2.Learners.Learner(
        worker_id="learner-0", incarnation="i", addresses=[f"unix:{tmp_path / 'l'}"]
    )
    streams.connect([told])
    sender = streams.sender("learner-0")
    assert sender is not None
    sender.send(header(1), tree(1))
    for each in range(2):  # for the weights, and for batches
        timers.go_off(each)
    why = "the learner gave no answer for 25 s"
    assert settled.get(timeout=PATIENCE) == ("default", 1, "learner_lost", why)
    assert reports.get(timeout=PATIENCE).text == f"connects to a learner again: {why}"
    streams.close()


def test_weights_come_on_another_channel_where_a_subscription_is_not_answered(
    mute: Mute, tmp_path: Path, timers: Timers
) -> None:
    subscription = WeightsSubscription(
        f"unix:{tmp_path / 'l'}", METADATA, "envrunner-0", retry_seconds=0.0
    )
    mute.wait_for_a_call()
    mute.make_way()
    learner = Learner(tmp_path)
    try:
        version = learner.publish(1, 1)
        timers.go_off(0)
        assert same(subscription.wait_for(version, PATIENCE), version)
    finally:
        subscription.close()
        learner.stop()


def test_a_subscription_that_is_not_answered_can_be_closed(
    mute: Mute, tmp_path: Path, timers: Timers
) -> None:
    subscription = WeightsSubscription(f"unix:{tmp_path / 'l'}", METADATA, "envrunner-0")
    mute.wait_for_a_call()
    with pytest.raises(TimeoutError):
        subscription.wait_for(Version(1, 1), 0.0)
    subscription.close()  # and no thread is left


def test_a_learner_lets_a_stream_in_before_a_batch_has_come(learner: LearnerEnd) -> None:
    over = threading.Event()

    def nothing_yet() -> Iterator[bytes]:
        over.wait(PATIENCE)
        yield from ()

    with dial(learner.address) as channel:
        push: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(PUSH_METHOD)
        call = push(nothing_yet(), metadata=METADATA, timeout=PATIENCE)
        call.initial_metadata()
        assert call.is_active(), "the metadata came with the call's end"
        over.set()
        assert list(call) == []


def test_a_learner_lets_a_subscription_in_before_there_are_weights(server: Learner) -> None:
    with dial(server.address) as channel:
        call = subscribe_by_hand(channel)
        call.initial_metadata()
        assert call.is_active(), "the metadata came with the call's end"
