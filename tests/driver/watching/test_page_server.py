"""The page over HTTP, its own process, and what it draws."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import psutil
import pytest
from support.made_files import append, checkpoint, league_state, line, made
from support.network import free_address
from support.processes import eventually

from juggler.driver.callbacks import Run
from juggler.driver.league.results import Payoffs
from juggler.driver.league.roster import Player
from juggler.driver.reporting.run_directory import read_metrics
from juggler.driver.watching import page_server as app
from juggler.driver.watching.page_server import (
    MOST_POINTS,
    Curves,
    PageProcess,
    league_matrix,
    serve_page,
)
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.endpoints import EndpointError, split_address
from juggler.runtime.actors.tls import read_tls
from juggler.runtime.checkpoints.checkpoint import CheckpointError, write

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
    files = {path.name for path in PAGE.iterdir()}
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
        assert first["curves"]["rows"] == [[100, 1.0, 0, 100, 3.0]]
        assert first["config"]["stop_return"] == 475.0
        assert first["events"][0]["message"] == "<b>learner-0 left</b>"
        append(runs / "two", line(200, 4.0))
        after = told(f"{url}/api/run", id=two, seen=first["curves"]["seen"])
        assert (after["curves"]["rows"], after["curves"]["all"]) == (
            [[200, 2.0, 0, 200, 4.0]],
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
        assert get(f"{url}/api/video?id={two}&video={video['name']}") == content
        (runs / "two" / "videos" / "episode-0.mp4").unlink()
        (runs / "two" / "videos" / "episode-0.mp4").symlink_to(tmp_path / "secret.mp4")
        with pytest.raises(HTTPError) as refused:
            get(f"{url}/api/video?id={two}&video={video['name']}")
        assert refused.value.code == 404


# The page's own process: ends with the run, never ends it.


class Shown:
    """What people are told: (text, level)."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def message(self, text: str, level: str = "info") -> None:
        self.said.append((text, level))


def a_run(run_dir: Path) -> tuple[Run, Shown]:
    shown: Any = Shown()
    nothing: Any = None
    return Run(run_dir, {}, nothing, shown, lambda reason: None, nothing, nothing), shown


def children() -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if "juggler watch" in " ".join(each.cmdline())
    ]


def begun(page: PageProcess, run: Run, shown: Shown) -> str:
    """Pass it lines of metrics until it reports its address."""

    def told() -> list[tuple[str, str]]:
        page.on_metrics(run, {})
        return shown.said

    eventually(told, "the page is served")
    ((text, level),) = shown.said
    assert level == "info"
    found = re.fullmatch(r"page: (http://127\.0\.0\.1:\d+/)", text)
    assert found, text
    return found[1]


@pytest.mark.long
def test_when_it_is_killed_people_are_told_and_the_run_goes_on(tmp_path: Path) -> None:
    run, shown = a_run(made(tmp_path / "run", []))
    page = PageProcess()
    page.on_start(run)
    begun(page, run, shown)
    (process,) = children()
    process.kill()

    def warned() -> bool:
        page.on_metrics(run, {})
        return len(shown.said) > 1

    eventually(warned, "a warning")
    assert shown.said[1][1] == "warning"
    assert "no longer served" in shown.said[1][0]
    page.on_metrics(run, {})
    page.on_end(run, {})
    assert len(shown.said) == 2


@pytest.mark.long
def test_it_ends_when_the_driver_is_killed(tmp_path: Path) -> None:
    made(tmp_path / "run", [])
    script = f"""
import sys, time
from pathlib import Path
from juggler.driver.callbacks import Run
from juggler.driver.watching.page_server import PageProcess
class Shown:
    def message(self, text, level="info"):
        print(text, flush=True)
run = Run(Path({str(tmp_path / "run")!r}), {{}}, None, Shown(), None, None, None)
page = PageProcess()
page.on_start(run)
while True:
    page.on_metrics(run, {{}})
    time.sleep(0.05)
"""
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        url = driver.stdout.readline().removeprefix("page: ").strip()
        (page,) = psutil.Process(driver.pid).children()
        urlopen(url, timeout=60).close()
    finally:
        driver.kill()
        driver.communicate()
    eventually(lambda: not page.is_running() or page.status() == psutil.STATUS_ZOMBIE, "it ends")


@pytest.mark.slow
def test_where_no_process_can_be_started_people_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    run, shown = a_run(tmp_path)
    page = PageProcess()
    page.on_start(run)
    page.on_metrics(run, {})
    page.on_end(run, {})
    ((text, level),) = shown.said
    assert level == "warning"
    assert "the page cannot be served" in text


# What a page draws of a run's metrics and league.


class Reader:
    """A reader that follows the curves as a page does."""

    def __init__(self, curves: Curves) -> None:
        self.curves, self.seen, self.keys = curves, "", []
        self.rows: list[list[Any]] = []

    def read(self) -> int:
        """Returns how many rows came."""
        self.curves.read()
        told = self.curves.since(self.seen)
        self.rows = told["rows"] if told["all"] else [*self.rows, *told["rows"]]
        self.seen, self.keys = told["seen"], told["keys"]
        return len(told["rows"])

    def column(self, key: str) -> list[Any]:
        place = self.keys.index(key)
        return [row[place] for row in self.rows]


