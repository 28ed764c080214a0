"""Calls that are never answered are repeated on a new channel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders, header, tree
from support.weights_learner import METADATA, Learner, same, subscribe_by_hand

from juggler.envrunner.learner_streams import LearnerStreams
from juggler.runtime.actors import calls
from juggler.runtime.actors.attachment import Contact
from juggler.runtime.actors.endpoints import bind, dial
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.episodes import PUSH_METHOD
from juggler.runtime.streams.weights_stream import WeightsSubscription
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.v1 import training_pb2


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
        f"unix:{tmp_path / 'l'}", METADATA, "envrunner-0", Limits(), retry_seconds=0.0
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
    subscription = WeightsSubscription(f"unix:{tmp_path / 'l'}", METADATA, "envrunner-0", Limits())
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
