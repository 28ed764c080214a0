"""Learners in a ring, each with a server of its own, in threads of this process."""

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

from juggler.learner.group.ring_peers import RingAccess, RingPeers, RingServer
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.credentials import call_metadata, why_refused
from juggler.runtime.actors.endpoints import bind, make_server
from juggler.runtime.actors.tls import Tls, read_tls
from support.groups import at_once, never

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
            stack.callback(lambda server=server: server.stop(None).wait(10))  # type: ignore[misc]
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
        those: who meet.
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
        heard: what went there.
    """

    def __init__(self) -> None:
        self.heard = bytearray()
        self._listeners: list[socket.socket] = []

    def on(self, address: str) -> str:
        """Where to dial in place of an address."""
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
                    self.heard += said
                other.sendall(said)
        except OSError:
            pass
        for each in (one, other):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()
