"""/metrics over HTTP: which clients may read it."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from support.network import free_address

from juggler.cli.arguments import MonitoringArguments
from juggler.driver.monitoring import plain_status
from juggler.driver.reporting import http_server
from juggler.driver.reporting.prometheus import serve_metrics
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.endpoints import split_address
from juggler.runtime.actors.tls import Tls, read_tls
from juggler.runtime.wire.v1 import status_pb2


def status() -> dict[str, Any]:
    read = status_pb2.RunStatus(updates=3)
    for histogram in (read.staleness, read.sample_request_seconds, read.update_seconds):
        histogram.counts.append(0)
    return plain_status(read)


@contextmanager
def metrics(**options: Any) -> Iterator[str]:
    """Served; where."""
    address = free_address()
    with serve_metrics(address, status, **options):
        yield address


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return made(tmp_path_factory.mktemp("tls"))


def made(directory: Path) -> Tls:
    make_certificates(directory, ["127.0.0.1"], 1)
    tls = read_tls(str(directory))
    assert tls is not None
    return tls


def scraper(tls: Tls, certificate: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=f"{tls.directory}/ca.pem")
    if certificate:
        context.load_cert_chain(f"{tls.directory}/cert.pem", f"{tls.directory}/key.pem")
    return context


def scrape(url: str, token: str = "", context: ssl.SSLContext | None = None) -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urlopen(Request(url, headers=headers), timeout=60, context=context) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("shown", ["", "another", "a secre"])
def test_who_does_not_show_the_token_reads_nothing(shown: str) -> None:
    with metrics(token="a secret") as address:
        assert "juggler_updates" in scrape(f"http://{address}/metrics", "a secret")
        with pytest.raises(HTTPError) as refused:
            scrape(f"http://{address}/metrics", shown)
        assert refused.value.code == 401
        assert refused.value.headers["WWW-Authenticate"] == "Bearer"
        assert refused.value.read() == b"the token is missing or wrong\n"


def test_with_tls_it_wants_a_certificate_of_the_same_authority_too(
    tls: Tls, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with metrics(token="a secret", tls=tls) as address:
        url = f"https://{address}/metrics"
        assert "juggler_updates" in scrape(url, "a secret", scraper(tls))
        with pytest.raises(HTTPError, match="401"):
            scrape(url, context=scraper(tls))
        for stranger in (scraper(tls, certificate=False), scraper(made(tmp_path))):
            with pytest.raises((URLError, ssl.SSLError, ConnectionError)):
                scrape(url, "a secret", stranger)
        with pytest.raises(ConnectionError):
            scrape(f"http://{address}/metrics", "a secret")
        assert "juggler_updates" in scrape(url, "a secret", scraper(tls))
    assert capfd.readouterr() == ("", ""), "neither a scrape nor one that is refused writes a line"


def test_a_certificate_that_is_renewed_is_the_one_that_the_next_scrape_sees(tmp_path: Path) -> None:
    old = made(tmp_path)
    with metrics(tls=old) as address:
        url = f"https://{address}/metrics"
        before = scraper(old)
        scrape(url, context=before)
        for file in tmp_path.iterdir():
            file.unlink()
        scrape(url, context=scraper(made(tmp_path)))
        with pytest.raises(URLError):
            scrape(url, context=before)


def test_who_has_shown_the_token_is_not_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = threading.Event(), threading.Event()

    def slow_status() -> status_pb2.RunStatus:
        asked.set()
        assert answers.wait(60)
        return status()

    monkeypatch.setattr(sys.modules[__name__], "status", slow_status)
    monkeypatch.setattr(http_server, "_CLIENT_SECONDS", 300.0)  # none is silent for too long
    with ExitStack() as connections, metrics(token="secret") as address:
        scraped = connections.enter_context(ThreadPoolExecutor(1)).submit(
            scrape, f"http://{address}/metrics", "secret"
        )
        assert asked.wait(60)
        first, *_, last = (
            connections.enter_context(socket.create_connection(split_address(address), timeout=60))
            for _ in range(100)
        )
        last.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert last.recv(12) == b"HTTP/1.0 401"
        assert first.recv(1) == b"", "the first of too many silent ones makes room"
        monkeypatch.undo()
        answers.set()
        assert "juggler_driver_up" in scraped.result(60)


def test_who_stays_silent_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_CLIENT_SECONDS", 0.05)
    with (
        metrics() as address,
        socket.create_connection(split_address(address), timeout=60) as silent,
    ):
        assert silent.recv(1) == b""


def test_metrics_of_a_run_of_this_host_have_the_token_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUGGLER_TOKEN", "secret")
    given = MonitoringArguments(metrics_bind="127.0.0.1:0")
    assert given.monitoring(insecure=False).token == "secret"
    assert given.monitoring(insecure=True).token == ""
    assert given.monitoring(insecure=False, token="of-the-driver").token == "of-the-driver"
