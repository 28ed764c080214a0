"""Where gateways listen."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

import pytest
from support.gateway_world import SPACES, AgentsWorld
from support.network import free_address

from juggler.client import connect_agents
from juggler.envrunner.config import EnvRunnerConfig


def free_port(behind: int) -> int:
    """A free port, with another free one N behind it."""
    while True:
        port = int(free_address().rpartition(":")[2])
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + behind)):
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


@pytest.mark.parametrize(("local", "end"), [(True, "-3"), (False, "")])
def test_a_gateway_takes_simulators_at_a_unix_socket(tmp_path: Path, local: bool, end: str) -> None:
    address = f"unix:{tmp_path}/gateway"
    EnvRunnerConfig(gateway=address)
    world = AgentsWorld(tmp_path, {"*": "all"}, address, local=local, worker_id="envrunner-3")
    with connect_agents(f"{address}{end}", {"one": SPACES}, token="secret"):
        assert stat.S_IMODE(os.stat(f"{tmp_path}/gateway{end}").st_mode) == 0o600
    world.close()


def test_gateways_that_a_driver_starts_listen_at_ports_that_follow_each_other(
    tmp_path: Path,
) -> None:
    port = free_port(3)
    world = AgentsWorld(tmp_path, {"*": "all"}, f"127.0.0.1:{port}", worker_id="envrunner-3")
    world.close()
    assert world.address == f"127.0.0.1:{port + 3}"
