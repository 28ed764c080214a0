"""TLS and a token at a gateway: admissions and errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.changes import SkippedTime
from support.gateway_world import THREE, TWO_WAYS, GatewayWorld, hello

from juggler.client import GatewayError, connect, connection
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.tls import read_tls
from juggler.runtime.wire.v1 import simulator_pb2 as pb

TOKEN = "a secret"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("others"))


@pytest.fixture(scope="module")
def address(ours: Path) -> Iterator[str]:
    with GatewayWorld(rows=1, token=TOKEN, tls=read_tls(str(ours))) as world:
        world.ask(100)
        yield world.address


def certificates(directory: Path) -> Path:
    make_certificates(directory, (), 1.0)
    return directory


@pytest.fixture(autouse=True)
def few_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "time", SkippedTime())
    monkeypatch.setattr(connection, "_RETRY_SECONDS", 20.0)


def dial(address: str, **options: Any) -> Any:
    return connect(address, THREE, TWO_WAYS, timeout=60.0, **options)


def test_certificate_and_token_of_the_run_get_in(address: str, ours: Path) -> None:
    with dial(address, tls=str(ours), token=TOKEN) as session:
        assert session.step(np.zeros(3)) in (0, 1)


@pytest.mark.parametrize("token", ["", "a guess"])
def test_another_token_or_none_is_refused_although_the_certificate_is_right(
    address: str, ours: Path, token: str
) -> None:
    with pytest.raises(GatewayError, match="UNAUTHENTICATED"):
        dial(address, tls=str(ours), token=token)


def test_a_gateway_of_another_authority_is_not_believed(address: str, others: Path) -> None:
    with pytest.raises(GatewayError, match="UNAVAILABLE"):
        dial(address, tls=str(others), token=TOKEN)


def test_a_certificate_of_another_authority_does_not_get_in(
    address: str, ours: Path, others: Path, tmp_path: Path
) -> None:
    """Although it knows whom to believe, and the token."""
    for name, source in (("ca", ours), ("cert", others), ("key", others)):
        shutil.copy(source / f"{name}.pem", tmp_path)
    with pytest.raises(GatewayError, match="UNAVAILABLE"):
        dial(address, tls=str(tmp_path), token=TOKEN)


def test_who_shows_no_certificate_does_not_get_in(address: str, ours: Path) -> None:
    credentials = grpc.ssl_channel_credentials((ours / "ca.pem").read_bytes())
    with grpc.secure_channel(address, credentials) as channel:
        talk = channel.stream_stream("/juggler.simulator.v1.Simulator/Session")
        said = pb.FromSimulator(hello=hello()).SerializeToString()
        call = talk(iter([said]), metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=60)
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_who_comes_without_tls_is_told_to_look_at_that(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUGGLER_TLS", raising=False)
    with pytest.raises(GatewayError, match="UNAVAILABLE"):
        dial(address, token=TOKEN)
