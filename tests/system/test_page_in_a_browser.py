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
from support.made_files import line, made
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

    def press_enter(self) -> None:
        key: dict[str, Any] = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self._call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self._call("Input.dispatchKeyEvent", type="keyUp", **key)

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


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
        assert opened.problems == [], "the console has errors"


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


def test_a_token_is_asked_for_and_a_wrong_one_is_refused(tab: Tab, tmp_path: Path) -> None:
    made(tmp_path / "run", [line(100, 1.0)])
    with serve_page([tmp_path], free_address(), token="a secret") as url:
        tab.open(url)
        tab.wait_for("document.querySelector('#login').checkVisibility()")
        tab.problems[:] = [each for each in tab.problems if "401" not in each]
        for token in ("wrong", "a secret"):
            tab.value(f"document.querySelector('#token').value = {json.dumps(token)}")
            tab.value("document.querySelector('#token').focus()")
            tab.press_enter()
            if token == "wrong":
                tab.wait_for("document.querySelector('#refused').innerText.includes('not the')")
        tab.wait_for("document.querySelectorAll('#runs tbody tr').length === 1")
        assert "secret" not in tab.value("location.href + document.cookie")
        tab.open("about:blank")
    tab.problems[:] = [each for each in tab.problems if "401" not in each]
