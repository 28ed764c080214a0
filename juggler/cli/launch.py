"""`juggler launch`: starts a run on several hosts, by an engine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from juggler.cli.arguments import Flag, choose, command, parse, report_errors
from juggler.launch.engine import (
    ROLES,
    EngineRun,
    Launch,
    LaunchError,
    follow,
    new_certificates,
)

_USAGE = """\
usage: juggler launch ssh CONFIG --hosts FILE [OPTIONS] [-- OPTIONS OF juggler driver]
       juggler launch slurm|swarm|kubernetes CONFIG [OPTIONS] [-- OPTIONS OF juggler driver]

  ssh          the driver here, the workers on hosts reached by SSH
  slurm        every process as a job of Slurm
  swarm        a stack on a Docker Swarm, the driver on this host
  kubernetes   a driver, learners and EnvRunners as pods
  certs        certificates and a token for TLS between hosts, no run: `juggler certs`

juggler launch ENGINE --help shows the options. See docs/clusters.md."""


@dataclass(kw_only=True)
class LaunchArguments:
    """Options of every engine."""

    config: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CONFIG]")] = None
    """Name of a shipped configuration, or a .toml file."""

    run_dir: str = ""
    """Directory of the run. If it has a run, that run is resumed. none: a new one under runs/.
    """

    dry_run: Flag = False
    """Print what would be started or submitted, and stop."""

    plain_gradients: Flag = False
    """Let several learners add up gradients without encryption, with gloo or NCCL, which is
    faster: only on a network that you trust."""


@dataclass(kw_only=True)
class HostArguments(LaunchArguments):
    """Options of engines that use Juggler as installed on the hosts."""

    insecure: Flag = False
    """Use neither TLS nor tokens: only on a network that you trust."""


@dataclass(kw_only=True)
class EngineArguments(LaunchArguments):
    """Options of engines that manage the processes."""

    env_runners: int = 1
    """Number of EnvRunners."""

    learners: int = 1
    """Number of learners."""

    evaluators: int = 0
    """Number of evaluators: they share the episodes of evaluations (evaluation_seconds), and
    confirm that the run is solved."""

    detach: Flag = False
    """Submit the run and stop, instead of following it."""

    @property
    def numbers(self) -> dict[str, int]:
        """Return numbers of workers by role."""
        return dict(zip(ROLES, (self.learners, self.env_runners, self.evaluators), strict=True))


@dataclass(kw_only=True)
class SshArguments(HostArguments):
    """Train with workers on hosts reached by SSH.

    The driver is on this host. Ctrl-C ends the run normally. Options of `juggler driver` may
    follow after `--`.
    """

    hosts: str
    """File with the hosts (TOML; see docs/clusters.md)."""


@dataclass(kw_only=True)
class SlurmArguments(EngineArguments, HostArguments):
    """Train with every process as a job of Slurm.

    Ctrl-C ends the run normally. Options of `juggler driver` may follow after `--`. The run
    directory must be on a file system that all nodes share.
    """

    partition: str = ""
    """Partition of all jobs. none: Slurm's default."""

    time: str = ""
    """Time limit of all jobs in Slurm's format, such as 04:00:00. Two minutes before it, the run
    writes a checkpoint and is queued again. none: Slurm's default."""

    sbatch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Further option of sbatch for all jobs, such as --account=lab; repeat for each one."""

    sbatch_learner: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Further option of sbatch for learners, such as --gres=gpu:1; repeat for each one."""

    sbatch_envrunner: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Further option of sbatch for EnvRunners and evaluators, such as --partition=cpu; repeat for
    each one."""


@dataclass(kw_only=True)
class SwarmArguments(EngineArguments):
    """Train with a stack on a Docker Swarm.

    Ctrl-C ends the run normally. Options of `juggler driver` may follow after `--`. Run the
    command on a manager of the swarm: the driver runs there, with the run directory.
    """

    image: str = "juggler"
    """Image of Juggler. Nodes without it pull it from a registry."""

    compose: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Further compose file, which changes the stack; repeat for each one."""


@dataclass(kw_only=True)
class KubernetesArguments(EngineArguments):
    """Train on Kubernetes, with `kubectl`.

    Ctrl-C ends the run normally. Options of `juggler driver` may follow after `--`. The run is
    stored in a volume claim of the cluster, and --run-dir is its name.
    """

    image: str = "juggler"
    """Image of Juggler."""

    namespace: str = ""
    """Namespace of all objects. none: kubectl's."""

    component: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Change of the manifests: autoscale, gpu, or the directory of a kustomize component; repeat
    for each one."""


@dataclass(kw_only=True)
class CertsArguments:
    """Make certificates and a token for all hosts of a run.

    A new authority for the run signs the certificate.
    """

    directory: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIRECTORY")]
    """Directory for ca.pem, cert.pem, key.pem and token: the value for --tls."""

    host: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Name or IP address at which the driver or a learner is dialed; repeat for each one. Loopback
    is always included."""


