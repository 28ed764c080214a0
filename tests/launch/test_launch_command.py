"""`juggler launch` without an engine: what it would do, and mistakes."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import eventually

from juggler.cli import launch, worker
from juggler.launch import slurm
from juggler.launch.engine import ROLES, Launch, LaunchError
from juggler.launch.slurm import SlurmRun
from juggler.launch.ssh import Host, read_hosts
from juggler.learner.process import learner_worker
from juggler.learner.process.learner_program import LearnerProgram

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


def test_envrunners_that_start_simulators_are_gateways(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["slurm", "--run-dir", "run", "--dry-run", "--", "--env", "game"]
    assert launch.run([*arguments, "--simulator", "./game {address}"]) == 0
    script = capsys.readouterr().out.split("#!/bin/bash\n")[3]
    assert "envrunner --driver " in script
    assert " --gateway 127.0.0.1:0" in script


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["slurm", "--sbatch=--account=lab\ntouch there"], "leave out unprintable characters"),
        (["slurm", "--partition", "cpu\ntouch there"], "leave out unprintable characters"),
        (["slurm", "--run-dir", "run\ntouch there"], "leave out unprintable characters"),
        (["ssh", "--hosts", "hosts.toml", "--", "--gateway", "127.0.0.1:5005"], "gateway = "),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    hosts: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, *options = arguments
    assert launch.run([engine, "cartpole", "--dry-run", *options]) == 1
    assert said in capsys.readouterr().err
    assert [path.name for path in hosts.parent.iterdir()] == ["hosts.toml"]


@pytest.mark.slow
def test_a_host_without_slurm_is_told(
    hosts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(hosts.parent))
    assert launch.run(["slurm", "cartpole", "--run-dir", "run"]) == 1
    assert "the command `squeue` is not installed here" in capsys.readouterr().err


def test_runs_of_the_same_name_in_other_directories_have_names_of_their_own() -> None:
    one, other = Launch(Path("/a/run"), ""), Launch(Path("/b/run"), "")
    assert one.tag.startswith("run-")
    assert one.tag != other.tag
    assert one.tag == Launch(Path("/a/run"), "cartpole").tag


@pytest.mark.parametrize(
    ("options", "advertised"),
    [
        (["--bind", "0.0.0.0:0"], f"{socket.gethostname()}:0"),
        (["--bind", "0.0.0.0:5006", "--advertise", "gpu1:5006"], "gpu1:5006"),
        (["--bind", "127.0.0.1:0"], ""),
    ],
)
def test_a_learner_that_listens_everywhere_is_dialed_at_the_name_of_its_host(
    monkeypatch: pytest.MonkeyPatch, options: list[str], advertised: str
) -> None:
    programs: list[LearnerProgram] = []
    monkeypatch.setattr(learner_worker, "main", programs.append)
    assert (
        worker.run(["learner", "--driver", "127.0.0.1:1", "--reattach-seconds", "0", *options]) == 0
    )
    assert [each.advertise for each in programs] == [advertised]


GOOD = """
driver = "10.77.0.1:5005"
juggler = "/opt/juggler/bin/juggler"

[hosts."root@gpu1"]
learners = 2

