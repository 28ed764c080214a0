"""WeightsPublisher and WeightsSubscription over gRPC: always the newest version, never back."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from juggler.runtime.actors.credentials import CallMetadata, call_metadata, why_refused
from juggler.runtime.actors.endpoints import SERVER_OPTIONS, bind, dial
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.weights import (
    SUBSCRIBE_METHOD,
    Weights,
    WeightsPublisher,
    WeightsSubscription,
)
from juggler.runtime.wire.frames import FrameReader, Limits, encode_frame
from juggler.runtime.wire.v1 import episodes_pb2

PATIENCE = 30.0  # seconds until a test fails; nothing takes as long
METADATA = call_metadata("secret", "run", "incarnation")
LARGE = 4 << 20  # elements of float32: sixteen MiB, more than gRPC and the socket hold


def _tree(version: Version, size: int = 4) -> dict[str, Any]:
    """A tree that only this version has."""
    values = np.full(size, 1000 * version.generation + version.update, np.float32)  # [size]
    return {"default": {"weight": values}}


class Learner:
    """A server on a path, with a publisher; may be stopped and started as another process.

    Attributes:
        came: can be acquired once for each stream that has come.
    """

    def __init__(self, directory: Path, max_streams: int = 8) -> None:
        self.address = f"unix:{directory / 'l'}"
        self.came = threading.Semaphore(0)
        self._max_streams = max_streams
        self.start()

    def start(self, handler: grpc.GenericRpcHandler | None = None) -> None:
        """Listen, with a new publisher or with something else that answers."""
        self._threads = ThreadPoolExecutor(self._max_streams, thread_name_prefix="learner")
        self._server = grpc.server(self._threads, options=SERVER_OPTIONS)
        self.publisher = WeightsPublisher(self._why_refused)
        self._server.add_generic_rpc_handlers((handler or self.publisher.handler(),))
        bind(self._server, self.address)
        self._server.start()

    def publish(self, generation: int, update: int, size: int = 4) -> Version:
        version = Version(generation, update)
        self.publisher.publish(version, _tree(version, size))
        return version

    def stop(self) -> None:
        """As if the process were killed; then every thread of it has to end."""
        assert self._server.stop(grace=None).wait(PATIENCE)
        self._threads.shutdown(wait=True)

    def _why_refused(self, metadata: CallMetadata) -> str | None:
        self.came.release()
        return why_refused(metadata, token="secret", run_id="run")


@pytest.fixture(autouse=True)
def _every_thread_ends() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} goes on"


@pytest.fixture
def learner(tmp_path: Path, _every_thread_ends: None) -> Iterator[Learner]:
    made = Learner(tmp_path)
    yield made
    made.stop()


Subscribe = Callable[..., WeightsSubscription]


@pytest.fixture
def subscribe(learner: Learner) -> Iterator[Subscribe]:
    subscriptions: list[WeightsSubscription] = []

    def subscribe(token: str = "secret", limits: Limits | None = None) -> WeightsSubscription:
        metadata = call_metadata(token, "run", "incarnation")
        made = WeightsSubscription(
            learner.address, metadata, "envrunner-0", limits or Limits(), retry_seconds=0.02
        )
        subscriptions.append(made)
        return made

    yield subscribe
    for subscription in subscriptions:
        subscription.close()


def _same(weights: Weights, version: Version, size: int = 4) -> bool:
    np.testing.assert_equal(weights.tree, _tree(version, size))
    return weights.version == version


def _call(channel: grpc.Channel) -> Any:
    """A stream of weights that nobody reads but the test."""
    request = episodes_pb2.Subscription(subscriber="envrunner-0").SerializeToString()
    return channel.unary_stream(SUBSCRIBE_METHOD)(request, metadata=METADATA, timeout=PATIENCE)


def _read(call: Any, reader: FrameReader[episodes_pb2.WeightsHeader]) -> Version:
    """The version of the next weights on a stream."""
    frame = None
    while frame is None:
        frame = reader.feed(next(call))
    version = Version.of(frame.header.version)
    assert isinstance(frame.tree, dict)
    assert frame.tree["default"]["weight"][-1] == 1000 * version.generation + version.update
    return version


# -- versions -------------------------------------------------------------------------------------


def test_a_subscriber_gets_what_was_published_before_and_what_comes_after(
    learner: Learner, subscribe: Subscribe
) -> None:
    first = learner.publish(1, 0)
    subscription = subscribe()
    assert _same(subscription.wait_for(first, PATIENCE), first)
    for update in range(1, 20):
        version = learner.publish(1, update)
        assert _same(subscription.wait_for(version, PATIENCE), version)
    assert subscription.newest is not None
    assert subscription.newest.version == (1, 19)


def test_a_subscriber_that_comes_before_the_first_weights_gets_them(
    learner: Learner, subscribe: Subscribe
) -> None:
    subscription = subscribe()
    assert learner.came.acquire(timeout=PATIENCE)
    assert subscription.newest is None
    version = learner.publish(0, 0)
    assert _same(subscription.wait_for(version, PATIENCE), version)


def test_weights_may_be_changed_as_soon_as_they_are_published(
    learner: Learner, subscribe: Subscribe
) -> None:
    version = Version(1, 1)
    tree = _tree(version, LARGE)
    learner.publisher.publish(version, tree)
    tree["default"]["weight"].fill(-1)
    assert _same(subscribe().wait_for(version, PATIENCE), version, LARGE)


def test_weights_that_were_received_cannot_be_written_to(
    learner: Learner, subscribe: Subscribe
) -> None:
    weights = subscribe().wait_for(learner.publish(1, 0), PATIENCE)
    assert isinstance(weights.tree, dict)
    with pytest.raises(ValueError, match="read-only"):
        weights.tree["default"]["weight"].fill(0)


@pytest.mark.parametrize("version", [(2, 4), (2, 5), (1, 9), (0, 0)])
def test_only_a_newer_version_can_be_published(
    learner: Learner, subscribe: Subscribe, version: tuple[int, int]
) -> None:
    newest = learner.publish(2, 5)
    with pytest.raises(ValueError, match=re.escape(str(Version(*version)))):
        learner.publish(*version)
    assert _same(subscribe().wait_for(Version(0, 0), PATIENCE), newest)


def test_a_higher_generation_is_newer_whatever_its_update(
    learner: Learner, subscribe: Subscribe
) -> None:
    subscription = subscribe()
    subscription.wait_for(learner.publish(1, 9), PATIENCE)
    version = learner.publish(2, 0)
    assert _same(subscription.wait_for(version, PATIENCE), version)


def test_a_slow_reader_skips_to_the_newest_version(learner: Learner) -> None:
    learner.publish(1, 0, LARGE)
    reader = FrameReader(episodes_pb2.WeightsHeader)
    with dial(learner.address) as channel:
        call = _call(channel)
        assert reader.feed(next(call)) is None  # the rest of this version stays in the pipe
        for update in range(1, 8):
            learner.publish(1, update, LARGE)
        assert [_read(call, reader), _read(call, reader)] == [(1, 0), (1, 7)]


def test_every_reader_sees_versions_in_order_and_the_last_one(learner: Learner) -> None:
    last = Version(1, 300)
    seen: list[list[Version]] = [[], [], []]

    def read(versions: list[Version]) -> None:
        reader = FrameReader(episodes_pb2.WeightsHeader)
        with dial(learner.address) as channel:
            call = _call(channel)
            while not versions or versions[-1] != last:
                versions.append(_read(call, reader))

    readers = [threading.Thread(target=read, args=(versions,)) for versions in seen]
    for thread in readers:
        thread.start()
    for update in range(last.update + 1):
        learner.publish(1, update, size=10_000)
    for thread in readers:
        thread.join(PATIENCE)
    for versions in seen:
        assert versions[-1] == last
        assert versions == sorted(set(versions))


# -- what breaks ----------------------------------------------------------------------------------


def test_a_subscriber_dials_again_when_the_learner_is_back(
    learner: Learner, subscribe: Subscribe
) -> None:
    subscription = subscribe()
    version = learner.publish(1, 3)
    subscription.wait_for(version, PATIENCE)
    for generation in (2, 3):
        learner.stop()
        assert _same(subscription.wait_for(version, 0.0), version), "they are still of use"
        learner.start()
        version = learner.publish(generation, 0)
        assert _same(subscription.wait_for(version, PATIENCE), version)


def test_older_weights_of_a_restarted_learner_do_not_replace_newer_ones(
    learner: Learner, subscribe: Subscribe
) -> None:
    subscription = subscribe()
    newest = learner.publish(2, 7)
    subscription.wait_for(newest, PATIENCE)
    learner.stop()
    served = _Scripted([_frame(Version(2, 3)), _frame(newest), _frame(Version(1, 9))])
    learner.start(served.handler())
    served.wait_for_calls(2)  # by then all of the first call was received
    assert subscription.newest is not None
    assert _same(subscription.newest, newest)


def test_waiting_in_vain_says_for_what_and_where_and_what_was_seen(
    learner: Learner, subscribe: Subscribe
) -> None:
    subscription = subscribe()
    began = time.monotonic()
    with pytest.raises(TimeoutError) as nothing:
        subscription.wait_for(Version(1, 2), 0.05)
    assert 0.05 <= time.monotonic() - began < PATIENCE / 2
    assert "no weights of version (1, 2)" in str(nothing.value)
    assert learner.address in str(nothing.value)
    assert "newest: none" in str(nothing.value)
    subscription.wait_for(learner.publish(1, 1), PATIENCE)
    with pytest.raises(TimeoutError, match=r"newest: .*generation=1, update=1"):
        subscription.wait_for(Version(1, 2), 0.05)


def _waits_in_vain(subscription: WeightsSubscription, words: str) -> None:
    """Weights never come, and soon the subscription can say why."""
    deadline = time.monotonic() + PATIENCE
    said = ""
    while words not in said:
        assert time.monotonic() < deadline, said
        with pytest.raises(TimeoutError) as timeout:
            subscription.wait_for(Version(0, 0), 0.05)
        said = str(timeout.value)


@pytest.mark.parametrize("token", ["guess", ""])
def test_a_subscriber_with_the_wrong_token_gets_nothing_and_can_say_why(
    learner: Learner, subscribe: Subscribe, token: str
) -> None:
    learner.publish(1, 0)
    subscription = subscribe(token)
    _waits_in_vain(subscription, "the token is missing or wrong")
    assert subscription.newest is None


def test_a_subscriber_of_another_run_is_refused(learner: Learner) -> None:
    learner.publish(1, 0)
    with dial(learner.address) as channel:
        metadata = call_metadata("secret", "other", "incarnation")
        call = channel.unary_stream(SUBSCRIBE_METHOD)(b"", metadata=metadata, timeout=PATIENCE)
        with pytest.raises(grpc.RpcError, match="this is run run, not 'other'"):
            next(call)
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED


def test_weights_over_the_limit_are_not_taken(learner: Learner, subscribe: Subscribe) -> None:
    learner.publish(1, 0, size=1000)
    subscription = subscribe(limits=Limits(payload_bytes=1000))
    _waits_in_vain(subscription, "over the limit, 1000")


def _frame(version: Version) -> bytes:
    header = episodes_pb2.WeightsHeader(version=version.message())
    (chunk,) = encode_frame(header, _tree(version), digest=True)
    return chunk


class _Scripted:
    """Serves these messages on the first call, and after the last of its calls nothing."""

    def __init__(self, first: list[bytes], later: list[bytes] | None = None) -> None:
        self._first = first
        self._later = later or []
        self._calls = 0
        self._changed = threading.Condition()

    def handler(self) -> grpc.GenericRpcHandler:
        service, method = SUBSCRIBE_METHOD.strip("/").split("/")
        serve = grpc.unary_stream_rpc_method_handler(self._serve)
        return grpc.method_handlers_generic_handler(service, {method: serve})

    def wait_for_calls(self, calls: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._calls >= calls, PATIENCE)

    def _serve(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._changed:
            self._calls += 1
            first = self._calls == 1
            self._changed.notify_all()
        return iter(self._first if first else self._later)


def test_damaged_weights_are_not_taken_and_asked_for_again(
    learner: Learner, subscribe: Subscribe
) -> None:
    version = Version(1, 5)
    good = _frame(version)
    assert good.endswith(_tree(version)["default"]["weight"].tobytes())
    damaged = good[:-1] + bytes([good[-1] ^ 1])
    learner.stop()
    served = _Scripted([damaged])
    learner.start(served.handler())
    subscription = subscribe()
    _waits_in_vain(subscription, "does not match its SHA-256")
    learner.stop()
    learner.start(_Scripted([damaged], [good]).handler())
    assert _same(subscription.wait_for(version, PATIENCE), version)


def test_weights_that_end_in_the_middle_are_not_taken(
    learner: Learner, subscribe: Subscribe
) -> None:
    header = episodes_pb2.WeightsHeader(version=Version(1, 5).message())
    chunks = list(encode_frame(header, _tree(Version(1, 5), LARGE), digest=True))
    learner.stop()
    served = _Scripted(chunks[:-1], [_frame(Version(1, 4))])
    learner.start(served.handler())
    subscription = subscribe()
    assert _same(subscription.wait_for(Version(0, 0), PATIENCE), Version(1, 4))


# -- closing --------------------------------------------------------------------------------------


def test_closing_the_publisher_ends_streams_on_both_sides(learner: Learner) -> None:
    version = learner.publish(1, 0)
    reader = FrameReader(episodes_pb2.WeightsHeader)
    with dial(learner.address) as channel:
        calls = [_call(channel) for _ in range(5)]
        for call in calls:
            assert _read(call, reader) == version
        learner.publisher.close()
        for call in calls:
            assert next(call, None) is None
            assert call.code() is grpc.StatusCode.OK


def test_closing_a_subscription_ends_its_thread_at_once(
    learner: Learner, subscribe: Subscribe
) -> None:
    before = set(threading.enumerate())
    subscription = subscribe()
    subscription.wait_for(learner.publish(1, 0), PATIENCE)
    own = [t for t in set(threading.enumerate()) - before if not t.name.startswith("learner")]
    assert own
    subscription.close()
    for thread in own:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert subscription.newest is not None, "what was received can still be used"


def test_a_subscription_to_nobody_can_be_closed(tmp_path: Path) -> None:
    subscription = WeightsSubscription(f"unix:{tmp_path / 'nobody'}", METADATA, "e", Limits())
    subscription.close()


def test_subscribers_that_come_and_go_do_not_use_up_the_learners_threads(tmp_path: Path) -> None:
    learner = Learner(tmp_path, max_streams=2)
    try:
        version = learner.publish(1, 0)
        for number in range(200):
            subscription = WeightsSubscription(learner.address, METADATA, "e", Limits())
            if number % 2:  # the others go at once
                subscription.wait_for(version, PATIENCE)
            subscription.close()
    finally:
        learner.stop()


def test_subscribers_that_go_before_they_have_read_anything_free_the_learners_threads(
    tmp_path: Path,
) -> None:
    learner = Learner(tmp_path, max_streams=2)
    try:
        for round_ in range(50):
            with dial(learner.address) as channel:
                call = _call(channel)
                assert learner.came.acquire(timeout=PATIENCE)
                assert call.is_active()
            if round_ == 25:
                learner.publish(1, 0, LARGE)  # from now on they go in the middle of weights
        with dial(learner.address) as channel:
            reader = FrameReader(episodes_pb2.WeightsHeader)
            assert _read(_call(channel), reader) == (1, 0)
    finally:
        learner.stop()
