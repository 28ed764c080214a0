"""Runs that are taken down although something goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from support.sharing import soon

from juggler.launch import slurm, ssh
from juggler.launch.engine import ROLES, Launch, LaunchError, NoAnswer
from juggler.launch.slurm import DRIVER_SCRIPT, WORKER_SCRIPT, SlurmRun
from juggler.launch.ssh import Host, Hosts, SshRun


def test_a_further_signal_cuts_short_the_wait_for_workers_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts("127.0.0.1:0", (Host("a", env_runners=1, learners=1),))
    run = SshRun(Launch(tmp_path / "run", ""), hosts, lambda text: None)
    (tmp_path / "run.launch").mkdir()
    run._start("a worker", ["sleep", "600"])
    soon(run._workers.pids, "it runs")
    (pid,) = run._workers.pids().values()
    run._process = subprocess.Popen(["true"])
    run._process.wait()
    waits = iter(range(9))  # workers have 30 s without another signal
    wait = time.sleep

    def hurry(_: float) -> None:
        run.signals.append(next(waits))
        wait(0.01)

    monkeypatch.setattr(time, "sleep", hurry)
    run.tear_down()
    assert not Path(f"/proc/{pid}").exists()


def test_certificates_leave_the_good_hosts_where_another_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def answer(host: Host, command: str, given: bytes = b"") -> tuple[int, str]:
        asked.append((host.name, command))
        return (
            (255, "no route to host")
            if host.name == "bad"
            else (0, f"juggler {version('juggler')}")
        )

    monkeypatch.setattr(ssh, "_asked", answer)
    hosts = Hosts("127.0.0.1:0", (Host("good", learners=1), Host("bad", env_runners=1)))
    with pytest.raises(LaunchError, match="route"):
        SshRun(Launch(tmp_path / "run", "cartpole"), hosts, lambda text: None).submit()
    of_good = [command for name, command in asked if name == "good"]
    assert "tar -x" in of_good[-2]
    assert of_good[-1].startswith("rm -rf")
    assert [name for name, _ in asked].count("bad") == 1, "it has nothing to delete"


def test_jobs_of_a_role_that_slurm_does_not_cancel_leave_no_others_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(*words: str) -> str:
        asked.append(words[-1])
        if words[-1].endswith("-driver"):
            raise NoAnswer("slurmctld is busy")
        return ""

    monkeypatch.setattr(slurm, "_ask", ask)
    run = SlurmRun(Launch(tmp_path / "run", ""), dict.fromkeys(ROLES, 1), print)
    with pytest.raises(NoAnswer, match="busy"):
        run.tear_down()
    assert [each.rpartition("-")[2] for each in asked] == ["driver", *ROLES]


@pytest.mark.long
def test_a_signal_between_two_lives_of_a_job_ends_the_next_one(tmp_path: Path) -> None:
    twice = tmp_path / "twice"
    twice.write_text("[ -e ran ] && exec sleep 60; touch ran; exit 1\n")
    about = {"options": "", "work": tmp_path, "tls": "", "driver": "driver"}
    script = WORKER_SCRIPT.format(**about, command=f"bash {twice}").replace(
        "sleep 5\n", "touch pauses; sleep 1\n"
    )
    job = subprocess.Popen(["bash", "-c", script])
    try:
        soon(lambda: (tmp_path / "pauses").exists(), "the first life has ended")
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        job.kill()
        job.wait()


@pytest.mark.long
def test_a_worker_that_is_being_submitted_when_the_run_ends_is_cancelled_too(
    tmp_path: Path,
) -> None:
    """A driver that ends sends its workers home, and its job takes them for lost ones."""
    programs = {
        "squeue": "cat jobs",
        "sbatch": "touch begun; sleep 1; echo 7 >> jobs",
        "scancel": ": > jobs",
        "the_run": "while [ ! -e begun ]; do sleep 0.01; done",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "wanted").write_text("1\n")
    (tmp_path / "jobs").touch()
    about = {"options": "", "work": tmp_path, "every": 0.1, "status": "status", "counts": "wanted"}
    about |= {"keep": "    keep name wanted script", "drop": "  scancel --name=name"}
    script = DRIVER_SCRIPT.format(**about, command="the_run")
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(["bash", "-c", script], env=path, timeout=30).returncode == 0
    time.sleep(1.5)  # for what might be submitted yet
    assert (tmp_path / "jobs").read_text() == ""
    assert (tmp_path / "status").read_text() == "0\n"