[hosts.cpu1]
env_runners = 16
directory = "/data"
juggler = "juggler"
"""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    return path


def test_hosts_have_what_the_file_says_of_all_and_of_each(tmp_path: Path) -> None:
    hosts = read_hosts(_file(tmp_path, GOOD))
    assert hosts.driver == "10.77.0.1:5005"
    assert hosts.hosts == (
        Host("root@gpu1", learners=2, juggler="/opt/juggler/bin/juggler"),
        Host("cpu1", env_runners=16, directory="/data", juggler="juggler"),
    )


def test_certificates_are_for_the_driver_and_the_hosts_of_learners(tmp_path: Path) -> None:
    assert read_hosts(_file(tmp_path, GOOD)).dialed == ["10.77.0.1", "gpu1"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("learners = 2", "learnes = 2", "unknown field `learnes`"),
        ("learners = 2", 'learners = "two"', "got `str` - at `$.hosts[0].learners`"),
        ("learners = 2", "learners = 0", "no host has learners: a run needs"),
        ("env_runners = 16", "env_runners = -1", "Expected `int` >= 0"),
        ('"10.77.0.1:5005"', '"10.77.0.1"', "'10.77.0.1' cannot be dialed: give"),
        ('"10.77.0.1:5005"', '"0.0.0.0:5005"', "driver = '0.0.0.0:5005' cannot be"),
        ('"10.77.0.1:5005"', '"[::]:5005"', "driver = '[::]:5005' cannot be"),
        ('"10.77.0.1:5005"', '"10.77.0.1:0"', "driver = '10.77.0.1:0' cannot be"),
        ('driver = "10.77.0.1:5005"', "", "missing required field `driver`"),
        ("juggler =", "jugler =", "unknown field `jugler`"),
        ('"root@gpu1"', '"-oProxyCommand=x"', "'-oProxyCommand=x' is not the"),
        ("[hosts.cpu1]", "[hosts.cpu1", "is not valid TOML"),
        ('directory = "/data"', "directory = 3", "Expected `str`, got `int`"),
    ],
)
def test_a_mistake_in_the_file_is_told(tmp_path: Path, before: str, after: str, said: str) -> None:
    assert before in GOOD
    with pytest.raises(LaunchError) as raised:
        read_hosts(_file(tmp_path, GOOD.replace(before, after, 1)))
    assert said in str(raised.value)
    assert "hosts.toml" in str(raised.value)


def test_a_file_without_hosts_is_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no host has learners"):
        read_hosts(_file(tmp_path, 'driver = "a:1"'))
    with pytest.raises(LaunchError, match="cannot read the file of hosts"):
        read_hosts(tmp_path / "missing.toml")


# Slurm ends a script that has queued again. This one sees a failure, and ends by itself.
_COMMAND = "#!/bin/bash\necho $(basename $0) $* >> calls\nexit 1\n"
_SQUEUE = '#!/bin/bash\n[[ "$*" == *--jobs=* ]] && cat state\nexit 0\n'
# With its learner preempted too, a driver cannot write its last checkpoint, and ends with 1.
_DRIVER = "#!/bin/bash\ntrap 'exit 1' TERM\ntouch runs\nwhile :; do sleep 0.01; done\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script of a driver with two workers, in its own directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "_KEEP_SECONDS", 0.05)
    for name in ("sbatch", "scancel", "scontrol"):
        (tmp_path / name).write_text(_COMMAND)
    (tmp_path / "squeue").write_text(_SQUEUE)
    (tmp_path / "driver").write_text(_DRIVER)
    for path in tmp_path.iterdir():
        path.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(Launch, "driver", lambda *_: [str(tmp_path / "driver")])
    launch = Launch(tmp_path / "run", "cartpole", insecure=True)
    launch.directory.mkdir()
    run = SlurmRun(launch, dict.fromkeys(ROLES, 1), lambda _: None)
    launch.begin_counts(dict.fromkeys(ROLES, 1))
    path = tmp_path / "driver.sbatch"
    path.write_text(run.scripts()[launch.directory / "driver.sbatch"])
    return path


def _ended_by(script: Path, number: int, state: str) -> tuple[str, list[str]]:
    """Run a script and signal it; return its calls and remaining workers."""
    here = script.parent
    (here / "state").write_text(state)
    calls, runs = here / "calls", here / "runs"
    with subprocess.Popen(["bash", script]) as process:
        eventually(
            lambda: runs.exists() and calls.exists() and "sbatch" in calls.read_text(), "it runs"
        )
        process.send_signal(number)
        assert process.wait(30) == 1
    said = "\n".join(line for line in calls.read_text().splitlines() if "sbatch" not in line)
    calls.unlink()
    runs.unlink()
    return said, sorted(path.name for path in here.glob("run.launch/*.count"))


@pytest.mark.long
def test_a_preempted_driver_comes_back_with_workers(script: Path) -> None:
    counts = [f"{role}.count" for role in sorted(ROLES)]
    assert _ended_by(script, signal.SIGTERM, "COMPLETING") == ("", counts)
    assert not (script.parent / "run.launch" / "status").exists()
    # It submits workers again. With a grace time, Slurm only warns: the job requeues itself.
    assert _ended_by(script, signal.SIGTERM, "RUNNING") == ("scontrol requeue 7", counts)
    said, counts = _ended_by(script, signal.SIGUSR2, "RUNNING")
    assert said.count("scancel") == len(ROLES)
    assert not counts, "the end of the run takes the workers with it"


def test_certificates_stay_where_no_new_ones_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Launch(tmp_path / "run")
    run.make_certificates(["a"])
    before = {file: file.read_bytes() for file in run.tls.iterdir()}
    monkeypatch.setitem(sys.modules, "juggler.runtime.actors.certificates", None)
    with pytest.raises(LaunchError, match="certificates need a package"):
        run.make_certificates(["b"])
    assert {file: file.read_bytes() for file in run.tls.iterdir()} == before
    monkeypatch.undo()
    run.make_certificates(["b"])
    assert (run.tls / "hosts").read_text() == "b\n"
