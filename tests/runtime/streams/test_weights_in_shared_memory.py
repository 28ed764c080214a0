"""Weights in memory that all EnvRunners of a host read."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from support.sharing import mapped, open_memories, soon
from support.weights_learner import METADATA, PATIENCE, Learner, same, weights_tree

from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.memory_sockets import memory_path
from juggler.runtime.streams.memory_writer import FrozenFrame, Writer
from juggler.runtime.streams.weights import WeightsSubscription
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.v1 import episodes_pb2

pytestmark = pytest.mark.usefixtures("everything_is_large")

Subscribe = Callable[..., WeightsSubscription]
SIZE = 50_000  # elements of float32


@pytest.fixture
def publish(server: Learner) -> Iterator[Callable[..., Version]]:
    numbers = count(1)

    def publish(*subscriptions: WeightsSubscription) -> Version:
        """Publish the next version, and wait until it is everywhere."""
        version = server.publish(1, next(numbers), SIZE)
        for each in subscriptions:
            each.wait_for(version, PATIENCE)
        return version

    return publish


@pytest.mark.usefixtures("grpc_api")
def test_readers_of_one_host_have_one_copy(
    publish: Callable[..., Version], subscribe: Subscribe
) -> None:
    readers = [subscribe() for _ in range(5)]
    soon(lambda: publish(*readers) and mapped(), "they share memory")
    for _ in range(3):
        version = publish(*readers)
    held = [reader.newest for reader in readers]
    for each in held:
        assert each is not None
        assert same(each, version, SIZE)
        assert isinstance(each.tree, dict)
        assert not each.tree["default"]["weight"].flags.writeable
    soon(lambda: len(mapped()) == 1, "all five have mapped the same memory, and no other")


def test_versions_that_nobody_has_are_let_go(
    publish: Callable[..., Version], subscribe: Subscribe
) -> None:
    reader = subscribe()
    soon(lambda: publish(reader) and mapped(), "they share memory")
    kept, version = reader.newest, publish(reader)
    first = version.update - 1
    for _ in range(60):
        publish(reader)
    assert kept is not None
    assert same(kept, Version(1, first), SIZE)
    soon(lambda: len(mapped()) == 2, "the kept one and the newest")
    del kept
    soon(lambda: len(mapped()) == 1 and open_memories() <= 2, "the newest alone")


def test_a_reader_that_keeps_all_versions_gets_bytes_in_the_end(
    publish: Callable[..., Version], subscribe: Subscribe
) -> None:
    reader, other = subscribe(), subscribe()
    soon(lambda: publish(reader, other) and mapped(), "they share memory")
    kept: list[Any] = []
    for _ in range(40):
        version = publish(reader, other)
        kept.append((version, reader.newest))
    for version, weights in kept:
        assert same(weights, version, SIZE)
    assert len(mapped()) <= 17, "those in sixteen slots, and the other reader's"


def test_nobody_can_change_weights_that_are_shared() -> None:
    with_weights = FrozenFrame(episodes_pb2.WeightsHeader(), weights_tree(Version(1, 1), SIZE))
    memory = with_weights._memory
    assert memory is not None
    with pytest.raises(OSError, match=r"[Nn]ot permitted"):
        os.pwrite(memory._descriptor, b"x", 0)
    with pytest.raises(OSError, match=r"[Nn]ot permitted"):
        os.ftruncate(memory._descriptor, 0)


def test_readers_over_tcp_and_on_the_host_get_the_same(
    publish: Callable[..., Version], subscribe: Subscribe, server: Learner
) -> None:
    here = subscribe()
    remote = WeightsSubscription(server.tcp_address, METADATA, "envrunner-1", Limits())
    try:
        soon(lambda: publish(here, remote) and mapped(), "one shares memory")
        for _ in range(3):
            version = publish(here, remote)
            for reader in (here, remote):
                assert reader.newest is not None
                assert same(reader.newest, version, SIZE)
    finally:
        remote.close()


def test_without_the_socket_weights_go_inline_and_that_is_said_once(
    publish: Callable[..., Version], subscribe: Subscribe, server: Learner
) -> None:
    os.unlink(memory_path(server.address))
    said: list[str] = []
    reader = subscribe(inline=said.append)
    for _ in range(5):
        version = publish(reader)
    assert reader.newest is not None
    assert same(reader.newest, version, SIZE)
    assert len(said) == 1
    assert "No such file" in said[0]
    assert not mapped()


def test_a_learner_without_memory_left_sends_bytes_and_its_readers_say_so(
    publish: Callable[..., Version], subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    reader = subscribe(inline=said.append)
    soon(lambda: publish(reader) and mapped(), "they share memory")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(5):
        version = publish(reader)
    assert reader.newest is not None
    assert same(reader.newest, version, SIZE)
    assert len(said) == 1
    assert "shares nothing more" in said[0]


def test_a_learner_whose_python_has_no_memfds_sends_bytes_and_its_readers_say_so(
    publish: Callable[..., Version], subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    said: list[str] = []
    reader = subscribe(inline=said.append)
    for _ in range(5):
        version = publish(reader)
    assert reader.newest is not None
    assert same(reader.newest, version, SIZE)
    assert len(said) == 1
    assert "shares nothing more" in said[0]


def test_weights_outlive_their_learner(
    publish: Callable[..., Version], subscribe: Subscribe, server: Learner
) -> None:
    reader = subscribe()
    soon(lambda: publish(reader) and mapped(), "they share memory")
    version = publish(reader)
    server.stop()
    server.start()
    assert reader.newest is not None
    assert same(reader.newest, version, SIZE)
    version = server.publish(2, 1, SIZE)
    np.testing.assert_equal(reader.wait_for(version, PATIENCE).tree, weights_tree(version, SIZE))


def test_a_reader_that_takes_no_descriptor_holds_few_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that are in its slots, and no more."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        writer = Writer(ours)
        monkeypatch.setattr(writer, "_proved", True)
        lent = 0
        for number in range(100):
            frame = FrozenFrame(episodes_pb2.WeightsHeader(), weights_tree(Version(1, number)))
            lent += frame.chunk(writer) is not None
        assert 0 < lent <= 16
        writer.close()
