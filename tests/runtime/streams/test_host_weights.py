"""Weights that one reader of a host relays to the others."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from support.sharing import lies_in_shared_memory, mapped, open_memories
from support.weights_learner import (
    CONTINUE,
    PATIENCE,
    SIZE,
    STOP,
    Join,
    Learner,
    ReaderProcess,
    Seen,
    names_of,
    readers_stay,
    relaying,
    same,
    weights_tree,
)

from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.host_weights import Meeting, RelayConnection, WeightsRelay
from juggler.runtime.streams.memory_socket import connect, memory_path
from juggler.runtime.streams.shared_memory import FrozenFrame
from juggler.runtime.streams.weights_stream import WeightsSubscription
from juggler.runtime.wire.frames import Frame, encode_frame
from juggler.runtime.wire.v1 import episodes_pb2

pytestmark = pytest.mark.usefixtures("everything_is_large")

# -- one reads for all ----------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_a_learner_sends_weights_once_to_a_host(
    server: Learner, join: Join, publish: Callable[..., Version], over: str
) -> None:
    address = server.tcp_address if over == "tcp" else server.address
    readers = [join(address) for _ in range(5)]
    publish(*readers)
    readers_stay(server, 1)
    assert len(relaying(readers)) == 1
    for _ in range(5):
        publish(*readers)
    readers_stay(server, 1)
    late = join(address)
    publish(*readers, late)
    readers_stay(server, 1)  # one that comes later reads from the others too
    while len(mapped()) > 1:  # all of them map one memory, once they have released the one before
        publish(*readers, late)


def test_a_slow_reader_gets_the_newest_version_and_none_in_between(meeting: Meeting) -> None:
    relay = meeting.find(may_relay=True)
    assert isinstance(relay, WeightsRelay)
    slow = meeting.find(may_relay=True)
    assert isinstance(slow, RelayConnection)
    try:
        for number in range(1, 30):
            version = Version(1, number)
            header = episodes_pb2.WeightsHeader(version=version.message())
            tree = weights_tree(version, SIZE)
            relay.offer(Frame(header, tree), next(encode_frame(header, tree)), None)
        assert not open_memories(), "no reader has asked"
        chunk = slow.next_chunk()
        assert chunk is not None
        assert Version(1, 29).message().SerializeToString() in chunk
        assert open_memories() == 2, "the relay's, and the one that is mapped"
    finally:
        slow.close()
        relay.close()


def test_a_reader_that_asked_and_left_is_sent_nothing(meeting: Meeting) -> None:
    relay = meeting.find(may_relay=True)
    assert isinstance(relay, WeightsRelay)
    left = connect(memory_path(meeting.address(0)), meeting.token, PATIENCE)
    left.send(b"?")
    others = [meeting.find(may_relay=True)]  # the relay has read the request, and then the end
    left.close()
    others.append(meeting.find(may_relay=True))
    version = Version(1, 1)
    header, tree = episodes_pb2.WeightsHeader(version=version.message()), weights_tree(version, 1)
    assert relay.offer(Frame(header, tree), next(encode_frame(header, tree)), None) == ""
    for each in others:
        assert isinstance(each, RelayConnection)
        each.close()
    relay.close()


# -- the relay leaves, or hangs -------------------------------------------------------------------


class Host:
    """A host with readers in processes of their own."""

    def __init__(self, learner: Learner, readers: int, secret: str) -> None:
        self.learner = learner
        self.readers = [ReaderProcess(learner.tcp_address, secret) for _ in range(readers)]
        self._numbers = count(1)

    def publish(self, readers: list[ReaderProcess] | None = None) -> dict[ReaderProcess, Seen]:
        """Publish the next version; what each reader has then."""
        version = self.learner.publish(1, next(self._numbers), SIZE)
        seen = {each: each.see(version) for each in readers or self.readers}
        for each in seen.values():
            assert each.version == version
            assert each.value == 1000 * version.generation + version.update
        return seen

    def relay(self) -> ReaderProcess:
        """The relay, when all others have left the learner."""
        self.publish()
        readers_stay(self.learner, 1)
        seen = self.publish()
        (found,) = [each for each in self.readers if seen[each].relays]
        assert all(seen[each].follows for each in self.readers if each is not found)
        return found

    def close(self) -> None:
        for each in self.readers:
            each.kill()


@pytest.fixture
def host(server: Learner) -> Iterator[Host]:
    secret = secrets.token_hex()
    made = Host(server, 4, secret)
    yield made
    made.close()
    assert not names_of(Meeting(secret)), "the kernel frees names of killed processes"


@pytest.mark.slow
def test_readers_do_without_those_that_relayed_and_were_killed_or_hang(host: Host) -> None:
    killed = host.relay()
    killed.kill()
    host.readers.remove(killed)
    host.publish()
    hanging = host.relay()
    hanging.signal(STOP)
    others = [each for each in host.readers if each is not hanging]
    seen = host.publish(others)  # within the patience of `see`
    assert sorted(each.relays for each in seen.values()) == [False, True]
    hanging.signal(CONTINUE)
    for each in host.publish().values():
        assert each.notes == []


def test_readers_leave_for_another_when_who_relays_leaves_in_order(
    server: Learner, join: Join, publish: Callable[..., Version]
) -> None:
    readers = [join(server.tcp_address) for _ in range(4)]
    for _ in range(3):
        publish(*readers)
        readers_stay(server, 1)
        (relay,) = relaying(readers)
        relay.close()
        readers.remove(relay)
        publish(*readers)


def test_versions_do_not_go_back_when_another_relays(
    server: Learner, join: Join, publish: Callable[..., Version]
) -> None:
    readers = [join() for _ in range(3)]
    version = publish(*readers)
    readers_stay(server, 1)
    server.stop()
    server.start()  # it offers nothing yet
    relay = relaying(readers)[0]
    relay.close()
    readers.remove(relay)
    server.changes.wait_for(lambda: relaying(readers), "no other one relays")
    for each in readers:
        assert each.newest is not None
        assert same(each.newest, version, SIZE)
    publish(*readers)


# Weights in memory that all EnvRunners of a host read.


Subscribe = Callable[..., WeightsSubscription]


def test_versions_that_nobody_has_are_let_go(
    publish: Callable[..., Version], subscribe: Subscribe
) -> None:
    reader = subscribe()

    # A mapping alone may be of a reader that only tries whether memory can be shared.
    def newest_is_shared() -> bool:
        publish(reader)
        assert reader.newest is not None
        return lies_in_shared_memory(reader.newest.tree["default"]["weight"])

    while not newest_is_shared():
        pass
    kept, version = reader.newest, publish(reader)
    first = version.update - 1
    for _ in range(60):
        publish(reader)
    assert kept is not None
    assert same(kept, Version(1, first), SIZE)
    while len(mapped()) > 2:  # the kept one and the newest
        publish(reader)
    del kept
    while len(mapped()) > 1 or open_memories() > 2:  # the newest alone
        publish(reader)


def test_a_reader_that_keeps_all_versions_gets_bytes_in_the_end(
    publish: Callable[..., Version], subscribe: Subscribe
) -> None:
    reader, other = subscribe(), subscribe()
    while not (publish(reader, other) and mapped()):
        pass
    kept: list[Any] = []
    for _ in range(40):
        version = publish(reader, other)
        kept.append((version, reader.newest))
    for version, weights in kept:
        assert same(weights, version, SIZE)
    assert len(mapped()) <= 17, "those in sixteen slots, and the other reader's"


def test_nobody_can_change_weights_that_are_shared() -> None:
    with_weights = FrozenFrame(episodes_pb2.WeightsHeader(), weights_tree(Version(1, 1), SIZE))
    memory = with_weights.memory
    with pytest.raises(OSError, match=r"[Nn]ot permitted"):
        os.pwrite(memory._descriptor, b"x", 0)
    with pytest.raises(OSError, match=r"[Nn]ot permitted"):
        os.ftruncate(memory._descriptor, 0)


def test_a_learner_without_memory_left_sends_bytes_and_its_readers_say_so(
    publish: Callable[..., Version],
    subscribe: Subscribe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    reader = subscribe(inline=said.append)
    while not (publish(reader) and mapped()):
        pass

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(5):
        version = publish(reader)
    assert reader.newest is not None
    assert same(reader.newest, version, SIZE)
    assert len(said) == 1
    assert "shares no more memory" in said[0]
