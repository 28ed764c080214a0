"""The scripts of Slurm's jobs, run by bash with commands of Slurm that note their calls."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from juggler.launch import slurm
from juggler.launch.commands import ROLES, Launch
from juggler.launch.slurm import Jobs, SlurmRun

# Slurm ends a script that has queued again. This one sees a failure, and ends by itself.
_COMMAND = "#!/bin/bash\necho $(basename $0) $* >> calls\nexit 1\n"
_SQUEUE = '#!/bin/bash\n[[ "$*" == *--jobs=* ]] && cat state\nexit 0\n'
# With its learner preempted too, a driver cannot write its last checkpoint, and ends with 1.
_DRIVER = "#!/bin/bash\ntrap 'exit 1' TERM\ntouch runs\nwhile :; do sleep 0.01; done\n"


def _eventually(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script of a driver whose two workers are wanted, in a directory of its own."""
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
    run = SlurmRun(launch, Jobs(numbers=dict.fromkeys(ROLES, 1)), lambda _: None)
    for role in ROLES:
        run._wanted.begin(role, 1)
    path = tmp_path / "driver.sbatch"
    path.write_text(run.scripts()[launch.directory / "driver.sbatch"])
    return path


def _ended_by(script: Path, number: int, state: str) -> tuple[str, list[str]]:
    """Run a script until it has submitted workers, and signal it -> what it calls then, and the
    numbers of workers that are left."""
    here = script.parent
    (here / "state").write_text(state)
    calls, runs = here / "calls", here / "runs"
    with subprocess.Popen(["bash", script]) as process:
        _eventually(lambda: runs.exists() and calls.exists() and "sbatch" in calls.read_text())
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
