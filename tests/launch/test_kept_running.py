from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sharing import soon

from juggler.launch import ssh
from juggler.launch.engine import Launch
from juggler.launch.ssh import Host, Hosts, SshRun
from juggler.runtime.actors.supervisor import RestartPolicy


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[SshRun]:
    policy = RestartPolicy(first_delay=0.05, quarantine_after=99, most_in_window=99)
    monkeypatch.setattr(ssh, "_POLICY", policy)
    hosts = Hosts("127.0.0.1:0", (Host("a", env_runners=1, learners=1),))
    made = SshRun(Launch(tmp_path / "run", ""), hosts, said.append)
    (tmp_path / "run.launch").mkdir()
    made._process = subprocess.Popen(["true"])  # instead of a driver
    yield made
    made.tear_down()
    assert not made._workers.pids()


def looked(run: SshRun, said: list[str]) -> int:
    """Let the run look; return the number of messages so far."""
    run.poll()
    return len(said)


def test_what_fails_is_started_again_and_its_last_line_is_told(
    tmp_path: Path, said: list[str], run: SshRun
) -> None:
    runs = tmp_path / "runs"
    run._start("a worker", ["sh", "-c", f"echo run >> {runs}; echo first; echo no driver; exit 3"])
    soon(lambda: looked(run, said) >= 2, "it is started again")
    assert runs.read_text().count("run") >= 2
    assert said[0].startswith("a worker ended: exit code 3, its last output: first | no driver; ")
    assert "starting it again in" in said[0]
    log = tmp_path / "run.launch" / "logs" / "a-worker.log"
    assert log.read_text().startswith("first\nno driver\n")


def test_what_ends_in_order_stays_down(tmp_path: Path, said: list[str], run: SshRun) -> None:
    runs = tmp_path / "runs"
    run._start("a worker", ["sh", "-c", f"echo run >> {runs}"])
    soon(lambda: not run._exits.empty(), "it has ended")
    run.poll()
    assert runs.read_text() == "run\n"
    assert not said
    assert not run._workers.pids()


def test_a_command_that_is_not_there_is_told(said: list[str], run: SshRun) -> None:
    run._start("a worker", ["/no/such/command"])
    soon(lambda: looked(run, said), "it is told")
    assert said[0].startswith("a worker ended: it could not be started (FileNotFoundError: ")
