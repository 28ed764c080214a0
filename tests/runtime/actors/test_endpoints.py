from __future__ import annotations

import math
import os
import re
import shutil
import socket
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from support.changes import SkippedTime
from support.hub_world import make, mixed

from juggler.runtime.actors import endpoints
from juggler.runtime.actors.attachment import Attachment, Contact, describe
from juggler.runtime.actors.endpoints import (
    EndpointError,
    bind,
    dial,
    is_loopback,
    make_server,
    split_address,
    wait_until_ready,
)
from juggler.runtime.actors.health import check_health
from juggler.runtime.actors.hub import Hub, HubSettings, Mailbox, WorkerJoined
from juggler.runtime.actors.tls import Tls, why_no_handshake
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


# Connections with TLS: which are accepted, and the others' errors.


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at a connection do not wait, and move the clock."""
    monkeypatch.setattr(endpoints, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(endpoints, "time", SkippedTime(step=0.05))


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return make(tmp_path / "tls", "gpu1")


@pytest.fixture
def server() -> Iterator[grpc.Server]:
    made = make_server(2)
    yield made
    made.stop(0).wait(60)


def _listen(server: grpc.Server, tls: Tls | None) -> str:
    address = bind(server, "127.0.0.1:0", tls=tls)
    server.start()
    return address


def _dial(address: str, tls: Tls | None) -> None:
    with dial(address, tls) as channel:
        wait_until_ready(channel, address, "driver", 10, tls)


def test_certificates_that_are_renewed_are_shown_to_the_next_connection(
    server: grpc.Server, tls: Tls, tmp_path: Path
) -> None:
    address = _listen(server, tls)
    _dial(address, tls)
    another = make(tmp_path / "another")
    for name in ("ca.pem", "key.pem"):  # one after the other, as people copy them
        Path(tls.directory, name).write_bytes(Path(another.directory, name).read_bytes())
        _dial(address, tls)
        host, port = split_address(address)
        assert why_no_handshake(address, host, port, tls, "driver") == "", "as after a slow one"
    shutil.copy(tmp_path / "another" / "cert.pem", tls.directory)
    _dial(address, another)
    _dial(address, tls)  # what this host dials with is new, too


def test_a_host_of_another_authority_is_not_believed(
    server: grpc.Server, tls: Tls, tmp_path: Path, at_once: None
) -> None:
    other = make(tmp_path / "other")
    address = _listen(server, tls)
    with pytest.raises(EndpointError, match=rf"this host does not accept .* driver at {address}"):
        _dial(address, other)


@pytest.mark.parametrize("answers", [["A", "", "A"], ["A", "", ""]])
def test_a_refusal_is_logged_also_when_a_busy_host_shows_it_only_now_and_then(
    answers: list[str], monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    found, reports = iter([*answers, *[""] * 1000]), list[str]()
    monkeypatch.setattr(endpoints, "why_not_secure", lambda *_: next(found))
    monkeypatch.setattr(endpoints, "_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(endpoints, "_MOST_REPORTS", 1000)
    # Accepts connections, and never answers.
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with dial(address) as channel, pytest.raises(EndpointError, match=r"^A$"):
            wait_until_ready(channel, address, "driver", 2.0, report=reports.append)
    assert all(re.fullmatch(r"A: waiting \d s more", each) for each in reports)
    assert len(reports) >= 2


def test_two_servers_that_end_in_a_handshake_are_no_refusal(
    server: grpc.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker waits for a driver that is restarted twice."""
    ending = socket.create_server(("127.0.0.1", 0), backlog=1000)
    number = ending.getsockname()[1]
    address, looks = f"127.0.0.1:{number}", 0

    def look(*_: object) -> str:
        nonlocal ending, looks
        looks += 1
        match looks:
            case 2:
                ending.close()
            case 3:
                ending = socket.create_server(("127.0.0.1", number), backlog=1000)
                return "A"
            case 4:
                ending.close()
                bind(server, address)
                server.start()
        return "A" if looks == 1 else ""

    monkeypatch.setattr(endpoints, "why_not_secure", look)
    monkeypatch.setattr(endpoints, "_LOOK_SECONDS", 0.0)
    with dial(address) as channel:
        wait_until_ready(channel, address, "driver", 60.0)
    assert looks >= 4


