"""Calls that a server accepts and never answers: they are given up, and made on a new channel."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
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
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.actors.worker import Contact
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.episodes import PUSH_METHOD
from juggler.runtime.streams.weights import WeightsSubscription
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.v1 import training_pb2

# Frames of HTTP/2. After the first, a client's channel is ready.
_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_GOAWAY = bytes((0, 0, 8, 7, *bytes(13)))  # of no stream, and no error


class Timers:
    """In place of those of the clock: each goes off when a test says so, even if it was cancelled
    too late."""

    def __init__(self) -> None:
        self._set: list[Callable[[], None]] = []
        self._changed = threading.Condition()

    def __call__(self, seconds: float, then: Callable[[], None]) -> Timers:
        with self._changed:
            self._set.append(then)
            self._changed.notify_all()
        return self

    def go_off(self, number: int) -> None:
        """The timer of this number goes off, as soon as it has been set."""
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


class Mute:
    """Accepts connections on a path, says that it speaks HTTP/2, and says nothing more.

    Attributes:
        sends_away: the first call is told that it has not been taken, as by a server that ends.
    """

    def __init__(self, path: Path) -> None:
        self.sends_away = False
        self._path = path
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._called = threading.Event()
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def wait_for_a_call(self) -> None:
        assert self._called.wait(PATIENCE)

    def make_way(self) -> None:
        """Let another server have the path; the connection stays."""
        self._path.unlink()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        for connection in self._connections:
            # A channel that is closed while it connects may keep its connection.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with suppress(OSError):  # once it is shut down
            while True:
                connection, _ = self._listening.accept()
                self._connections.append(connection)
                threading.Thread(target=self._hear, args=(connection,)).start()

    def _hear(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.sendall(_SETTINGS)
            heard = b""
            while said := connection.recv(1 << 16):
                heard += said
                if (
                    b"juggler-incarnation" in heard and not self._called.is_set()
                ):  # a call's metadata
                    self._called.set()
                    if self.sends_away:
                        connection.sendall(_GOAWAY)
                        return


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
        f"unix:{tmp_path / 'l'}", METADATA, "envrunner-0", Limits(), retry_seconds=0.02
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
