"""Runs that are taken down, kept running and scaled, despite faults."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import eventually

from juggler.cli import scale
from juggler.launch import slurm, ssh
from juggler.launch.engine import ROLES, Launch, LaunchError, NoAnswer
from juggler.launch.slurm import SlurmRun, job_script
from juggler.launch.ssh import Host, Hosts, SshRun, shared_out


@pytest.mark.slow
def test_a_further_signal_cuts_short_the_wait_for_workers_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts("127.0.0.1:0", (Host("a", env_runners=1, learners=1),))
    run = SshRun(Launch(tmp_path / "run", ""), hosts, lambda text: None)
    (tmp_path / "run.launch").mkdir()
    run._start("a worker", ["sleep", "600"])
    eventually(run._workers.pids, "it runs")
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
def test_a_signal_between_two_lives_of_a_job_ends_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = tmp_path / "twice"
    twice.write_text("[ -e ran ] && exec sleep 60; touch ran; exit 1\n")
    monkeypatch.chdir(tmp_path)
    about = {"tls": [], "driver": ["driver"], "command": ["bash", str(twice)]}
    script = job_script("worker", "", **about).replace("sleep 5\n", "touch pauses; sleep 1\n")
    job = subprocess.Popen(["bash", "-c", script])
    try:
        eventually(lambda: (tmp_path / "pauses").exists(), "the first life has ended")
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        job.kill()
        job.wait()


@pytest.mark.long
def test_a_worker_that_is_being_submitted_when_the_run_ends_is_cancelled_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ending driver dismisses its workers; its job takes them as lost."""
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
    monkeypatch.chdir(tmp_path)
    about = {"every": ["0.1"], "names": ["name"], "counts": ["wanted"], "scripts": ["script"]}
    script = job_script("driver", "", **about, status_file=["status"], command=["the_run"])
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(["bash", "-c", script], env=path, timeout=30).returncode == 0
    time.sleep(1.5)  # for what might be submitted yet
    assert (tmp_path / "jobs").read_text() == ""
    assert (tmp_path / "status").read_text() == "0\n"


# Kept running.


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[SshRun]:
    policy = replace(ssh._POLICY, first_delay=0.05)
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


@pytest.mark.slow
def test_what_fails_is_started_again_and_its_last_line_is_told(
    tmp_path: Path, said: list[str], run: SshRun
) -> None:
    runs = tmp_path / "runs"
    run._start("a worker", ["sh", "-c", f"echo run >> {runs}; echo first; echo no driver; exit 3"])
    eventually(lambda: looked(run, said) >= 2, "it is started again")
    assert runs.read_text().count("run") >= 2
    assert said[0].startswith("a worker ended: exit code 3, its last output: first | no driver; ")
    assert "starting it again in" in said[0]
    log = tmp_path / "run.launch" / "logs" / "a-worker.log"
    assert log.read_text().startswith("first\nno driver\n")


@pytest.mark.slow
def test_what_ends_in_order_stays_down(tmp_path: Path, said: list[str], run: SshRun) -> None:
    runs = tmp_path / "runs"
    run._start("a worker", ["sh", "-c", f"echo run >> {runs}"])
    eventually(lambda: not run._exits.empty(), "it has ended")
    run.poll()
    assert runs.read_text() == "run\n"
    assert not said
    assert not run._workers.pids()


@pytest.mark.slow
def test_a_command_that_is_not_there_is_told(said: list[str], run: SshRun) -> None:
    run._start("a worker", ["/no/such/command"])
    eventually(lambda: looked(run, said), "it is told")
    assert said[0].startswith("a worker ended: it could not be started (FileNotFoundError: ")


# Scaling.


def _launch(tmp_path: Path) -> Launch:
    launch = Launch(tmp_path / "run")
    launch.directory.mkdir()
    return launch


@given(
    st.integers(0, 5000),
    st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(lambda each: sum(each) > 0),
)
def test_shares_add_up_and_are_off_by_less_than_one(total: int, weights: list[int]) -> None:
    shares = shared_out(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1
        assert weight or not share


def test_wanted_numbers_are_read_by_others_until_the_run_is_over(tmp_path: Path) -> None:
    launch = _launch(tmp_path)
    assert not launch.is_running
    launch.begin_counts({"learner": 1, "envrunner": 16, "evaluator": 0})
    other = Launch(tmp_path / "run")
    assert other.scale("envrunner", 20) == "envrunner: 20 instead of 16"
    assert (launch.count("learner"), launch.count("envrunner")) == (1, 20)
    assert other.scale("learner", 2) == "learner: 2 instead of 1"
    launch.forget_counts()
    assert not other.is_running


def test_the_numbers_of_a_launch_that_was_killed_are_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = _launch(tmp_path)
    with launch.read_here():
        launch.begin_counts(dict.fromkeys(ROLES, 1))
        assert scale.run([str(tmp_path / "run"), "--evaluators", "2"]) == 0
        assert launch.count("evaluator") == 2
        again = launch.read_here()
        with pytest.raises(LaunchError, match="started"), again:
            pass
        assert launch.is_running
        left = {path.name: path.read_text() for path in launch.directory.iterdir()}
    assert not list(launch.directory.iterdir())
    for name, text in left.items():  # as after SIGKILL
        (launch.directory / name).write_text(text)
    capsys.readouterr()
    assert scale.run([str(tmp_path / "run"), "--env-runners", "2"]) == 1
    assert "was killed, so its workers" in capsys.readouterr().err
    with launch.read_here():
        assert not launch.is_abandoned, "a launch goes on with the run"


def test_no_link_is_followed_when_wanted_numbers_are_written(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    launch = _launch(tmp_path)
    (launch.directory / "learner.count.new").symlink_to(victim)
    launch.begin_counts(dict.fromkeys(ROLES, 1))
    (launch.directory / "learner.count.new").symlink_to(victim)
    launch.scale("learner", 2)
    assert launch.count("learner") == 2
    (launch.directory / "reader.lock").symlink_to(victim)
    with pytest.raises(LaunchError, match="cannot write"), launch.read_here():
        pass
    assert not launch.is_abandoned
    launch.count_file("learner").unlink()
    launch.count_file("learner").symlink_to(victim)
    with pytest.raises(LaunchError, match="not a plain file"):
        launch.count("learner")
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("named", ["rm", "kubernetes --all", "kubernetes lab more", "swarm lab"])
def test_an_engine_that_there_is_not_scales_nothing(tmp_path: Path, named: str) -> None:
    launch = _launch(tmp_path)
    launch.begin_counts(dict.fromkeys(ROLES, 1), named)
    with pytest.raises(LaunchError, match="names no engine"):
        launch.scale("learner", 2)
    assert launch.count("learner") == 1