def test_a_host_must_have_the_name_by_which_it_is_dialed(
    server: grpc.Server, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [bind(server, f"{host}:0", tls=tls) for host in ("127.0.0.1", "127.0.0.9")]
    server.start()
    _dial(addresses[0].replace("127.0.0.1", "localhost"), tls)
    monkeypatch.setattr(endpoints, "_LOOK_SECONDS", 0.0)
    with pytest.raises(EndpointError, match=r"accept .*'127\.0\.0\.9'.* name the host"):
        _dial(addresses[1], tls)


def test_a_certificate_that_the_server_does_not_accept_is_named(
    server: grpc.Server, tls: Tls, tmp_path: Path, at_once: None
) -> None:
    other = make(tmp_path / "other")
    own, others = Path(tls.directory), Path(other.directory)
    thief = mixed(tmp_path / "thief", ca=own, cert=others, key=others)
    address = _listen(server, tls)
    with pytest.raises(EndpointError, match=r"driver at .* does not accept"):
        _dial(address, Tls(str(thief), tls.authority, other.certificate, other.key))


def test_one_side_without_tls_is_told_which(server: grpc.Server, tls: Tls, at_once: None) -> None:
    address = _listen(server, tls)
    with pytest.raises(EndpointError, match="speaks TLS: pass --tls DIR here too"):
        _dial(address, None)
    said = check_health(address, "", None, 10.0)
    assert f"the process at {address} speaks TLS: pass --tls DIR here" in said
    plain = make_server(2)
    address = _listen(plain, None)
    with pytest.raises(EndpointError, match=r"does not speak TLS.*: pass --tls"):
        _dial(address, tls)
    plain.stop(0).wait(60)


def test_who_waits_for_a_driver_is_told_so_now_and_then(at_once: None) -> None:
    told: list[str] = []
    with dial("127.0.0.1:1") as channel, pytest.raises(EndpointError, match="no driver answers"):
        wait_until_ready(channel, "127.0.0.1:1", "driver", 20.0, report=told.append)
    assert len(told) >= 2
    text = "no driver answers at 127.0.0.1:1 yet (Connection refused): waiting"
    assert all(text in line for line in told)


def test_a_wait_without_an_end_is_told_as_often(at_once: None) -> None:
    class Told(Exception):
        pass

    def report(text: str) -> None:
        raise Told(text)

    with dial("127.0.0.1:1") as channel, pytest.raises(Told, match="waiting inf s more"):
        wait_until_ready(channel, "127.0.0.1:1", "driver", math.inf, report=report)


def test_a_name_of_a_host_that_nobody_knows_is_told(at_once: None) -> None:
    address = "no-such-host.invalid:5105"
    with dial(address) as channel, pytest.raises(EndpointError, match="Name or service not"):
        wait_until_ready(channel, address, "driver", 1.0)


def test_a_hub_speaks_tls_to_other_hosts_and_plainly_on_its_own(tls: Tls, tmp_path: Path) -> None:
    events: Mailbox[object] = Mailbox()
    hub = Hub(HubSettings(run_id="run", roles=("worker",), token="secret", tls=tls), events)
    addresses = hub.start([f"unix:{tmp_path}/hub", "127.0.0.1:0"])
    try:
        for address in addresses:
            contact = Contact(address, token="secret", tls=tls, timeout=60)
            attachment = Attachment(contact, "worker", Mailbox())
            (joined,) = events.gather(timeout=60)
            assert isinstance(joined, WorkerJoined)
            attachment.farewell("done")
            events.gather(timeout=60)
    finally:
        hub.close()


def test_beyond_loopback_a_server_needs_tls_and_a_token(tls: Tls) -> None:
    server = make_server(2)
    for given, words in (
        ({}, "nothing is encrypted. Pass --tls DIR"),
        ({"token": "secret"}, "nothing is encrypted. Pass --tls DIR"),
        ({"tls": tls}, "there is no token. Pass --token-file"),
    ):
        with pytest.raises(EndpointError, match=words):
            bind(server, "0.0.0.0:0", **given)  # type: ignore[arg-type]
    assert bind(server, "0.0.0.0:0", tls=tls, token="secret").startswith("0.0.0.0:")
