from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.sharing import soon

from juggler.launch import ssh
from juggler.launch.ssh import KeptRunning
from juggler.runtime.actors.supervisor import RestartPolicy


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def kept(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., KeptRunning]]:
    monkeypatch.setattr(ssh, "_POLICY", RestartPolicy(first_delay=0.05))
    made: list[KeptRunning] = []

    def keep(*command: str) -> KeptRunning:
        made.append(KeptRunning("a worker", command, tmp_path / "log", said.append))
        made[-1].start()
        return made[-1]

    yield keep
    for each in made:
        each.end(signal.SIGKILL)
        each.join(30)
        assert not each.is_alive()


def test_what_fails_is_started_again_and_its_last_line_is_told(
    tmp_path: Path, said: list[str], kept: Callable[..., KeptRunning]
) -> None:
    runs = tmp_path / "runs"
    kept("sh", "-c", f"echo run >> {runs}; echo first; echo no driver; exit 3")
    soon(lambda: len(said) >= 2, "it is started again")
    assert runs.read_text().count("run") >= 2
    assert said[0].startswith("a worker ended with status 3: no driver; starting it again in")
    assert (tmp_path / "log").read_text().startswith("first\nno driver\n")


def test_what_ends_in_order_stays_down(
    tmp_path: Path, said: list[str], kept: Callable[..., KeptRunning]
) -> None:
    runs = tmp_path / "runs"
    worker = kept("sh", "-c", f"echo run >> {runs}")
    worker.join(30)
    assert not worker.is_alive()
    assert runs.read_text() == "run\n"
    assert not said


def test_a_command_that_is_not_there_is_told(
    said: list[str], kept: Callable[..., KeptRunning]
) -> None:
    kept("/no/such/command")
    soon(lambda: said, "it is told")
    assert said[0].startswith("a worker cannot start it: [Errno 2] No such file or directory")
