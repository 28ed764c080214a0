"""`juggler launch` on a real Slurm, and over a real sshd."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.network import free_address
from support.place import (
    REPOSITORY,
    Command,
    Place,
    assert_books_balance,
    checkpoints,
    env_runners,
    eventually,
    metrics,
    summary,
    trained_steps,
    trains_on,
    workers_in,
)

from juggler.launch.engine import Launch

_CPUS = 8  # as Slurm sees them: its jobs share those of this machine
_PATIENCE = 120.0  # seconds
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")


def missing() -> str:
    """Why there can be no Slurm here; "" if there can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [name for name in NEEDED if shutil.which(name, path=path) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "needs root"


class Slurm:
    """Starts munged, slurmctld and slurmd.

    Attributes:
        environment: in which commands of Slurm find this cluster.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        host = socket.gethostname().partition(".")[0]
        ports = [free_address().rpartition(":")[2] for _ in range(2)]
        for name in ("state", "spool"):
            (directory / name).mkdir()
        key = directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (directory / "slurm.conf").write_text(f"""\
ClusterName=juggler
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=10
NodeName={host} CPUs={_CPUS} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
""")
        self.environment = {"SLURM_CONF": str(directory / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={directory}/munge.socket",
            f"--pid-file={directory}/munged.pid",
            f"--log-file={directory}/munged.log",
            f"--seed-file={directory}/munged.seed",
        )
        self.wait_until((directory / "munge.socket").exists, "munged listens")
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D")
        self.wait_until(lambda: "idle" in self.ask("sinfo", "--noheader", "--format=%t"), "a node")

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout

    def jobs(self, name: str = "") -> list[str]:
        """Names of queued jobs that contain `name`, one for each task."""
        lines = self.ask("squeue", "--noheader", "--array", "--format=%j %T").splitlines()
        return [line for line in lines if name in line]

    def runs(self, job: str) -> bool:
        """Whether a process of Slurm looks after this job on the node."""
        pattern = f"slurmstepd: \\[{job}\\."
        return subprocess.run(["pgrep", "-f", pattern], stdout=subprocess.DEVNULL).returncode == 0

    def wait_until(self, what: Callable[[], object], why: str, seconds: float = _PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end:
                logs = [path.read_text(errors="replace") for path in self._directory.glob("*.out")]
                raise AssertionError(f"{why}: not within {seconds:.0f} s\n{self.jobs()}\n{logs}")
            time.sleep(0.2)

    def close(self) -> None:
        self.ask("scancel", "--user=root")
        end = time.monotonic() + _PATIENCE
        while self.jobs() and time.monotonic() < end:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(_PATIENCE)

    def _start(self, *command: str) -> None:
        output = self._directory / f"{command[0]}.out"
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        environment = {**os.environ, **self.environment, "PATH": path}
        with output.open("wb") as file:
            self._daemons.append(
                subprocess.Popen(command, env=environment, stdout=file, stderr=file)
            )


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(why)
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    made = Slurm(directory)
    yield made
    made.close()
    shutil.rmtree(directory)


def _launch(place: Place, slurm: Slurm, *options: str) -> Command:
    own = ["--env-runners", "2", "--run-dir", "run", "--time", "00:30:00"]
    return place.start("launch", "slurm", "cartpole", *own, *options, **slurm.environment)


@pytest.mark.slow
def test_a_run_of_jobs_outlives_a_killed_worker_and_its_time_limit(
    place: Place, slurm: Slurm
) -> None:
    run_dir = place.path / "run"
    launch = _launch(place, slurm, "--", "--stop-return", "501", "--checkpoint-seconds", "1")
    eventually(lambda: env_runners(run_dir) == 2, 60, lambda: launch.output)
    trains_on(run_dir, launch)
    workers_in(place.path, "envrunner")[0].kill()
    eventually(lambda: env_runners(run_dir) == 1, 30, lambda: launch.output)
    eventually(lambda: env_runners(run_dir) == 2, 60, lambda: launch.output)

    lost = metrics(run_dir)[-1]["env_steps_lost_unreported"]  # with the one that was killed
    assert place.run("scale", "run", "--env-runners", "3").status == 0
    eventually(lambda: env_runners(run_dir) == 3, 60, lambda: launch.output)
    assert place.run("scale", "run", "--env-runners", "1").status == 0
    eventually(lambda: env_runners(run_dir) == 1, 60, lambda: launch.output)
    events = (run_dir / "events.jsonl").read_text()
    assert events.count("left: terminated") == 2, "in order, both of them"
    assert metrics(run_dir)[-1]["env_steps_lost_unreported"] == lost

    # What Slurm does two minutes before the time limit, at which it would end the job.
    before = len(checkpoints(run_dir))
    name = f"{Launch(run_dir, '').label}-driver"
    slurm.ask("scancel", "--batch", "--signal=USR1", f"--name={name}")
    slurm.wait_until(lambda: any("PENDING" in each for each in slurm.jobs(name)), "it queues again")
    assert len(checkpoints(run_dir)) >= min(before, 1)
    trained = summary(run_dir)["env_steps_trained"]
    job = slurm.ask("squeue", "--noheader", f"--name={name}", "--format=%A").strip()
    # Slurm lets it wait for two minutes. It needs those until the former job is gone, and a second
    # more: a credential from the second in which the former one was revoked does not hold.
    slurm.wait_until(lambda: not slurm.runs(job), "the former job is gone")
    time.sleep(2.5)
    slurm.ask("scontrol", "update", f"jobid={job}", "starttime=now")
    eventually(lambda: trained_steps(run_dir) > trained, 90, lambda: launch.output)

    launch.process.terminate()
    assert launch.wait(120) == 143, launch.output
    assert_books_balance(run_dir)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["env_steps_trained"] > trained
    slurm.wait_until(lambda: not slurm.jobs(), "no job is left")


# `juggler launch ssh` with a real sshd, on another host.


FAR = "10.77.0.2"


@pytest.fixture
def far_host(
    place: Place, two_hosts: tuple[list[str], list[str], str]
) -> Iterator[tuple[list[str], list[str]]]:
    """Run commands on each of two hosts; the second has an sshd."""
    sshd, client = shutil.which("sshd", path="/usr/sbin:/sbin"), shutil.which("ssh")
    if sshd is None or client is None:
        pytest.skip("needs sshd and ssh (Debian: openssh-server openssh-client)")
    first, second, _ = two_hosts
    keys = place.path / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "own"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)]
        subprocess.run(make, check=True)
    place.write(
        "sshd_config",
        f"ListenAddress {FAR}\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/own.pub\n"
        f"StrictModes no\nUsePAM no\nPidFile {keys}/pid\nPermitRootLogin yes\n",
    )
    options = "BatchMode=yes IdentitiesOnly=yes StrictHostKeyChecking=no LogLevel=ERROR"
    own = [f"-o {each}" for each in [*options.split(), "UserKnownHostsFile=/dev/null"]]
    there = place.write("ssh", f'#!/bin/sh\nexec {client} -i {keys}/own {" ".join(own)} "$@"\n')
    there.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen([*second, sshd, "-D", "-f", str(place.path / "sshd_config")])
    try:
        yield first, second
    finally:
        daemon.terminate()
        daemon.wait(10)


def _hosts(place: Place, far: str) -> None:
    python = f"env PYTHONPATH={REPOSITORY} OMP_NUM_THREADS=1 {sys.executable} -m juggler"
    place.write(
        "hosts.toml",
        f'driver = "10.77.0.1:5005"\njuggler = "{python}"\n'
        f'directory = "{place.path}"\n[hosts."{FAR}"]\n{far}',
    )


def keys_left() -> set[Path]:
    """Keys of runs on this host, including killed runs."""
    return set(Path.home().joinpath(".juggler").glob("run-*/tls/key.pem"))


@pytest.mark.slow
def test_a_run_over_ssh_outlives_a_worker_and_a_cut_network_and_ends_with_ctrl_c(
    place: Place, far_host: tuple[list[str], list[str]]
) -> None:
    first, second = far_host
    before = keys_left()
    _hosts(place, "learners = 1\nenv_runners = 2\nevaluators = 1\n")
    run_dir = place.path / "run"
    command = ["launch", "ssh", "cartpole", "--hosts", "hosts.toml", "--run-dir", "run", "--"]
    options = ["--stop-return", "501", "--checkpoint-seconds", "2", "--progress", "plain"]
    options += ["--evaluation-seconds", "2"]
    path = f"{place.path}:/usr/sbin:/usr/bin:/bin"
    launch = place.start_program(
        [*first, sys.executable, "-m", "juggler", *command, *options], PATH=path
    )

    def all_there() -> bool:
        return env_runners(run_dir) == 2 and trained_steps(run_dir) > 0

    eventually(all_there, 90, lambda: launch.output)
    workers_in(place.path, "envrunner 1")[0].kill()
    launch.wait_for("envrunner 1 on 10.77.0.2 ended: ", 30)
    eventually(lambda: env_runners(run_dir) < 2, 30, lambda: launch.output)
    eventually(all_there, 60, lambda: launch.output)

    scaled = place.run("scale", "run", "--env-runners", "3")
    assert scaled.output == "envrunner: 3 instead of 2\n"
    eventually(lambda: env_runners(run_dir) == 3, 60, lambda: launch.output)
    assert place.run("scale", "run", "--env-runners", "2").status == 0
    eventually(lambda: env_runners(run_dir) == 2, 60, lambda: launch.output)

    ends = subprocess.run([*second, "ip", "-o", "link"], capture_output=True, text=True).stdout
    cable = next(name for name in ends.split() if name.startswith("ve")).partition("@")[0]
    subprocess.run([*second, "ip", "link", "set", cable, "down"], check=True)
    launch.wait_for("learner 0 on 10.77.0.2 ended: ", 60)
    subprocess.run([*second, "ip", "link", "set", cable, "up"], check=True)
    trains_on(run_dir, launch, 20_000)

    def solved() -> bool:
        return any((line["episode_return_mean"] or 0.0) >= 475.0 for line in metrics(run_dir))

    eventually(solved, 120, lambda: launch.output)
    assert place.run("scale", "run", "--evaluators", "2").status == 0
    eventually(lambda: len(workers_in(place.path, "evaluator")) == 2, 60, lambda: launch.output)
    eventually(lambda: list((run_dir / "best").glob("0*")), 60, lambda: launch.output)

    launch.interrupt()
    assert launch.wait(90) == 130, launch.output
    assert summary(run_dir)["reason_for_stop"] == "interrupted", launch.output
    assert_books_balance(run_dir)
    assert metrics(run_dir)[-1]["num_learners"] == 1
    assert keys_left() <= before
    eventually(lambda: not workers_in(place.path, ""), 60)
