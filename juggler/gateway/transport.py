"""The gateway's server: on gRPC's core where that works, else on grpcio's public API."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Protocol

import grpc

from juggler.gateway.gateway_stream import SERVICE, GatewayStream, Listener
from juggler.gateway.public_transport import PublicTransport
from juggler.runtime.actors.calls import TRIAL_SECONDS, public_was_asked_for, why_fails
from juggler.runtime.actors.temporary import HeldDirectory
from juggler.runtime.actors.tls import Tls


class Transport(Protocol):
    """A gRPC server for streams of simulators."""

    def start(self, listener: Listener, address: str, tls: Tls | None, insecure: bool) -> str:
        """Listen -> the address that was bound.

        Args:
            listener: acts on what simulators say, in threads of the transport.
            address: "host:port".
            tls: of this host; None: connections are plain.
            insecure: listen beyond loopback even without TLS or without a token.

        Raises:
            EndpointError: it cannot listen there.
        """

    def close(self) -> None:
        """Let messages that were sent arrive, for a moment, and end."""


def make_transport(token: str) -> Transport:
    """
    Args:
        token: that calls must show; "": none.
    """
    if public_was_asked_for() or why_slow():
        return PublicTransport(token)
    core: Transport = import_module("juggler.gateway.core_transport").CoreTransport(token)
    return core


def why_slow() -> str:
    """For people: why gateways of this process cannot use gRPC's core; "": they can, or are not
    meant to."""
    return "" if public_was_asked_for() else _why_core_fails()


@cache
def _why_core_fails() -> str:
    return why_fails(_try)


def _try() -> None:
    """Ask a gateway of this process for its `Info`."""
    core: Transport = import_module("juggler.gateway.core_transport").CoreTransport("")
    directory = HeldDirectory()
    try:
        address = core.start(_Trial(), f"unix:{directory.path}/gateway", None, False)
        with grpc.insecure_channel(address) as channel:
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes]
            ask = channel.unary_unary(f"/{SERVICE}/GetInfo")
            info = ask(b"", timeout=TRIAL_SECONDS)
            talk: grpc.StreamStreamMultiCallable[bytes, bytes]
            talk = channel.stream_stream(f"/{SERVICE}/Session")
            said = list(talk(iter([b"hello"]), timeout=TRIAL_SECONDS))
        if (info, said) != (b"info", [b"hello"]):
            raise RuntimeError(f"it answered {info!r} and {said!r}")
    finally:
        core.close()
        directory.remove()


class _Trial:
    """Says what it hears."""

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext()

    def came(self, stream: GatewayStream) -> None:
        pass

    def said(self, stream: GatewayStream, message: bytes) -> None:
        stream.send(message)

    def gone(self, stream: GatewayStream) -> None:
        pass

    def refused(self, peer: str, why: str) -> None:
        pass

    def info(self) -> bytes:
        return b"info"

    def turn(self) -> None:
        pass
