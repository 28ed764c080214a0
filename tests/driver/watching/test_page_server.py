"""The page over HTTP: its contents, its readers, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import pytest
from support.made_files import append, line, made
from support.network import free_address

from juggler.driver.watching import page_server as app
from juggler.driver.watching.page_server import serve_page
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.endpoints import EndpointError, split_address
from juggler.runtime.actors.tls import read_tls

PAGE = Path(app.__file__).parent / "page"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    directory = tmp_path / "runs"
    made(directory / "one", [line(100, 1.0), line(200, 2.0)], {"solved": True}, old=200.0)
    made(directory / "two", [line(100, 3.0)], old=100.0)
    (directory / "two" / "events.jsonl").write_text(
        '{"time": "2026-01-31T12:00:00", "level": "error", "message": "<b>learner-0 left</b>"}\n'
        "no json\n"
    )
    return directory


@contextmanager
def served(*directories: Path, **options: Any) -> Iterator[str]:
    """Served at a free port; the address without the last slash."""
    with serve_page([*directories], free_address(), **options) as url:
        yield url.rstrip("/")


def get(url: str, token: str = "", **headers: str) -> bytes:
    if token:
        headers["Authorization"] = f"Bearer {token}"
    with urlopen(Request(url, headers=headers), timeout=60) as answer:
        content: bytes = answer.read()
    return content


def told(url: str, **parameters: str) -> dict[str, Any]:
    query = "&".join(f"{key}={quote(value)}" for key, value in parameters.items())
    found: dict[str, Any] = json.loads(get(f"{url}?{query}"))
    return found


def ids(url: str) -> dict[str, str]:
    return {run["name"]: run["id"] for run in told(f"{url}/api/runs")["runs"]}


def test_the_page_asks_only_for_files_that_it_has_and_that_come_from_here() -> None:
    files = {name for name, _ in app._FILES.values()}
    assert files == {path.name for path in PAGE.iterdir()}
    for path in PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, f"{path.name} needs a network"
        asked = re.findall(r'(?:src|href|from)[ =]"\.?/([\w.]+)"', text)
        assert set(asked) <= files, path.name
        assert "innerHTML" not in text, "what a run says would be read as HTML"


def test_every_answer_forbids_what_the_page_does_not_need(runs: Path) -> None:
    with served(runs) as url:
        for path in ("/", "/page.js", "/api/runs", "/nothing"):
            try:
                with urlopen(url + path, timeout=60) as answer:
                    headers = answer.headers
            except HTTPError as error:
                headers = error.headers
                error.close()
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert "Access-Control-Allow-Origin" not in headers


def test_runs_are_told_of_and_their_lines_come_as_they_are_written(runs: Path) -> None:
    with served(runs) as url:
        found = told(f"{url}/api/runs")["runs"]
        assert [(run["name"], run["state"]) for run in found] == [
            ("two", "killed"),
            ("one", "solved"),
        ]
        two = ids(url)["two"]
        first = told(f"{url}/api/run", id=two, detail="1")
        assert first["curves"]["rows"] == [[100, 1.0, 100, 3.0, 0]]
        assert first["config"]["stop_return"] == 475.0
        assert first["events"][0]["message"] == "<b>learner-0 left</b>"
        append(runs / "two", line(200, 4.0))
        after = told(f"{url}/api/run", id=two, seen=first["curves"]["seen"])
        assert (after["curves"]["rows"], after["curves"]["all"]) == (
            [[200, 2.0, 200, 4.0, 0]],
            False,
        )
        assert "events" not in after, "only of the run that is looked at"
        beside = told(f"{url}/api/run", id=two)
        assert len(beside["curves"]["rows"]) == 2, "another watcher has all of them"


def test_a_run_that_begins_later_comes_in_and_one_that_is_deleted_goes(runs: Path) -> None:
    with served(runs) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "_OVERVIEW_SECONDS", 0.0)
        patch.setattr(app, "_SHARE", 1e9)
        assert ids(url).keys() == {"one", "two"}
        gone = ids(url)["one"]
        made(runs / "three", [])
        shutil.rmtree(runs / "one")
        assert ids(url).keys() == {"two", "three"}
        with pytest.raises(HTTPError) as refused:
            told(f"{url}/api/run", id=gone)
        assert refused.value.code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/page/../app.py",
        "/%2e%2e/app.py",
        "//etc/passwd",
        "/app.py",
        "/api/run?id=../../etc",
        "/api/run?id=%2Fetc%2Fpasswd",
        "/api/video?id=one&video=../config.toml",
        "/api/run",
        "/api/",
    ],
)
def test_no_path_of_a_request_leads_to_a_file(path: str, runs: Path) -> None:
    with served(runs) as url:
        host, port = split_address(urlsplit(url).netloc)
        with socket.create_connection((host, port), timeout=60) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.0 404"), answer
    assert b"root:" not in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_get_and_head_are_answered(method: str, runs: Path) -> None:
    with served(runs) as url:
        request = Request(f"{url}/api/runs", method=method, data=b"x" * 10)
        with pytest.raises(HTTPError) as refused:
            urlopen(request, timeout=60)
        assert (refused.value.code, refused.value.headers["Allow"]) == (405, "GET, HEAD")
        with urlopen(Request(f"{url}/", method="HEAD"), timeout=60) as answer:
            assert int(answer.headers["Content-Length"]) == (PAGE / "index.html").stat().st_size
            assert answer.read() == b""


def test_a_site_that_gives_its_own_name_to_this_host_reads_nothing(runs: Path) -> None:
    with served(runs) as url:
        for host in ("evil.example", "evil.example:7070", "127.0.0.1.evil.example", ""):
            with pytest.raises(HTTPError) as refused:
                get(f"{url}/api/runs", Host=host)
            assert refused.value.code == 403
        for host in ("localhost", "localhost:9999", "127.0.0.1:1", "[::1]:8080", "[::1]"):
            assert get(f"{url}/api/runs", Host=host)


@pytest.mark.parametrize("shown", ["", "another", "a secre"])
def test_who_does_not_show_the_token_sees_the_page_and_no_run(shown: str, runs: Path) -> None:
    with served(runs, token="a secret") as url:
        assert b"token" in get(f"{url}/")
        assert json.loads(get(f"{url}/api/runs", "a secret", Host="gpu1"))["runs"]
        for path in ("/api/runs", "/api/run?id=1", "/nothing"):
            with pytest.raises(HTTPError) as refused:
                get(url + path, shown)
            assert refused.value.code == 401


def test_beyond_loopback_it_needs_a_token_and_tls_or_to_be_told(runs: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", ["127.0.0.1"], 1)
    tls = read_tls(str(tmp_path / "tls"))
    lacking: list[tuple[str, dict[str, Any]]] = [
        ("no token", {}),
        ("no token", {"insecure": True}),
        ("no token", {"tls": tls}),
        ("nothing would be encrypted", {"token": "a secret"}),
    ]
    for why, options in lacking:
        refused = pytest.raises(EndpointError, match=why)
        with refused, serve_page([runs], "0.0.0.0:0", **options):
            pass
    for options in ({"token": "a secret", "tls": tls}, {"token": "a secret", "insecure": True}):
        with serve_page([runs], "0.0.0.0:0", **options):
            pass


def test_over_tls_a_browser_needs_the_token_and_no_certificate(runs: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", ["127.0.0.1"], 1)
    context = ssl.create_default_context(cafile=tmp_path / "tls" / "ca.pem")
    with served(runs, token="a secret", tls=read_tls(str(tmp_path / "tls"))) as url:
        assert url.startswith("https://")
        request = Request(f"{url}/api/runs", headers={"Authorization": "Bearer a secret"})
        with urlopen(request, timeout=60, context=context) as answer:
            assert json.load(answer)["runs"]
        with pytest.raises((URLError, OSError)):
            get(url.replace("https", "http"))


def test_a_port_in_use_is_said_and_without_one_the_next_is_taken(runs: Path) -> None:
    with serve_page([runs]) as first, serve_page([runs]) as second:
        assert first != second
        assert get(second) == get(first)
        taken = urlsplit(first).netloc
        refused = pytest.raises(EndpointError, match=f"{taken}: Address already in use. Choose")
        with refused, serve_page([runs], taken):
            pass


def test_a_video_is_given_whole_and_a_link_never(runs: Path, tmp_path: Path) -> None:
    content = b"\0" * 300_000 + b"end"
    (runs / "two" / "videos").mkdir()
    (runs / "two" / "videos" / "episode-0.mp4").write_bytes(content)
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (runs / "two" / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    with served(runs) as url:
        two = ids(url)["two"]
        (video,) = told(f"{url}/api/run", id=two, detail="1")["videos"]
        assert video["name"] == "videos/episode-0.mp4"
        assert get(f"{url}/api/video?id={two}&video={video['id']}") == content
        (runs / "two" / "videos" / "episode-0.mp4").unlink()
        (runs / "two" / "videos" / "episode-0.mp4").symlink_to(tmp_path / "secret.mp4")
        with pytest.raises(HTTPError) as refused:
            get(f"{url}/api/video?id={two}&video={video['id']}")
        assert refused.value.code == 404


def test_damaged_files_are_told_of_and_the_rest_is_shown(runs: Path) -> None:
    (runs / "two" / "config.toml").write_text("no toml")
    (runs / "two" / "metrics.jsonl").write_bytes(b"\xff\n\n{}\n")
    (runs / "one" / "metrics.jsonl").unlink()
    with served(runs) as url:
        problems = {run["name"]: run["problem"] for run in told(f"{url}/api/runs")["runs"]}
        assert "config.toml is damaged" in problems["two"]
        assert problems["one"] == "there is no metrics.jsonl"
        two = told(f"{url}/api/run", id=ids(url)["two"], detail="1")
        assert (two["broken"], two["curves"]["rows"]) == (2, [])
        assert "no metrics.jsonl" in told(f"{url}/api/run", id=ids(url)["one"])["problem"]
