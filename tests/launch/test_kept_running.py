from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from juggler.launch import ssh as kept_running
from juggler.launch.ssh import KeptRunning
from juggler.runtime.actors.supervisor import RestartPolicy


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def kept(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], KeptRunning]]:
    monkeypatch.setattr(kept_running, "_POLICY", RestartPolicy(first_delay=0.05))
    made: list[KeptRunning] = []

    def keep(script: str) -> KeptRunning:
        made.append(KeptRunning("a worker", ["sh", "-c", script], tmp_path / "log", said.append))
        return made[-1]

    yield keep
    for each in made:
        each.end(signal.SIGKILL)
        _look_until(each, lambda each=each: not each.running)  # type: ignore[misc]


def _look_until(each: KeptRunning, what: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        each.look()
        time.sleep(0.01)


@pytest.mark.long
def test_what_fails_is_started_again_and_its_last_line_is_told(
    tmp_path: Path, said: list[str], kept: Callable[[str], KeptRunning]
) -> None:
    runs = tmp_path / "runs"
    worker = kept(f"echo run >> {runs}; echo first; echo no driver; exit 3")
    _look_until(worker, lambda: len(said) >= 2)
    assert runs.read_text().count("run") >= 2
    assert said[0].startswith("a worker ended with status 3: no driver; starting it again in")
    assert (tmp_path / "log").read_text().startswith("first\nno driver\n")


@pytest.mark.long
def test_what_ends_in_order_stays_down(
    tmp_path: Path, said: list[str], kept: Callable[[str], KeptRunning]
) -> None:
    runs = tmp_path / "runs"
    worker = kept(f"echo run >> {runs}")
    _look_until(worker, lambda: runs.exists())
    _look_until(worker, lambda: not worker.running)
    for _ in range(20):
        worker.look()
        time.sleep(0.01)
    assert runs.read_text() == "run\n"
    assert not said


@pytest.mark.long
def test_what_is_ended_is_told_of_the_signal_and_stays_down(
    tmp_path: Path, said: list[str], kept: Callable[[str], KeptRunning]
) -> None:
    ready = tmp_path / "ready"
    worker = kept(f"trap 'exit 9' TERM; touch {ready}; sleep 60 & wait")
    _look_until(worker, ready.exists)
    worker.end(signal.SIGTERM)
    _look_until(worker, lambda: not worker.running)
    assert not said


def test_a_command_that_is_not_there_is_told(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = KeptRunning("a worker", ["/no/such/command"], tmp_path / "log", said.append)
    worker.look()
    assert said[0].startswith("a worker cannot start it: [Errno 2] No such file or directory")
    assert not worker.running
