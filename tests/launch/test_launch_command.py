"""`juggler launch` without an engine: what it would do, and mistakes."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from juggler.cli import launch

HOSTS = """
driver = "10.77.0.1:5005"
[hosts."me@gpu1"]
learners = 1
[hosts.cpu1]
env_runners = 2
evaluators = 1
directory = "/my data"
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hosts.toml"
    path.write_text(HOSTS)
    return path


def test_a_dry_run_prints_every_command_and_makes_nothing(
    hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ssh", "cartpole", "--hosts", str(hosts), "--run-dir", "run", "--dry-run"]
    assert launch.run([*arguments, "--", "--lr", "1e-3"]) == 0
    printed = capsys.readouterr().out
    names = [line for line in printed.splitlines() if line.startswith("#")]
    assert names == [
        "# the driver",
        "# learner 0 on me@gpu1",
        "# envrunner 0 on cpu1",
        "# envrunner 1 on cpu1",
        "# evaluator 0 on cpu1",
    ]
    assert "juggler driver cartpole --run-dir " in printed
    assert "--lr 1e-3 --num-learners 1" in printed
    assert "--advertise gpu1:0" in printed
    assert "cd '\"'\"'/my data'\"'\"' && " in printed  # quoted for the shell there, and here
    assert [path.name for path in hosts.parent.iterdir()] == ["hosts.toml"]


@pytest.mark.long
def test_scripts_of_slurm_are_scripts_that_a_shell_can_read(
    hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["slurm", "cartpole", "--env-runners", "4", "--time", "1:00:00"]
    arguments += ["--run-dir", "a %j run", "--evaluators", "1"]
    assert launch.run([*arguments, "--sbatch-learner=--gres=gpu:1", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    scripts = printed.split("#!/bin/bash\n")[1:]
    assert len(scripts) == 4
    for script in scripts:
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr
        assert "#SBATCH --time=1:00:00\n" in script
        options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
        assert {len(shlex.split(option[1:])) for option in options} == {2}, "or Slurm refuses it"
        assert "a %%j run.launch/logs/" in script
    assert ["--gres=gpu:1" in script for script in scripts] == [False, True, False, False]
    assert "--bind 0.0.0.0:0" in scripts[1]
    assert "juggler evaluator --driver " in scripts[3]


def test_a_script_of_slurm_that_is_not_submitted_is_only_named(
    hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["slurm", "cartpole", "--run-dir", "run", "--evaluators", "0", "--dry-run"]
    assert launch.run(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count("#!/bin/bash\n") == 3
    assert "evaluator.sbatch\n# Nothing is submitted of it now" in printed


def test_learners_get_the_receivers_that_were_asked_for(
    hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--run-dir", "run", "--receivers", "2"]
    for engine in (["ssh", "--hosts", str(hosts)], ["slurm"], ["swarm"]):
        assert launch.run([*engine, "cartpole", *own, "--dry-run"]) == 0
        printed = capsys.readouterr().out
        assert printed.count("--receivers=2") == 1
        assert re.search("learner.*--driver.*--receivers=2", printed)
    assert launch.run(["slurm", "cartpole", *own[:-1], "17", "--dry-run"]) == 1
    assert "--receivers 17: must be from 0 to 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", ["3", "0", "2:01", "0:2:1", "1-0", "1-2:30", "0-0:2:1", "unlimited"]
)
def test_time_limits_are_those_of_slurm(hosts: Path, given: str) -> None:
    arguments = ["slurm", "cartpole", "--run-dir", "run", "--dry-run"]
    assert launch.run([*arguments, "--time", given]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["slurn"], "no engine 'slurn': did you mean 'slurm'?"),
        (["ssh", "cartpol", "--hosts", "hosts.toml"], "did you mean 'cartpole'?"),
        (["ssh", "cartpole", "--hosts", "none.toml"], "cannot read the file of hosts none.toml"),
        (
            ["slurm", "cartpole", "--env-runners", "0", "--dry-run"],
            "--env-runners 0: must be from 1 to 4096",
        ),
        (
            ["slurm", "cartpole", "--learners", "5000", "--dry-run"],
            "--learners 5000: must be from 1 to 4096",
        ),
        (
            ["slurm", "cartpole", "--evaluators", "-1", "--dry-run"],
            "--evaluators -1: must be from 0 to 4096",
        ),
        (
            ["slurm", "cartpole", "--time", "4h", "--dry-run"],
            "--time 4h: give minutes, or HOURS:MINUTES:SECONDS, or DAYS-HOURS:MINUTES:SECONDS",
        ),
        (
            ["slurm", "cartpole", "--time", "0:1:59", "--dry-run"],
            "--time 0:1:59: must be more than 2 minutes",
        ),
        (["slurm", "cartpole", "--", "--evaluation-video", "5"], "there are no evaluations"),
        (
            ["slurm", "cartpole", "--sbatch", "account=lab", "--dry-run"],
            "'account=lab': write an option of sbatch as --account=lab",
        ),
        (
            ["slurm", "cartpole", "--sbatch=--account=lab\ntouch there", "--dry-run"],
            "leave out what cannot be printed",
        ),
        (
            ["slurm", "cartpole", "--partition", "cpu\ntouch there", "--dry-run"],
            "leave out what cannot be printed",
        ),
        (
            ["slurm", "cartpole", "--run-dir", "run\ntouch there", "--dry-run"],
            "leave out what cannot be printed",
        ),
        (
            ["ssh", "cartpole", "--hosts", "hosts.toml", "--", "--gateway", "127.0.0.1:5005"],
            "gateway = '127.0.0.1:5005': EnvRunners of this engine make environments",
        ),
        (
            ["slurm", "cartpole", "--dry-run", "--", "--gateway", "127.0.0.1:5005"],
            "Launch it on kubernetes; or start its processes yourself",
        ),
        (
            ["swarm", "cartpole", "--dry-run", "--", "--gateway", "127.0.0.1:5005"],
            "`juggler envrunner --gateway HOST:PORT`",
        ),
        (
            ["swarm", "cartpole", "--image", "x", "--compose", "none.yaml", "--dry-run"],
            "--compose none.yaml: there is no such file",
        ),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    hosts: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.run(arguments) in (1, 2)
    assert said in capsys.readouterr().err
    assert [path.name for path in hosts.parent.iterdir()] == ["hosts.toml"]


def test_a_host_without_slurm_is_told(
    hosts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(hosts.parent))
    assert launch.run(["slurm", "cartpole", "--run-dir", "run"]) == 1
    assert "there is no command `squeue` here" in capsys.readouterr().err
