"""Where gateways listen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.agents_world import AgentsWorld

from juggler.gateway import runner


@pytest.fixture(autouse=True)
def _nobody_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "step_back", lambda: None)  # all later tests would, too


def free_port(behind: int) -> int:
    """A port that is free, as is the one so many behind it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.socket() as other:
            port: int = one.getsockname()[1]
            try:
                other.bind(("127.0.0.1", port + behind))
            except (OSError, OverflowError):
                continue
            return port


def test_a_gateway_that_dials_in_listens_at_exactly_the_port_that_it_was_given(
    tmp_path: Path,
) -> None:
    port = free_port(3)
    world = AgentsWorld(
        tmp_path, {"*": "all"}, f"127.0.0.1:{port}", local=False, worker_id="envrunner-3"
    )
    world.close()
    assert world.address == f"127.0.0.1:{port}"


def test_gateways_that_a_driver_starts_listen_at_ports_that_follow_each_other(
    tmp_path: Path,
) -> None:
    port = free_port(3)
    world = AgentsWorld(tmp_path, {"*": "all"}, f"127.0.0.1:{port}", worker_id="envrunner-3")
    world.close()
    assert world.address == f"127.0.0.1:{port + 3}"
