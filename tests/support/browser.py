"""A headless Chromium, driven over a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
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
        """Note that the test now stops the server with this address, while the page asks it."""
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
        """Wait until an expression is true; returns what it gives. It may fail before that, since
        a page that is loading has nothing yet."""
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

    def mouse(self, kind: str, element: str) -> None:
        """ "mousePressed" or "mouseReleased" in the middle of what an expression gives."""
        x, y = self.value(
            "(e => { e.scrollIntoView({block: 'nearest'}); const at = e.getBoundingClientRect();"
            f" return [at.x + at.width / 2, at.y + at.height / 2]; }})({element})"
        )
        one = {"button": "left", "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **one)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write what is seen into a PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=whole, **_clip(self))
        path.write_bytes(base64.b64decode(shot["data"]))

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


def _clip(tab: Tab) -> dict[str, Any]:
    width, height = tab.value("[innerWidth, document.documentElement.scrollHeight]")
    return {"clip": {"x": 0, "y": 0, "width": width, "height": min(height, 8000), "scale": 1}}


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A tab of a new browser, with a fresh profile in this directory."""
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
