"""The page in headless Chromium, with all kinds of runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.made_files import append, line, made
from support.network import free_address
from support.place import Place

from juggler.driver.watching.page_server import serve_page

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
_SECONDS = 120.0


def chromium() -> str | None:
    """Where the program is; None: it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Tab:
    """A page in the browser.

    Attributes:
        problems: exceptions, and what the console has of errors, without those of connections to
            servers that a test stops.
    """

    def __init__(self, to: int, out: int) -> None:
        self.problems: list[str] = []
        self._to, self._out = to, out
        self._rest = b""
        self._number = 0
        self._stopped: list[str] = []  # addresses
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def loses(self, url: str) -> None:
        """Note that the page's server at this address stops now."""
        self._stopped.append(url)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives."""
        found, problem = self._evaluate(expression)
        assert not problem, problem
        return found

    def wait_for(self, expression: str, seconds: float = _SECONDS) -> Any:
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + seconds
        while True:
            found, problem = self._evaluate(expression)
            if found and not problem:
                return found
            seen, _ = self._evaluate("document.body.innerText")
            assert time.monotonic() < deadline, f"{expression} is {problem or found} of: {seen}"
            time.sleep(0.1)

    def _evaluate(self, expression: str) -> tuple[Any, str]:
        """The value, where an element is true, and what went wrong."""
        answer = self._call(
            "Runtime.evaluate",
            expression=f"(found => found instanceof Node || found)({expression})",
            returnByValue=True,
        )
        problem = answer.get("exceptionDetails")
        return answer["result"].get("value"), json.dumps(problem) if problem else ""

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key, by its name: Tab, Enter, ArrowLeft, or a space."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}
        said = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code="Space" if key == " " else key,
                windowsVirtualKeyCode=codes[key],
                modifiers=modifiers,
                **({"text": said} if said and kind == "keyDown" else {}),
            )

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        deadline = time.monotonic() + _SECONDS
        while True:
            message = self._message(deadline)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._out, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(message["params"]["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded":
            entry = message["params"]["entry"]
            text, url = entry["text"], entry.get("url", "")
            is_expected = "net::ERR_" in text and url.startswith(tuple(self._stopped))
            if entry["level"] == "error" and not is_expected:
                self.problems.append(f"{text} {url}")


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A tab of a new browser, with a profile in this directory."""
    program = chromium()
    assert program is not None
    (its_in, to), (out, its_out) = os.pipe(), os.pipe()

    def as_three_and_four() -> None:
        # They may be 3 and 4 themselves, the wrong way round.
        spares = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (its_in, its_out)]
        for number, spare in enumerate(spares, start=3):
            os.dup2(spare, number)

    process = subprocess.Popen(
        [program, *_FLAGS, f"--user-data-dir={profile}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=as_three_and_four,
        close_fds=False,
        start_new_session=True,
    )
    os.close(its_in)
    os.close(its_out)
    try:
        yield Tab(to, out)
    finally:
        os.close(to)  # which ends it
        os.close(out)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
    """Serve the page and open it; the browser leaves first."""
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
