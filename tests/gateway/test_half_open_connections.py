"""Half-open connections: nothing comes through, and nothing closes them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.gateway_world import THREE, TWO_WAYS, GatewayWorld
from support.network import Network

from juggler.client import connect, connection
from juggler.gateway import transport

#: Found within three seconds, instead of half a minute.
_SOON = {
    "grpc.keepalive_time_ms": 500,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.ping_timeout_ms": 2000,
}
_FREQUENT = {"grpc.http2.min_ping_interval_without_data_ms": 100}


@pytest.fixture(autouse=True)
def found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    served = {**dict(transport.OPTIONS), **_SOON, **_FREQUENT}
    monkeypatch.setattr(transport, "OPTIONS", list(served.items()))
    dialed = {**dict(connection._OPTIONS), **_SOON}
    monkeypatch.setattr(connection, "_OPTIONS", list(dialed.items()))


@pytest.mark.slow  # until the clocks of gRPC find out
def test_who_comes_back_in_time_goes_on_where_it_was() -> None:
    with Network() as network, GatewayWorld(rows=1, steps=100, resume_seconds=20) as world:
        world.ask()
        session = connect(network.link(world.address), THREE, TWO_WAYS)
        session.step(np.zeros(3))
        session.step(np.zeros(3), 1.0)
        network.cut()
        actions: list[Any] = []
        thread = threading.Thread(
            target=lambda: actions.append(session.step(np.ones(3), 2.0)), name="simulator"
        )
        thread.start()
        (there,) = world._server.manager.sessions.by_id.values()
        world.changes.wait_for(lambda: there.stream is None)  # the gateway has found out
        assert not actions
        network.heal()
        thread.join(30)
        assert actions
        session.step(np.ones(3), 3.0)
        assert world.count("sessions_resumed") >= 1
        assert world.count("sessions_lost") == 0
        assert world.count("steps") == 3, "what was sent again is not counted again"
        session.close()
