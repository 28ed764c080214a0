"""Learners that sum over encrypted streams, each to the next one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.fake_streams import PATIENCE
from support.learner_groups import at_once, join, never
from support.learner_groups import meet as meet_by_gloo

from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.group import ring_peers
from juggler.learner.group.peers import PeerLost
from juggler.learner.group.ring_peers import (
    PIECE_BYTES,
    RING_METADATA,
    RING_METHOD,
    RingAccess,
    RingInbox,
    RingPeers,
    RingServer,
)
from juggler.learner.learner import Learner
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.credentials import call_metadata, why_refused
from juggler.runtime.actors.endpoints import bind, dial, make_server
from juggler.runtime.actors.tls import Tls, read_tls
from juggler.runtime.episodes.batch import EpisodeBatch

_GENERATIONS = count(1)


def certificates(directory: Path, *hosts: str) -> Tls:
    make_certificates(directory, list(hosts) or ["127.0.0.1"], 1)
    tls = read_tls(str(directory))
    assert tls is not None
    return tls


@dataclass
class Member:
    """A learner's server.

    Attributes:
        access: what its peers are made of.
        server: of gRPC.
    """

    access: RingAccess
    server: grpc.Server


@contextmanager
def members(size: int, tls: Tls | None, host: str = "127.0.0.1") -> Iterator[list[Member]]:
    """Learners that listen, by rank."""
    with ExitStack() as stack:
        made = []
        for _ in range(size):
            ring = RingServer(lambda metadata: why_refused(metadata, "secret", "run"))
            server = make_server(8)
            server.add_generic_rpc_handlers((ring.handler(),))
            address = bind(server, f"{host}:0", token="secret", tls=tls)
            server.start()
            stack.callback(lambda server=server: server.stop(None).wait(60))  # type: ignore[misc]
            metadata = call_metadata("secret", "run", "incarnation")
            made.append(Member(RingAccess(ring, address, metadata, tls), server))
        yield made


def meet(
    those: list[Member],
    through: Callable[[str], str] = lambda address: address,
    superseded: Callable[[], bool] = never,
) -> list[RingPeers]:
    """Peers by rank.

    Args:
        those: the learners that meet.
        through: where to dial instead of an address.
        superseded: as for the peers.
    """
    name = f"default/{next(_GENERATIONS)}"
    addresses = [through(each.access.address) for each in those]
    return at_once(
        [
            lambda rank=rank, each=each: RingPeers(each.access, name, rank, addresses, superseded)  # type: ignore[misc]
            for rank, each in enumerate(those)
        ]
    )


def with_metadata(member: Member, token: str) -> Member:
    """The same learner, which shows another token."""
    shown = call_metadata(token, "run", "incarnation")
    return replace(member, access=replace(member.access, metadata=shown))


class Tap:
    """Passes on what goes to a server, and keeps it.

    Attributes:
        received: what went there.
    """

    def __init__(self) -> None:
        self.received = bytearray()
        self._listeners: list[socket.socket] = []

    def on(self, address: str) -> str:
        """Where to dial instead of an address."""
        host, _, port = address.rpartition(":")
        listener = socket.create_server((host, 0))
        self._listeners.append(listener)
        arguments = (listener, (host, int(port)))
        threading.Thread(target=self._accept, args=arguments, daemon=True).start()
        return f"{host}:{listener.getsockname()[1]}"

    def close(self) -> None:
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _accept(self, listener: socket.socket, address: Any) -> None:
        while True:
            try:
                dialled, _ = listener.accept()
            except OSError:
                return
            served = socket.create_connection(address)
            for one, other, keep in ((dialled, served, True), (served, dialled, False)):
                arguments = (one, other, keep)
                threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket, keep: bool) -> None:
        try:
            while said := one.recv(1 << 16):
                if keep:
                    self.received += said
                other.sendall(said)
        except OSError:
            pass
        for each in (one, other):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certificates(tmp_path_factory.mktemp("tls"))


def sums(group: list[RingPeers], given: list[torch.Tensor]) -> list[torch.Tensor]:
    pairs = zip(group, given, strict=True)
    return at_once([lambda p=p, x=x: p.sum(x) for p, x in pairs])  # type: ignore[misc]


def closed(group: list[RingPeers]) -> None:
    at_once([peers.close for peers in group])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_gathers_and_broadcasts_reach_everybody(tls: Tls, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    with members(size, tls) as those:
        group = meet(those)
        for shape in [(1,), (size - 1,), (3, 7), (size * PIECE_BYTES // 4 * 2 + 5,)]:
            for dtype in (torch.float32, torch.float64, torch.int64):
                given = [
                    (torch.randn(shape, generator=generator) * 100).to(dtype) for _ in range(size)
                ]
                expected = torch.stack(given).double().sum(0)
                found = sums(group, given)
                for each in found:
                    assert torch.equal(each, found[0]), "the same bits at all of them"
                    assert each.shape == shape
                np.testing.assert_allclose(found[0].double(), expected, rtol=1e-4, atol=1e-3)
        tables = at_once([lambda p=p: p.gather([p.rank, -(2**63)]) for p in group])  # type: ignore[misc]
        assert tables == [[[rank, -(2**63)] for rank in range(size)]] * size
        news = bytes(np.random.default_rng(0).bytes(PIECE_BYTES + 3))
        for root in range(size):
            data = at_once(
                [
                    lambda p=p, root=root: [  # type: ignore[misc]
                        *p.broadcast(root, iter([news, b"more"] if p.rank == root else []))
                    ]
                    for p in group
                ]
            )
            assert data == [[news, b"more"]] * size
        closed(group)


def test_updates_are_those_of_a_group_over_torch(
    tls: Tls, make_batch: Callable[..., EpisodeBatch]
) -> None:
    def learner() -> Learner:
        space = spaces.Box(-10, 10, (4,), np.float32)
        return build_learner(PpoConfig(), None, space, spaces.Discrete(2), {"hidden_sizes": [8]})

    plain, secure = [learner() for _ in range(2)], [learner() for _ in range(2)]
    with members(2, tls) as those:
        hashes = join(plain, meet_by_gloo)
        pairs = zip(secure, meet(those), strict=True)
        assert hashes == at_once([lambda x=x, p=p: x.join(p) for x, p in pairs])  # type: ignore[misc]
        for update in range(3):
            batches = [make_batch(4, 8, seed=10 * update + rank) for rank in range(2)]
            for group in (plain, secure):
                each = zip(group, batches, strict=True)
                at_once([lambda x=x, b=b: x.update_from_episodes([b]) for x, b in each])  # type: ignore[misc]
        states = [x.state["parameters"] for x in (*plain, *secure)]
        for state in states:
            assert torch.equal(state, states[0]), "two addends have one sum"
        at_once([x.leave for x in secure])


def test_what_goes_over_the_network_is_not_to_be_read(tls: Tls) -> None:
    secret = torch.full((100_000,), 12345.678)
    words = secret[:16].numpy().tobytes()
    for security, readable in ((None, True), (tls, False)):
        tap = Tap()
        with members(2, security) as those:
            group = meet(those, tap.on)
            sums(group, [secret.clone(), torch.zeros_like(secret)])
            closed(group)
        tap.close()
        assert len(tap.received) > secret.nbytes
        assert (words in tap.received) is readable
        assert b"Bearer secret" not in tap.received or readable


def test_a_learner_of_another_authority_is_told_so(tls: Tls, tmp_path: Path) -> None:
    other = certificates(tmp_path)
    with (
        members(1, tls) as first,
        members(1, other) as second,
        pytest.raises(PeerLost, match="this host does not accept the"),
    ):
        meet([*first, *second])


def test_a_learner_without_the_token_is_told_so(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    with members(2, tls) as (first, second):
        group = meet([with_metadata(first, "guessed"), second])
        with pytest.raises(PeerLost, match="the token is missing or wrong"):
            group[0].sum(torch.ones(3))
        monkeypatch.setattr(ring_peers, "COLLECTIVE_SECONDS", 0.2)
        with pytest.raises(PeerLost):
            group[1].sum(torch.ones(3))
        closed(group)


def test_who_loses_a_peer_notices_at_once(tls: Tls) -> None:
    with members(3, tls) as those:
        group = meet(those)
        sums(group, [torch.ones(3)] * 3)
        group[1].close()
        those[1].server.stop(None)
        for peers in (group[0], group[2]):
            with pytest.raises(PeerLost, match=r"left|ended the stream"):
                peers.sum(torch.ones(3))
        closed([group[0], group[2]])


def test_one_that_says_nothing_is_not_waited_for_long(
    tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    with members(2, tls) as those:
        group = meet(those)
        monkeypatch.setattr(ring_peers, "COLLECTIVE_SECONDS", 0.3)
        with pytest.raises(PeerLost, match="nothing arrived within"):
            group[0].sum(torch.ones(3))
        closed(group)


def test_nobody_waits_once_there_is_another_group_to_form(tls: Tls) -> None:
    over: list[bool] = []
    with members(2, tls) as those:
        group = meet(those, superseded=lambda: bool(over))
        over.append(True)
        with pytest.raises(PeerLost, match="there is another group to form"):
            group[0].sum(torch.ones(3))
        closed(group)


def test_a_peer_that_sends_something_else_is_lost(tls: Tls) -> None:
    with members(2, tls) as those:
        group = meet(those)
        group[1]._unsent.put(b"12345")
        with pytest.raises(PeerLost, match="sent 5 bytes, not 8"):
            group[0].sum(torch.ones(4))
        closed(group)


def test_messages_from_before_the_end_of_a_stream_are_read() -> None:
    inbox = RingInbox()
    assert inbox.put(b"1")
    assert inbox.put(b"2")
    inbox.end()
    assert not inbox.put(b"3")
    assert [inbox.get(str), inbox.get(str)] == [b"1", b"2"]
    with pytest.raises(PeerLost, match="has left"):
        inbox.get(str)


def test_a_stream_whose_messages_nobody_takes_holds_few_of_them(tls: Tls) -> None:
    with members(1, tls) as (one,):
        inbox = one.access.server.expect(b"default/1/0")
        channel = dial(one.access.address, tls)
        sent = 0

        def messages() -> Any:
            nonlocal sent
            for _ in range(100):
                sent += 1
                yield bytes(PIECE_BYTES)

        metadata = (*one.access.metadata, (RING_METADATA, b"default/1/0"))
        call = channel.stream_stream(RING_METHOD)(messages(), metadata=metadata)
        waiting = inbox._messages
        with waiting.not_empty:
            full = lambda: waiting._qsize() == ring_peers._MAX_WAITING  # noqa: E731
            assert waiting.not_empty.wait_for(full, PATIENCE)
        again = channel.stream_stream(RING_METHOD)(iter([b""]), metadata=metadata)
        with pytest.raises(grpc.RpcError, match="does not form this group"):
            list(again)
        assert waiting.qsize() == ring_peers._MAX_WAITING
        assert sent < 50, "the others wait at their sender"
        one.access.server.forget(b"default/1/0")
        assert list(call) == []
        channel.close()


def test_a_stream_of_a_group_that_nobody_forms_is_ended(
    tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_peers, "COLLECTIVE_SECONDS", 0.2)
    with members(1, tls) as (one,):
        addresses = [one.access.address] * 2
        peers = RingPeers(one.access, "default/9", 0, addresses, never)
        with pytest.raises(PeerLost, match=r"does not form this group|nothing arrived"):
            peers.sum(torch.ones(2))
        peers.close()
        assert not one.access.server._inboxes