def test_a_run_that_was_resumed_has_the_same_course_as_for_a_plot(tmp_path: Path) -> None:
    run_dir = made(tmp_path / "run", [line(100, 1.0), line(200, 2.0), line(300, 3.0)])
    reader = Reader(Curves(run_dir))
    reader.read()
    append(run_dir, line(150, 9.0, 0.5), line(250, 10.0, 1.5))
    reader.read()
    plotted = read_metrics(run_dir).lines
    for key in ("env_steps_sampled", "training_time", "episode_return_mean"):
        assert reader.column(key) == [each[key] for each in plotted]
    assert reader.column("env_steps_sampled") == [100, 150, 250]


def test_of_a_long_run_few_points_are_kept_that_are_still_those_of_its_file(tmp_path: Path) -> None:
    steps = range(1, 10 * MOST_POINTS)
    run_dir = made(tmp_path / "run", [line(n, float(n)) for n in steps])
    reader = Reader(Curves(run_dir))
    reader.read()
    assert MOST_POINTS / 4 < len(reader.rows) <= MOST_POINTS
    assert reader.column("env_steps_sampled") == reader.column("episode_return_mean")
    gaps = {
        b - a for a, b in zip(reader.rows, reader.rows[1:], strict=False) for a, b in [(a[0], b[0])]
    }
    assert len(gaps) == 1, "they are alike in distance"
    assert reader.curves.newest["env_steps_sampled"] == steps[-1]
    append(run_dir, *(line(n, 0.0) for n in range(steps[-1], steps[-1] + 64)))
    assert 0 < reader.read() < 64


def test_losses_and_returns_of_modules_agents_and_players_are_columns(tmp_path: Path) -> None:
    of_module = {"episode_return_mean": 4.0, "env_steps_sampled": 50}
    run_dir = made(
        tmp_path / "run",
        [
            line(100, None),  # before there is any of it
            line(
                200,
                1.0,
                modules={"main": {"policy_loss": 0.25}},
                by_module={"main": of_module},
                by_agent={"row/1": of_module},
                league={"learning": {"main": {"elo": 12.5, "win_rate": None}}},
                custom={"half": 0.5, "of/two": None},
                info={f"row/1/x{k}": {"mean": 3.0, "least": 1.0} for k in range(500)},
                env_steps_dropped={"stale": 30, "shutdown": 12},
            ),
        ],
    )
    reader = Reader(Curves(run_dir))
    reader.read()
    assert reader.column("env_steps_dropped") == [0, 42]
    assert {key: reader.column(key) for key in reader.keys if "/" in key} == {
        "modules/main/policy_loss": [None, 0.25],
        "by_module/main/episode_return_mean": [None, 4],
        "by_agent/row/1/episode_return_mean": [None, 4],
        "custom/half": [None, 0.5],
        **{f"info/row/1/x{k}/mean": [None, 3] for k in range(390)},
        "league/main/elo": [None, 12.5],
    }


# The table of results between players, from a checkpoint.


def test_win_rates_are_those_of_the_row_and_who_is_retired_is_left_out(tmp_path: Path) -> None:
    players = [
        Player("old", "historical", False, "initial", "main", ready=True),
        Player("main", "main", True, "initial", steps=500, ready=True),
        Player("gone", "historical", False, "initial", "main", ready=True, retired=True),
        Player("late", "historical", False, "initial", "main", ready=True),
    ]
    payoffs = Payoffs(1.0, 1)
    for result in (1, 1, 1, 0):
        payoffs.book("main", "old", result)
    made = checkpoint(counters={"league": league_state(players, payoffs)})
    matrix = league_matrix(write(tmp_path, made), {"min_games": 5})
    assert [each["id"] for each in matrix["players"]] == ["main", "old", "late"]
    assert matrix["win_rates"] == [[None, 0.875, None], [0.125, None, None], [None, None, None]]
    assert matrix["games"][0] == [0, 4, 0]
    assert matrix["min_games"] == 5
    assert matrix["players"][0]["elo"] > matrix["players"][1]["elo"]


def test_of_many_players_those_that_learn_and_the_newest_are_shown(tmp_path: Path) -> None:
    players = [Player("main", "main", True, "initial", ready=True)]
    players += [
        Player(f"v{n}", "historical", False, "initial", "main", ready=True) for n in range(100)
    ]
    made = checkpoint(counters={"league": league_state(players, Payoffs(1.0, 1))})
    matrix = league_matrix(write(tmp_path, made), {})
    shown = [each["id"] for each in matrix["players"]]
    assert (len(shown), matrix["left_out"]) == (40, 61)
    assert (shown[0], shown[1], shown[-1]) == ("main", "v61", "v99")


def test_a_run_without_a_league_has_none_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    assert league_matrix(write(tmp_path, checkpoint(7)), {}) == {}
    damaged = write(tmp_path, checkpoint(8, counters={"league": {"players": "many"}}))
    with pytest.raises(CheckpointError, match="its league is damaged"):
        league_matrix(damaged, {})
