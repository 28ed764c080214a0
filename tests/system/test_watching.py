"""What the page on operations tells people to type, with a run that it is about."""

from __future__ import annotations

import json
import re
import shlex
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.network import free_address
from support.place import (
    REPOSITORY,
    Command,
    Place,
    eventually,
    status_of,
    trained_steps,
)

PAGE = "docs/operations.md"


def _lines() -> list[str]:
    text = (REPOSITORY / PAGE).read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.S | re.M)
    return [line for block in blocks for line in block.splitlines()]


class Ports:
    """Free ones in place of those on the page."""

    def __init__(self) -> None:
        self._free: dict[str, str] = {}

    def here(self, text: str) -> str:
        return re.sub(r"127\.0\.0\.1:\d+", lambda match: self.of(match[0]), text)

    def of(self, address: str) -> str:
        if address not in self._free:
            self._free[address] = free_address()
        return self._free[address]


class Page:
    """The page's commands, with ports that are free here."""

    def __init__(self, place: Place) -> None:
        self.ports = Ports()
        self._place = place

    def command(self, *beginning: str, options: tuple[str, ...] = ()) -> Command:
        """Start the only command of the page that begins so."""
        found = [
            words for words in map(_words, _lines()) if words[: len(beginning)] == [*beginning]
        ]
        assert len(found) == 1, f"{beginning}: {found}"
        program, *arguments = found[0]
        assert program == "juggler"
        return self._place.start(*(self.ports.here(each) for each in arguments), *options)

    def answer(self, *beginning: str) -> tuple[int, str]:
        command = self.command(*beginning)
        return command.wait(60), command.output

    def worker(self, status: dict[str, Any], name: str) -> dict[str, Any]:
        (found,) = (each for each in status["workers"] if each["worker_id"] == name)
        return dict(found)

    def status(self) -> dict[str, Any]:
        code, output = self.answer("juggler", "status", "127.0.0.1:5005", "--once", "--json")
        assert code == 0, output
        return dict(json.loads(output))

    def metrics(self) -> str:
        (curl,) = (words for words in map(_words, _lines()) if words[0] == "curl")
        with urllib.request.urlopen(self.ports.here(curl[-1]), timeout=10) as answer:
            return str(answer.read().decode())


def _words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def _ends(page: Page, *beginning: str) -> Callable[[], bool]:
    return lambda: page.answer(*beginning)[0] == 0


@pytest.mark.long
def test_every_command_of_the_page_does_what_it_says(place: Place) -> None:
    page = Page(place)
    driver = page.command("juggler", "driver", options=("--stop-return", "501"))
    driver.wait_for("waiting for workers at")
    assert page.answer("juggler", "healthcheck", "127.0.0.1:5005")[0] == 0
    learner = page.command("juggler", "learner")
    ready = ("juggler", "healthcheck", "127.0.0.1:5006", "--service", "readiness")
    code, said = page.answer(*ready)
    assert (code, len(said.splitlines())) == (1, 1), said
    assert "does not serve" in said
    runner = page.command("juggler", "envrunner")
    eventually(_ends(page, *ready), 60, lambda: learner.output)
    ready = ("juggler", "healthcheck", "127.0.0.1:5007")
    eventually(_ends(page, *ready), 60, lambda: runner.output)
    eventually(lambda: trained_steps(place.path / "runs/watched") > 0, 60, lambda: driver.output)

    live = page.command("juggler", "status", "runs/watched")
    status = page.status()
    assert status["phase"] == "training"
    worker = page.worker(status, "envrunner-0")
    assert (worker["state"], worker["pid"]) == ("ready", runner.process.pid)
    assert worker["resources"]["resident_bytes"] > 10e6
    steps = status["steps"]
    booked = steps["trained"] + sum(steps["dropped"].values()) + steps["in_flight"]
    assert steps["sampled"] == booked
    metrics = page.metrics()
    of_others = (
        "juggler_module_",
        "juggler_agent_",
        "juggler_league_",
        "juggler_player_",
        "juggler_gateway_",
    )
    for each in set(re.findall(r"`(juggler_\w+)", (REPOSITORY / PAGE).read_text())):
        if each.startswith(of_others):  # of runs that have such
            continue
        if each not in (
            "juggler_env_steps_dropped_total",
            "juggler_episode_evaluation_return_mean",
            "juggler_worker_counts_total",  # of gateways
        ):
            assert re.search(rf"^{each}\w*[{{ ]", metrics, re.M), f"{each} is not in\n{metrics}"

    records = [json.loads(line) for line in runner.output.splitlines()]
    record = next(each for each in records if "attached" in each["message"])
    (example,) = re.findall(r"^```json\n(.*?)^```$", (REPOSITORY / PAGE).read_text(), re.S | re.M)
    assert record.keys() == json.loads(example).keys()
    assert (record["run"], record["worker"]) == (status["run_id"], "envrunner-0")
    assert record["incarnation"] == worker["incarnation"]

    live.wait_for("envrunner-0", 30)
    driver.interrupt()
    assert driver.wait(30) == 130, driver.output
    assert live.wait(30) == 0, live.output
    assert "envrunner-0" in live.output
    for each in (learner, runner):
        assert each.wait(30) == 0, each.output
    assert not (place.path / "runs/watched/driver.json").exists()
    code, said = page.answer("juggler", "status", "runs/watched")
    assert code == 1
    assert "is not running: it ended (" in said


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("nowhere", "is neither a directory nor an"),
        (".", "neither HOST:PORT nor the"),
        ("127.0.0.1:1", "no status from 127.0.0.1:1"),
    ],
)
def test_where_there_is_no_run_status_says_so(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str], where: str, words: str
) -> None:
    assert status_of("status", where) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


@pytest.mark.usefixtures("local_workers")
def test_an_address_for_metrics_that_is_taken_ends_the_command_and_leaves_nothing(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert status_of("train", "cartpole", "--run-dir", "run", "--metrics-bind", address) == 1
    said = capsys.readouterr().err
    assert f"cannot serve metrics on {address}: Address already in use" in said
    assert not Path("run").exists()