_OPTIONS: dict[str, type[LaunchArguments]] = {
    "ssh": SshArguments,
    "slurm": SlurmArguments,
    "swarm": SwarmArguments,
    "kubernetes": KubernetesArguments,
}


def _start(engine: str, arguments: Sequence[str]) -> int:
    """Parse the options of an engine and of the driver, and launch."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    given = parse(_OPTIONS[engine], arguments[:at], f"launch {engine}")
    return report_errors("launch", lambda: _launch(given, arguments[at + 1 :]))


def _launch(given: LaunchArguments, options: Sequence[str]) -> int:
    made = _engine_run(given, options)
    if given.dry_run:
        print(made.plan())
        return 0
    made.submit()
    detach = isinstance(given, EngineArguments) and given.detach
    return 0 if detach else follow(made, _say)


def _engine_run(given: LaunchArguments, options: Sequence[str]) -> EngineRun:
    """Return the run on its engine, after checking options."""
    match given:
        case SshArguments():
            from juggler.launch.ssh import SshRun, read_hosts

            hosts = read_hosts(Path(given.hosts))
            return SshRun(_run_of(given, options), hosts, _say)
        case SlurmArguments():
            from juggler.launch.slurm import SlurmRun

            of_all = [f"--partition={given.partition}"] if given.partition else []
            of_all += [f"--time={given.time}"] if given.time else []
            own = given.sbatch_learner, given.sbatch_envrunner
            launch = _run_of(given, options)
            return SlurmRun(launch, given.numbers, _say, [*of_all, *given.sbatch], *own)
        # These two run Juggler from an image, so hosts need neither TLS files nor Juggler.
        case SwarmArguments():
            from juggler.launch.swarm import SwarmRun

            launch = _run_of(given, options)
            return SwarmRun(launch, given.numbers, _say, given.image, given.compose)
        case KubernetesArguments():
            from juggler.launch.kubernetes import KubernetesRun

            where = given.image, given.namespace, given.component
            return KubernetesRun(_run_of(given, options), given.numbers, _say, *where)
    raise AssertionError(given)


def _run_of(given: LaunchArguments, options: Sequence[str]) -> Launch:
    """Return the run to launch, after checking options."""
    from juggler.cli.driver import read_arguments

    config = given.config or ""
    named = f"{Path(config).stem or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir = Path(given.run_dir or f"runs/{named}").absolute()
    if run_dir.is_file():
        raise LaunchError(f"{given.run_dir} is a file; name another run directory")
    # The driver's own checks, before certificates are made or jobs are queued.
    checked = [*([config] if config else []), "--run-dir", str(run_dir), "--go-on"]
    runner = read_arguments([*checked, *options]).arguments.run.env_runner
    gateway = runner.gateway
    if gateway and not runner.simulator and not isinstance(given, KubernetesArguments):
        raise LaunchError(
            f"gateway = {gateway!r}: EnvRunners of this engine make environments, but this "
            "run uses simulators. Launch it on kubernetes; or start its processes yourself, "
            "with `juggler driver`, `juggler learner` and `juggler envrunner --gateway HOST:PORT`; "
            "or let EnvRunners start simulators, with the key simulator"
        )
    insecure = isinstance(given, HostArguments) and given.insecure
    return Launch(run_dir, config, options, insecure, given.plain_gradients, gateway)


def _say(text: str) -> None:
    print(f"juggler launch: {text}", file=sys.stderr, flush=True)


def _make(given: CertsArguments) -> int:
    try:
        files = new_certificates(Path(given.directory), given.host)
    except OSError as error:
        why = f"cannot make certificates in {given.directory}: {error.strerror or error}"
        raise LaunchError(why) from error
    for file in files:
        print(file)
    print(
        f"Copy {given.directory} to every host of the run, and give each command --tls. Anyone "
        "with read access can join the run."
    )
    return 0


_CHOICES = {engine: partial(_start, engine) for engine in _OPTIONS}
_CERTS = {"certs": command("certs", CertsArguments, _make)}
run = choose("launch", "engine", _USAGE, {**_CHOICES, **_CERTS})
