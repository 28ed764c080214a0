from __future__ import annotations

import os
import socket
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from juggler.runtime.actors.attachment import describe
from juggler.runtime.actors.endpoints import (
    EndpointError,
    bind,
    is_loopback,
    make_server,
    split_address,
)
from juggler.runtime.wire.v1.attach_pb2 import Failure


def test_a_port_in_use_is_named_and_not_shared() -> None:
    first, second = make_server(2), make_server(2)
    address = bind(first, "127.0.0.1:0")
    with pytest.raises(EndpointError, match=f"cannot listen on {address}: Address already in use"):
        bind(second, address)


@pytest.mark.parametrize("text", ["", "5005", "host", "host:", "host:x", ":5005", "host:70000"])
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(EndpointError, match="expected HOST:PORT"):
        split_address(text)


def test_addresses_of_every_kind_are_read() -> None:
    assert split_address("10.0.0.1:80") == ("10.0.0.1", 80)
    assert split_address("[::1]:80") == ("::1", 80)
    assert [is_loopback(host) for host in ("localhost", "127.9.9.9", "::1")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "example.org")] == [False] * 3


def test_a_unix_socket_in_a_directory_that_is_missing_is_refused(tmp_path: object) -> None:
    with pytest.raises(EndpointError, match=r"cannot listen at unix:.*a directory that exists"):
        bind(make_server(2), f"unix:{tmp_path}/no/a.sock")


def test_a_unix_socket_is_never_open_to_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, modes, mask = tmp_path / "a.sock", [], os.umask(0)
    monkeypatch.setattr(os, "chmod", lambda *_: modes.append(path.stat().st_mode & 0o077))
    try:
        bind(make_server(2), f"unix:{path}")
        assert (modes, os.umask(0)) == ([0], 0)
    finally:
        os.umask(mask)


def test_a_unix_socket_in_use_is_not_taken_over(tmp_path: Path) -> None:
    first, second, address = make_server(2), make_server(2), f"unix:{tmp_path}/a.sock"
    bind(first, address)
    first.start()
    with pytest.raises(EndpointError, match=r"cannot listen at .*another process listens"):
        bind(second, address)
    second.stop(0).wait()
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
    first.stop(0).wait()


def test_a_unix_socket_that_a_killed_process_left_behind_is_replaced(tmp_path: Path) -> None:
    server, path = make_server(2), f"{tmp_path}/a.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
        stale.listen()
    bind(server, f"unix:{path}")
    server.start()
    with grpc.insecure_channel(f"unix:{path}") as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
    server.stop(0).wait()


def test_a_stream_too_many_is_refused_at_once() -> None:
    server, says = make_server(2), SimpleQueue[Any]()
    echo = grpc.stream_stream_rpc_method_handler(lambda messages, _: messages)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"Echo": echo}),))
    address = bind(server, "127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(address) as channel:
        talk = channel.stream_stream("/t/Echo")
        calls = [talk(chain([b"here"], iter(says.get, None)), timeout=30) for _ in range(2)]
        assert [next(call) for call in calls] == [b"here"] * 2
        with pytest.raises(grpc.RpcError) as refused:
            next(talk(iter([b"here"]), timeout=30))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for _ in calls:
            says.put(None)
    server.stop(0).wait()


def test_its_error_is_told_without_a_traceback() -> None:
    with pytest.raises(EndpointError) as refused:
        bind(make_server(2), "0.0.0.0:0")
    assert describe(refused.value) == Failure(message=str(refused.value))
