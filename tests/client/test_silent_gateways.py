"""A client whose gateway does not answer, or not as it wishes."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from support.gateway_world import THREE, TWO_WAYS, GatewayWorld, RawSimulator, eventually, hello

from juggler.client import GatewayError, Session, connect, connection
from juggler.runtime.wire.v1 import simulator_pb2 as pb


def test_a_missing_welcome_is_an_error_in_time() -> None:
    with GatewayWorld() as world, world._server.at_work():
        with pytest.raises(GatewayError, match="DEADLINE_EXCEEDED") as told:
            connect(world.address, THREE, TWO_WAYS, timeout=0.2)
        assert told.value.retryable


def test_a_goodbye_without_an_answer_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_GOODBYE_SECONDS", 0.1)
    with GatewayWorld(rows=1) as world:
        world.ask()
        session = world.connect()
        session.step(np.zeros(3))
        with world._server.at_work():
            session.close()


def test_a_refused_session_leaves_no_thread_behind() -> None:
    with GatewayWorld(refuses_logged="not here") as world:
        before = _clients_threads()
        for _ in range(5):
            with pytest.raises(GatewayError, match="not here"):
                world.connect(mode="logged")
        eventually(lambda: _clients_threads() <= before)


def test_a_session_that_cannot_begin_says_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    with GatewayWorld() as world:
        monkeypatch.setattr(Session, "pull", _fails)
        with pytest.raises(RuntimeError, match="no model"):
            world.connect(mode="local")
        eventually(lambda: world.count("sessions_begun") == 1 and world.count("sessions") == 0)


def _fails(_: object) -> None:
    raise RuntimeError("no model")


def test_a_call_of_any_bytes_is_one_of_no_method() -> None:
    with GatewayWorld(token="a secret") as world:
        assert b"grpc-status" in _answer_to(world.address, b"/juggler.\xff\xfe/X")
        assert world.failure is None
        with RawSimulator(world.address, "a secret") as simulator:
            simulator.send(hello=hello())
            assert isinstance(simulator.hear(), pb.ToSimulator)


def _answer_to(address: str, path: bytes) -> bytes:
    """Return the answer to a call that gRPC's clients do not make."""
    host, port = address.split(":")
    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"here",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    literal = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in headers.items()
    )
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
        raw.sendall(_frame(1, 4, 1, literal))
        heard = b""
        while b"grpc-status" not in heard and (more := raw.recv(4096)):
            heard += more
        return heard


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload).to_bytes(3, "big")
    return size + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _clients_threads() -> int:
    """Count threads, without the gateway's, which is in this process, too."""
    return sum(not thread.name.startswith("gateway") for thread in threading.enumerate())
