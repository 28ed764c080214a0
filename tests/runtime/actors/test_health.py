"""A process is alive while it runs, and ready on request."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.changes import SkippedTime
from support.hub_world import World

from juggler.runtime.actors import health as health_module
from juggler.runtime.actors.endpoints import bind, make_server
from juggler.runtime.actors.health import READINESS, Health, check_health

_SECONDS = 5.0


@pytest.fixture
def health(tmp_path: Path) -> Iterator[tuple[Health, str]]:
    """A process's health, and where it is told."""
    address = f"unix:{tmp_path / 'h'}"
    made, server = Health(), make_server(4)
    bind(server, address)
    made.add_to(server, "juggler.v1.Episodes")
    server.start()
    yield made, address
    server.stop(grace=0).wait()


def _says(address: str, service: str) -> str:
    return check_health(address, service, None, _SECONDS)


def test_a_process_lives_before_it_is_ready_and_after(health: tuple[Health, str]) -> None:
    process, address = health
    for ready in (False, True, False):
        process.ready(ready)
        assert _says(address, "") == ""
        for service in (READINESS, "juggler.v1.Episodes"):
            assert _says(address, service) == ("" if ready else "it is not ready")


def test_a_service_that_is_not_there_is_named(health: tuple[Health, str]) -> None:
    assert _says(health[1], "juggler.v1.Nothing") == "it has no service 'juggler.v1.Nothing'"


class _Crowded(Health):
    """Ends N calls before it answers one."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def _answer(
        self, requests: Iterator[bytes], context: grpc.ServicerContext, watches: bool
    ) -> Iterator[bytes]:
        self.left -= 1
        if self.left >= 0:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "over 64 other calls ask")
        yield from super()._answer(requests, context, watches)


@pytest.mark.parametrize(
    ("calls", "said"), [(2, ""), (10_000, "no answer: over 64 other calls ask")]
)
def test_who_is_crowded_out_asks_again_until_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, said: str
) -> None:
    monkeypatch.setattr(health_module, "time", SkippedTime())
    monkeypatch.setattr(health_module, "_PAUSE_SECONDS", 10.0)  # which the last call has, too
    process, server, address = _Crowded(calls), make_server(4), f"unix:{tmp_path / 'h'}"
    bind(server, address)
    process.add_to(server)
    server.start()
    try:
        assert check_health(address, "", None, 60.0) == said
        assert process.left < calls - 1, "it was asked more than once"
    finally:
        server.stop(grace=0).wait()


def test_a_hub_says_whether_it_takes_workers(world: World) -> None:
    health = Health()
    service = SimpleNamespace(add_to=lambda server: health.add_to(server, "juggler.v1.Driver"))
    world.start(services=(service,))
    assert _says(world.address, "") == ""
    for ready in (False, True, False):
        health.ready(ready)
        for service in (READINESS, "juggler.v1.Driver"):
            assert _says(world.address, service) == ("" if ready else "it is not ready")


def test_a_probe_of_more_than_a_services_name_is_refused_before_it_is_there() -> None:
    process = Health()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process.serve(address)
    try:
        assert _says(address, "") == ""
        request = health_pb2.HealthCheckRequest(service="x" * 8189)
        with (
            grpc.insecure_channel(address) as channel,
            pytest.raises(grpc.RpcError, match=r"larger than max \(8192 vs\. 4096\)"),
        ):
            health_pb2_grpc.HealthStub(channel).Check(request, timeout=_SECONDS)
    finally:
        process.close()
