"""Weights over gRPC: always the newest version, and never an older one after it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import xxhash
from support.weights_learner import (
    LARGE,
    METADATA,
    PATIENCE,
    Learner,
    Scripted,
    read_weights,
    same,
    subscribe_by_hand,
    weights_tree,
)

from juggler.runtime.actors.endpoints import SERVER_OPTIONS, bind, dial
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams import weights_publisher
from juggler.runtime.streams.weights import WeightsSubscription
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.v1 import episodes_pb2

pytestmark = pytest.mark.usefixtures("grpc_api")

Subscribe = Callable[..., WeightsSubscription]
OverTcp = Callable[[grpc.GenericRpcHandler], str]


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


def test_a_subscriber_that_comes_before_the_first_weights_gets_them(
    server: Learner, subscribe: Subscribe
) -> None:
    subscription = subscribe()
    assert server.came.acquire(timeout=PATIENCE)
    assert subscription.newest is None
    version = server.publish(0, 0)
    assert same(subscription.wait_for(version, PATIENCE), version)


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

    monkeypatch.setattr(weights_publisher, "encode_frame", encode)
    server.publish(1, 1)
    last = server.publish(1, 2)
    subscriptions = [subscribe() for _ in range(3)]
    assert all(same(each.wait_for(last, PATIENCE), last) for each in subscriptions)
    assert serialized == [2]


def test_what_cannot_be_sent_is_refused_by_whoever_publishes_it(server: Learner) -> None:
    with pytest.raises(WireError, match="holds arrays and branches"):
        server.publisher.publish(Version(1, 1), {"default": {"weight": "heavy"}})  # type: ignore[dict-item]


def test_weights_that_were_received_cannot_be_written_to(
    server: Learner, subscribe: Subscribe
) -> None:
    weights = subscribe().wait_for(server.publish(1, 0), PATIENCE)
    assert isinstance(weights.tree, dict)
    with pytest.raises(ValueError, match="read-only"):
        weights.tree["default"]["weight"].fill(0)


@pytest.mark.parametrize("version", [(2, 4), (2, 5), (1, 9), (0, 0)])
def test_only_a_newer_version_can_be_published(
    server: Learner, subscribe: Subscribe, version: tuple[int, int]
) -> None:
    newest = server.publish(2, 5)
    with pytest.raises(ValueError, match=re.escape(str(Version(*version)))):
        server.publish(*version)
    assert same(subscribe().wait_for(Version(0, 0), PATIENCE), newest)


def test_a_higher_generation_is_newer_whatever_its_update(
    server: Learner, subscribe: Subscribe
) -> None:
    subscription = subscribe()
    subscription.wait_for(server.publish(1, 9), PATIENCE)
    version = server.publish(2, 0)
    assert same(subscription.wait_for(version, PATIENCE), version)


def test_a_slow_reader_skips_to_the_newest_version(server: Learner) -> None:
    server.publish(1, 0, 3 * LARGE)
    reader = FrameReader(episodes_pb2.WeightsHeader)
    with dial(server.address) as channel:
        call = subscribe_by_hand(channel)
        assert reader.feed(next(call)) is None  # the rest of this version stays in the pipe
        for update in range(1, 4):
            server.publish(1, update, 3 * LARGE)
        assert [read_weights(call, reader), read_weights(call, reader)] == [(1, 0), (1, 3)]


def test_every_reader_sees_versions_in_order_and_the_last_one(server: Learner) -> None:
    last = Version(1, 300)
    seen: list[list[Version]] = [[], [], []]

    def collect(versions: list[Version]) -> None:
        reader = FrameReader(episodes_pb2.WeightsHeader)
        with dial(server.address) as channel:
            call = subscribe_by_hand(channel)
            while not versions or versions[-1] != last:
                versions.append(read_weights(call, reader))

    readers = [threading.Thread(target=collect, args=(versions,)) for versions in seen]
    for thread in readers:
        thread.start()
    for update in range(last.update + 1):
        server.publish(1, update, size=10_000)
    for thread in readers:
        thread.join(PATIENCE)
    for versions in seen:
        assert versions[-1] == last
        assert versions == sorted(set(versions))


# -- digests --------------------------------------------------------------------------------------


@pytest.fixture
def over_tcp() -> Iterator[OverTcp]:
    """Serves a handler on TCP and says where."""
    with ThreadPoolExecutor(8, thread_name_prefix="learner") as threads:
        server = grpc.server(threads, options=SERVER_OPTIONS)

        def serve(handler: grpc.GenericRpcHandler) -> str:
            server.add_generic_rpc_handlers((handler,))
            address = bind(server, "127.0.0.1:0")
            server.start()
            return address

        yield serve
        server.stop(grace=None).wait(PATIENCE)


def read_chunks(address: str, count: int) -> list[episodes_pb2.WeightsChunk]:
    with dial(address) as channel:
        call = subscribe_by_hand(channel)
        return [episodes_pb2.WeightsChunk.FromString(next(call)) for _ in range(count)]


def test_every_chunk_of_weights_over_tcp_carries_the_digest_of_its_payload(
    server: Learner, over_tcp: OverTcp
) -> None:
    address = over_tcp(server.publisher.handler())
    server.publish(1, 0, LARGE)  # before anybody who needs digests has come
    before = read_chunks(address, 4)
    server.publish(1, 1, LARGE)
    for chunk in before + read_chunks(address, 4):
        assert chunk.digest == xxhash.xxh3_64_intdigest(chunk.payload)


def test_weights_on_a_unix_socket_need_no_digests(server: Learner, subscribe: Subscribe) -> None:
    version = server.publish(1, 0, LARGE)
    assert not any(chunk.HasField("digest") for chunk in read_chunks(server.address, 4))
    assert same(subscribe().wait_for(version, PATIENCE), version, LARGE)


def test_subscribers_of_both_kinds_get_the_same_weights(
    server: Learner, subscribe: Subscribe, over_tcp: OverTcp
) -> None:
    address = over_tcp(server.publisher.handler())
    local = subscribe()
    local.wait_for(server.publish(1, 0), PATIENCE)
    remote = WeightsSubscription(address, METADATA, "envrunner-1", Limits())
    for update in range(1, 10):
        version = server.publish(1, update)
        for subscription in (local, remote):
            assert same(subscription.wait_for(version, PATIENCE), version)
    remote.close()


def test_weights_over_tcp_without_digests_are_refused(over_tcp: OverTcp) -> None:
    header = episodes_pb2.WeightsHeader(version=Version(1, 0).message())
    address = over_tcp(Scripted(list(encode_frame(header, weights_tree(Version(1, 0))))).handler())
    subscription = WeightsSubscription(address, METADATA, "envrunner-0", Limits())
    deadline = time.monotonic() + PATIENCE
    said = ""
    while "came without its digest" not in said:
        assert time.monotonic() < deadline, said
        with pytest.raises(TimeoutError) as timeout:
            subscription.wait_for(Version(0, 0), 0.05)
        said = str(timeout.value)
    assert subscription.newest is None
    subscription.close()
