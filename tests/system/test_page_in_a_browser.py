"""The page in headless Chromium: what is on it, with a mouse, with a keyboard, and with runs that
go on, are over, or are killed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from support.browser import Tab, browser, chromium
from support.made_checkpoints import checkpoint, league_state
from support.made_runs import append, line, made
from support.network import free_address
from support.place import Place

from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.roster import Player
from juggler.driver.record.checkpoints import write
from juggler.driver.watching.serving import PageApplication, Refused, serve_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="Chromium is missing: apt-get install chromium"),
]
CHARTS = "[...document.querySelectorAll('.chart')].filter(e => e.checkVisibility())"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
        assert opened.problems == [], "the console has errors"


@contextlib.contextmanager
def shown(tab: Tab, directory: Path, **options: Any) -> Iterator[str]:
    """Serve the page, and open it. The browser leaves it before the server stops, so that it asks
    for nothing then."""
    with serve_page([directory], free_address(), **options) as url:
        tab.open(url)
        try:
            yield url
        finally:
            tab.open("about:blank")


def lines(last: int, *, more: float = 0.0) -> list[dict[str, object]]:
    return [
        line(
            100 * n,
            n + more,
            env_steps_trained=90 * n,
            env_steps_in_flight=4 * n,
            env_steps_dropped={"stale": 6 * n},
            staleness_mean=1.0,
            staleness_max=2,
            modules={"default": {"policy_loss": 1 / n}},
            seconds={"learner": {"update": n, "waiting": n}},
        )
        for n in range(1, last)
    ]


def test_a_run_is_followed_while_it_goes_on_and_when_it_is_killed(tab: Tab, place: Place) -> None:
    options = ("--run-dir", "runs/live", "--no-confirm", "--stop-return", "none")
    run = place.start("train", "cartpole", "--web", *options)
    run.wait_for("page: ")
    page = run.output.partition("page: ")[2].split()[0]
    tab.open(page)
    tab.wait_for("document.querySelector('#runs .state.running')")
    tab.wait_for("document.querySelectorAll('.panel-workers .state.ready').length >= 2")
    steps = "document.querySelector('.panel-books p').innerText.split(' ')[0]"
    before = tab.value(steps)
    tab.wait_for(f"{steps} !== {json.dumps(before)}")
    place.worker("envrunner 0").kill()
    tab.wait_for("document.querySelector('.panel-workers').innerText.includes('killed by SIGKILL')")
    tab.wait_for("document.querySelector('.events .warning').innerText.includes('envrunner-0')")
    address = free_address()
    watch = place.start("watch", "runs", "--bind", address)
    watch.wait_for(f"watching 1 run at http://{address}/")
    tab.loses(page)
    run.process.kill()
    tab.wait_for("document.querySelector('#connection').className === 'lost'")
    tab.open(f"http://{address}/")
    tab.wait_for("document.querySelector('#runs .state.killed')")
    assert tab.value("document.querySelector('.panel-workers').innerText").endswith(
        "no workers now."
    )
    tab.open("about:blank")
    watch.interrupt()
    assert watch.wait(10) == 0


@pytest.mark.long
def test_runs_are_compared_by_mouse_and_by_keyboard(tab: Tab, tmp_path: Path) -> None:
    one = made(tmp_path / "one", lines(30))
    two = made(tmp_path / "two", lines(30, more=5.0), {"solved": True})
    (one / "events.jsonl").write_text(
        json.dumps({"time": "2026-01-31T12:00:00", "level": "error", "message": "<i>lost</i>"})
    )
    with (one / "events.jsonl").open("a") as file:
        file.write("\n")
    with shown(tab, tmp_path):
        tab.wait_for("document.querySelectorAll('#runs tbody tr').length === 2")
        assert tab.value(f"{CHARTS}.map(e => e.querySelector('figcaption').innerText)") == [
            "Mean return",
            "Throughput in steps/s",
            "Staleness in updates",
            "policy loss",
        ]
        assert tab.wait_for("document.querySelector('.goal-name')?.textContent")
        curves = "document.querySelector('.chart').querySelectorAll('path.curve[d]').length"
        tab.value("document.querySelector('#runs input:not(:checked)').focus()")
        tab.press(" ")
        tab.wait_for(f"{curves} >= 4")  # two, each with its key
        tab.value(f"document.querySelector('[title=\"all about {one}\"]').focus()")
        tab.press("Enter")
        tab.wait_for("document.querySelector('#detail-title').innerText === 'one'")
        books = tab.value("document.querySelector('.panel-books').innerText")
        assert "2,900 steps sampled" in books
        assert "stale 174 (6.0 %)" in books
        assert "do not balance" not in books
        assert tab.value("document.querySelector('.events').innerText").endswith("<i>lost</i>")
        tab.value("document.querySelector('.chart svg[tabindex]').focus()")
        tab.press("ArrowLeft")
        readout = "document.querySelector('.readout').innerText"
        assert tab.wait_for(readout) == "at 2.8k steps: two training 33.00, one training 28.00"
        append(two, line(9000, 77.0))
        tab.wait_for("document.querySelector('#runs').innerText.includes('77.00')")
        assert tab.value("document.activeElement.tagName") == "svg", "what is new moves no focus"


@pytest.mark.long
def test_no_two_curves_of_a_chart_look_alike_though_there_are_more_runs_than_colours(
    tab: Tab, tmp_path: Path
) -> None:
    for number in range(9):
        made(tmp_path / f"run-{number}", lines(30, more=number))
    with shown(tab, tmp_path, named=True):
        tab.wait_for("document.querySelectorAll('#runs input:checked').length === 9")
        swatches = (
            f"{CHARTS}.map(chart => [...chart.querySelectorAll('.legend .swatch')].map("
            "e => e.style.color + e.querySelector('path')?.getAttribute('stroke-dasharray')))"
        )
        tab.wait_for(f"{swatches}[1]?.length === 18")
        for looks in tab.value(swatches):
            assert len(set(looks)) == len(looks) >= 9


@pytest.mark.long
def test_a_click_counts_though_the_table_has_news_while_the_mouse_is_pressed(
    tab: Tab, tmp_path: Path
) -> None:
    made(tmp_path / "one", lines(30), {"solved": True}, old=200.0)
    two = made(tmp_path / "two", lines(30))
    with shown(tab, tmp_path):
        name = f"document.querySelector('[title=\"all about {tmp_path / 'one'}\"]')"
        tab.wait_for(f"document.querySelector('#detail-title').innerText === 'two' && {name}")
        tab.mouse("mousePressed", name)
        append(two, line(9000, 77.0))
        tab.wait_for("document.querySelector('.panel-books').innerText.includes('9,000')")
        tab.mouse("mouseReleased", name)
        tab.wait_for("document.querySelector('#detail-title').innerText === 'one'")
        tab.wait_for("document.querySelector('#runs').innerText.includes('77.00')")


@pytest.mark.long
def test_a_video_that_is_shown_stays_when_the_next_one_is_recorded(
    tab: Tab, tmp_path: Path
) -> None:
    videos = made(tmp_path / "run", lines(30)) / "videos"
    videos.mkdir()
    (videos / "update-1.mp4").write_bytes(b"no video, but that is not asked here")
    with shown(tab, tmp_path):
        buttons = "[...document.querySelectorAll('.videos button')]"
        assert tab.wait_for(f"{buttons}[0].innerText") == "Play videos/update-1.mp4"
        tab.value(f"{buttons}[0].click()")
        tab.wait_for("document.querySelector('video')?.src.startsWith('blob:')")
        tab.value("document.querySelector('video').isTheSame = true")
        (videos / "update-2.mp4").write_bytes(b"nor this")
        tab.wait_for(f"{buttons}.length === 2")
        assert tab.value("document.querySelector('video')?.isTheSame")
        (videos / "update-1.mp4").unlink()
        tab.wait_for(f"{buttons}.length === 1 && !document.querySelector('video')")


@pytest.mark.long
def test_players_of_a_league_and_who_beats_whom_are_shown(tab: Tab, tmp_path: Path) -> None:
    players = [
        Player("main", "main", True, "initial", steps=500, ready=True),
        Player("main-v1", "historical", False, "initial", "main", ready=True),
    ]
    payoffs = Payoffs(1.0, 1)
    for result in (1, 1, 1, 0):
        payoffs.book("main", "main-v1", result)
    one = {"elo": 40.0, "win_rate": 0.9, "steps": 500, "copies": 1, "resets": 0}
    told = {"players": 2, "historical": 1, "learning": {"main": one}}
    run_dir = made(tmp_path / "run", [each | {"league": told} for each in lines(30)])
    with (run_dir / "config.toml").open("a") as file:
        file.write('[league]\nbuilder = "self_play"\n')
    counters = {"league": league_state(players, payoffs)}
    write(run_dir / "checkpoints", checkpoint(8, counters=counters))
    with shown(tab, tmp_path):
        panel = "document.querySelector('.panel-league')"
        tab.wait_for(f"{panel}?.innerText.includes('As checkpoint 8 has it')")
        said = tab.value(f"{panel}.innerText")
        assert "Players that can play: 2. Frozen copies among them: 1." in said
        rows = tab.value(f"[...{panel}.querySelectorAll('tbody tr')].map(e => e.innerText)")
        assert [each.split() for each in rows] == [
            ["main", "40.00", "90", "%", "500", "1", "0"],
            ["main", "136.6", "~88"],
            ["main-v1", "-136.6", "~13"],
        ]


def test_everything_fits_at_any_width_and_has_a_focus_that_is_seen(
    tab: Tab, tmp_path: Path
) -> None:
    made(tmp_path / ("a_run_with_a_long_name_" * 4), lines(30))
    with shown(tab, tmp_path) as url:
        for width in (400, 900, 1600):
            tab.size(width, 900)
            tab.open(url)
            tab.wait_for("document.querySelector('.panel-books p')")
            assert tab.value("document.documentElement.scrollWidth") <= width
            assert tab.value(
                "[...document.querySelectorAll('.chart svg[tabindex]')].every("
                "e => !e.checkVisibility() || e.getBoundingClientRect().right <= innerWidth)"
            )
        seen = []
        for _ in range(12):
            tab.press("Tab")
            seen.append(
                tab.value(
                    "[document.activeElement.tagName, "
                    "getComputedStyle(document.activeElement).outlineStyle]"
                )
            )
        assert {tag for tag, _ in seen} >= {"INPUT", "BUTTON", "svg", "SUMMARY"}
        assert {outline for tag, outline in seen if tag != "BODY"} == {"solid"}, seen


def test_a_token_is_asked_for_and_a_wrong_one_is_refused(tab: Tab, tmp_path: Path) -> None:
    made(tmp_path / "run", lines(5))
    with shown(tab, tmp_path, token="a secret"):
        tab.wait_for("document.querySelector('#login').checkVisibility()")
        tab.problems[:] = [each for each in tab.problems if "401" not in each]
        for token in ("wrong", "a secret"):
            tab.value(f"document.querySelector('#token').value = {json.dumps(token)}")
            tab.value("document.querySelector('#token').focus()")
            tab.press("Enter")
            if token == "wrong":
                tab.wait_for("document.querySelector('#refused').innerText.includes('not the')")
        tab.wait_for("document.querySelectorAll('#runs tbody tr').length === 1")
        assert "secret" not in tab.value("location.href + document.cookie")
    tab.problems[:] = [each for each in tab.problems if "401" not in each]


def test_an_empty_directory_and_damaged_files_are_told_in_words(tab: Tab, tmp_path: Path) -> None:
    with shown(tab, tmp_path):
        tab.wait_for("document.querySelector('#problem').innerText.includes('There are no runs')")
        run = made(tmp_path / "run", lines(5))
        with (run / "metrics.jsonl").open("a") as file:
            file.write("no json\n")
        os.utime(run / "metrics.jsonl")
        tab.wait_for("document.querySelector('#problem').innerText.includes('1 line of')")
        tab.wait_for(f"{CHARTS}.length > 3")


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "told"), [("an error", "the disk is gone"), ("[1", "what came is no JSON")]
)
def test_a_run_that_is_answered_badly_is_told_while_the_others_go_on(
    tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, told: str
) -> None:
    one, two = made(tmp_path / "one", lines(30)), made(tmp_path / "two", lines(30))
    asked = PageApplication._answer
    well = True

    def answered(self: PageApplication, environ: dict[str, Any]) -> tuple[str, int, Any]:
        run_id = parse_qs(environ["QUERY_STRING"]).get("id", [""])[0]
        if well or self._run_dirs.get(run_id) != two:
            return asked(self, environ)
        if answer == "an error":
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "the disk is gone")
        return "application/json", len(answer), [answer.encode()]

    monkeypatch.setattr(PageApplication, "_answer", answered)
    problem = "document.querySelector('#problem').innerText"
    with shown(tab, tmp_path, named=True):
        tab.wait_for("document.querySelectorAll('#runs input:checked').length === 2")
        tab.value(f"document.querySelector('[title=\"all about {one}\"]').click()")
        tab.wait_for("document.querySelector('#detail-title').innerText === 'one'")
        well = False
        assert tab.wait_for(problem) == f"two: {told}"
        append(one, line(9000, 77.0))
        tab.wait_for("document.querySelector('.panel-books').innerText.includes('9,000')")
        assert "lost" not in tab.value("document.querySelector('#connection').className")
        well = True
        tab.wait_for(f"{problem} === ''")
    if answer == "an error":  # which the console has, too
        tab.problems[:] = [each for each in tab.problems if "status of 500" not in each]


def test_only_connections_to_a_server_that_a_test_stops_are_no_problem(
    tab: Tab, tmp_path: Path
) -> None:
    made(tmp_path / "run", lines(5))
    with serve_page([tmp_path], free_address()) as url:
        tab.open(url)
        tab.wait_for("document.querySelectorAll('#runs tbody tr').length === 1")
        tab.value("void fetch('/nothing').then(answer => { document.title = answer.status; })")
        tab.wait_for("document.title === '404'")
        tab.value("void setTimeout(() => { throw new Error('of the page'); })")
        tab.loses(url)
    tab.wait_for("document.querySelector('#connection').className === 'lost'")
    tab.open("about:blank")
    found, tab.problems[:] = sorted(tab.problems), []
    assert len(found) == 2
    assert "status of 404" in found[0]
    assert "of the page" in found[1]
