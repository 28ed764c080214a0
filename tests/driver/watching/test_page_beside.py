"""The page's own process: ends with the run, never ends it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
from support.made_files import made
from support.processes import eventually

from juggler.driver.callbacks import Run
from juggler.driver.watching.page_server import PageProcess


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
