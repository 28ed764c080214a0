"""A real Slurm of one node, with daemons and files of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from support.network import free_address

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
        """Names of the jobs in the queue that have `name` in theirs, one for each task."""
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
