"""Weights over gRPC, and when a stream of theirs breaks."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.weights_learner import (
    LARGE,
    METADATA,
    PATIENCE,
    Learner,
    Scripted,
    read_weights,
    readers_stay,
    same,
    subscribe_by_hand,
    weights_frame,
    weights_tree,
)

from juggler.runtime.actors.endpoints import dial
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams import weights_stream
from juggler.runtime.streams.weights_stream import SUBSCRIBE_METHOD, WeightsSubscription
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.v1 import episodes_pb2

Subscribe = Callable[..., WeightsSubscription]


def test_a_subscriber_gets_what_was_published_before_and_what_comes_after(
    server: Learner, subscribe: Subscribe
) -> None:
    first = server.publish(1, 0)
    subscription = subscribe()
    assert same(subscription.wait_for(first, PATIENCE), first)
    for update in range(1, 20):
        version = server.publish(1, update)
        assert same(subscription.wait_for(version, PATIENCE), version)
    assert subscription.newest is not None
    assert subscription.newest.version == (1, 19)


def test_a_version_is_serialized_once_for_all_and_not_at_all_for_nobody(
    server: Learner, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    serialized: list[int] = []

    def encode(header: episodes_pb2.WeightsHeader, *args: Any, **options: Any) -> Iterator[bytes]:
        chunks = encode_frame(header, *args, **options)

        def taken() -> Iterator[bytes]:
            serialized.append(header.version.update)
            yield from chunks

        return taken()

    monkeypatch.setattr(weights_stream, "encode_frame", encode)
    server.publish(1, 1)
    last = server.publish(1, 2)
    subscriptions = [subscribe() for _ in range(3)]
    assert all(same(each.wait_for(last, PATIENCE), last) for each in subscriptions)
    assert serialized == [2]


def test_what_cannot_be_sent_is_refused_by_whoever_publishes_it(server: Learner) -> None:
    with pytest.raises(WireError, match="holds arrays and branches"):
        server.publisher.publish(Version(1, 1), {"default": {"weight": "heavy"}})  # type: ignore[dict-item]


@pytest.mark.parametrize("version", [(2, 4), (2, 5), (1, 9), (0, 0)])
def test_only_a_newer_version_can_be_published(
    server: Learner, subscribe: Subscribe, version: tuple[int, int]
) -> None:
    newest = server.publish(2, 5)
    with pytest.raises(ValueError, match=re.escape(str(Version(*version)))):
        server.publish(*version)
    assert same(subscribe().wait_for(Version(0, 0), PATIENCE), newest)


def test_a_slow_reader_skips_to_the_newest_version(server: Learner) -> None:
    server.publish(1, 0, 3 * LARGE)
    reader = FrameReader(episodes_pb2.WeightsHeader)
    with dial(server.address) as channel:
        call = subscribe_by_hand(channel)
        assert reader.feed(next(call)) is None  # the rest of this version stays in the pipe
        for update in range(1, 4):
            server.publish(1, update, 3 * LARGE)
        assert [read_weights(call, reader), read_weights(call, reader)] == [(1, 0), (1, 3)]


# Weights when a stream of theirs breaks, is refused or closes: nothing bad is taken or left.


# -- what breaks ----------------------------------------------------------------------------------


def test_a_subscriber_dials_again_when_the_learner_is_back(
    server: Learner, subscribe: Subscribe
) -> None:
    subscription = subscribe()
    version = server.publish(1, 3)
    subscription.wait_for(version, PATIENCE)
    for generation in (2, 3):
        server.stop()
        assert same(subscription.wait_for(version, 0.0), version), "they are still of use"
        server.start()
        version = server.publish(generation, 0)
        assert same(subscription.wait_for(version, PATIENCE), version)


def test_older_weights_of_a_restarted_learner_do_not_replace_newer_ones(
    server: Learner, subscribe: Subscribe
) -> None:
    subscription = subscribe()
    newest = server.publish(2, 7)
    subscription.wait_for(newest, PATIENCE)
    server.stop()
    served = Scripted(
        [weights_frame(Version(2, 3)), weights_frame(newest), weights_frame(Version(1, 9))]
    )
    server.start(served.handler())
    served.wait_for_calls(2)  # now all of the first call was received
    assert subscription.newest is not None
    assert same(subscription.newest, newest)


def test_waiting_in_vain_says_for_what_and_where_and_what_was_seen(
    server: Learner, subscribe: Subscribe
) -> None:
    subscription = subscribe()
    with pytest.raises(TimeoutError) as nothing:
        subscription.wait_for(Version(1, 2), 0.0)
    assert "no weights of version (1, 2)" in str(nothing.value)
    assert server.address in str(nothing.value)
    assert "newest: none" in str(nothing.value)
    subscription.wait_for(server.publish(1, 1), PATIENCE)
    with pytest.raises(TimeoutError, match=r"newest: .*generation=1, update=1"):
        subscription.wait_for(Version(1, 2), 0.0)


def _waits_in_vain(subscription: WeightsSubscription, words: str) -> None:
    """Weights never come, and soon the subscription can say why."""
    deadline = time.monotonic() + PATIENCE
    said = ""
    while words not in said:
        assert time.monotonic() < deadline, said
        with pytest.raises(TimeoutError) as timeout:
            subscription.wait_for(Version(0, 0), 0.0)
        said = str(timeout.value)


@pytest.mark.parametrize("token", ["guess", ""])
def test_a_subscriber_with_the_wrong_token_gets_nothing_and_can_say_why(
    server: Learner, subscribe: Subscribe, token: str
) -> None:
    server.publish(1, 0)
    subscription = subscribe(token)
    _waits_in_vain(subscription, "the token is missing or wrong")
    assert subscription.newest is None


def test_who_has_no_token_is_refused_before_it_says_what_it_wants(server: Learner) -> None:
    said = threading.Event()
    with dial(server.address) as channel:
        subscribe = channel.stream_stream(SUBSCRIBE_METHOD)
        call = subscribe(iter(said.wait, None), timeout=PATIENCE)  # it says nothing
        with pytest.raises(grpc.RpcError, match="the token is missing or wrong"):
            next(call)
        said.set()


def test_weights_over_the_limit_are_not_taken(server: Learner, subscribe: Subscribe) -> None:
    server.publish(1, 0, size=1000)
    subscription = subscribe(most_bytes=1000)
    _waits_in_vain(subscription, "over the limit, 1000")


def test_damaged_weights_are_not_taken_and_asked_for_again(
    server: Learner, subscribe: Subscribe
) -> None:
    version = Version(1, 5)
    good = weights_frame(version)
    assert good.endswith(weights_tree(version)["default"]["weight"].tobytes())
    damaged = good[:-1] + bytes([good[-1] ^ 1])
    server.stop()
    served = Scripted([damaged])
    server.start(served.handler())
    subscription = subscribe()
    _waits_in_vain(subscription, "does not match its digest")
    server.stop()
    server.start(Scripted([damaged], [good]).handler())
    assert same(subscription.wait_for(version, PATIENCE), version)


def test_a_thread_that_breaks_is_heard_of_by_whoever_asks_for_weights(
    server: Learner, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscription = subscribe()
    subscription.wait_for(server.publish(1, 0), PATIENCE)
    monkeypatch.setattr(FrameReader, "feed", None)
    version = server.publish(1, 1)
    with pytest.raises(TypeError, match="not callable") as waiting:
        subscription.wait_for(version, PATIENCE)
    assert "_receive" in [frame.name for frame in waiting.traceback], "where it was"
    readers_stay(server, 0)  # its call has ended
    with pytest.raises(TypeError, match="not callable"):
        _ = subscription.newest


# -- closing --------------------------------------------------------------------------------------


def test_closing_the_publisher_ends_streams_on_both_sides(server: Learner) -> None:
    version = server.publish(1, 0)
    reader = FrameReader(episodes_pb2.WeightsHeader)
    with dial(server.address) as channel:
        calls = [subscribe_by_hand(channel) for _ in range(5)]
        for call in calls:
            assert read_weights(call, reader) == version
        server.publisher.close()
        for call in calls:
            assert next(call, None) is None
            assert call.code() is grpc.StatusCode.OK


def test_closing_a_subscription_ends_its_thread_at_once(
    server: Learner, subscribe: Subscribe
) -> None:
    before = set(threading.enumerate())
    subscription = subscribe()
    subscription.wait_for(server.publish(1, 0), PATIENCE)
    own = [t for t in set(threading.enumerate()) - before if not t.name.startswith("learner")]
    assert own
    subscription.close()
    for thread in own:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert subscription.newest is not None, "what was received can still be used"


def test_subscribers_that_go_before_they_have_read_anything_free_the_learners_threads(
    tmp_path: Path,
) -> None:
    server = Learner(tmp_path, max_streams=2)
    try:
        for round_ in range(50):
            with dial(server.address) as channel:
                call = subscribe_by_hand(channel)
                assert server.came.acquire(timeout=PATIENCE)
                assert call.is_active()
            if round_ == 25:
                server.publish(1, 0, LARGE)  # from now on they go in the middle of weights
        with dial(server.address) as channel:
            reader = FrameReader(episodes_pb2.WeightsHeader)
            assert read_weights(subscribe_by_hand(channel), reader) == (1, 0)
    finally:
        server.stop()


def test_a_subscription_that_is_none_is_refused(server: Learner) -> None:
    with dial(server.address) as channel:
        subscribe = channel.unary_stream(SUBSCRIBE_METHOD)
        with pytest.raises(grpc.RpcError, match="a stream of weights of no module") as refused:
            next(subscribe(b"\xff", metadata=METADATA, timeout=PATIENCE))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
