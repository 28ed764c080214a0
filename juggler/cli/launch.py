"""`juggler launch`: starts a run on several hosts, on the engine that is there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from juggler.cli.arguments import Flag, parse, report_errors
from juggler.launch.commands import Launch, launch_directory
from juggler.launch.following import EngineRun, follow
from juggler.runtime.nearest import nearest

_USAGE = """\
usage: juggler launch ssh CONFIG --hosts FILE [OPTIONS] [-- OPTIONS OF juggler driver]
       juggler launch slurm|swarm|kubernetes CONFIG [OPTIONS] [-- OPTIONS OF juggler driver]

  ssh          the driver here, the workers on hosts that are reached by SSH
  slurm        every process as a job of Slurm
  swarm        a stack on a Docker Swarm, the driver on this host
  kubernetes   a driver, learners and EnvRunners as pods

juggler launch ENGINE --help shows the options. See docs/clusters.md."""


@dataclass(kw_only=True)
class LaunchArguments:
    """What every engine needs to know."""

    config: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CONFIG]")] = None
    """A configuration that ships with Juggler, or a .toml file."""

    run_dir: str = ""
    """The directory of the run. If it has a run, that run continues. none: a new one under runs/.
    """

    dry_run: Flag = False
    """Print what would be started or submitted, and stop."""

    plain_gradients: Flag = False
    """Let several learners add up gradients without encryption, by gloo or NCCL, which is faster:
    only on a network that you trust."""

    receivers: int = 0
    """How many processes receive episodes for each learner, on cores of their own: as `juggler
    learner --receivers`."""


@dataclass(kw_only=True)
class HostArguments(LaunchArguments):
    """What is needed where Juggler is installed on the hosts."""

    insecure: Flag = False
    """Use neither TLS nor tokens: only on a network that you trust."""


@dataclass(kw_only=True)
class EngineArguments(LaunchArguments):
    """What is needed where an engine keeps the processes."""

    env_runners: int = 1
    """How many EnvRunners."""

    learners: int = 1
    """How many learners."""

    evaluators: int = 0
    """How many evaluators: they share the episodes of evaluations, as evaluation_seconds asks for
    them, and confirm that the run is solved."""

    detach: Flag = False
    """Submit the run and stop, instead of following it."""

    @property
    def numbers(self) -> dict[str, int]:
        """By role, how many workers."""
        from juggler.launch.commands import ROLES

        return dict(zip(ROLES, (self.learners, self.env_runners, self.evaluators), strict=True))


@dataclass(kw_only=True)
class SshArguments(HostArguments):
    """Train with the driver on this host, and workers on hosts that are reached by SSH. Ctrl-C ends
    the run in order. Options of `juggler driver` may follow after `--`."""

    hosts: str
    """The file that names the hosts (TOML; see docs/clusters.md)."""


@dataclass(kw_only=True)
class SlurmArguments(EngineArguments, HostArguments):
    """Train with every process as a job of Slurm. Ctrl-C ends the run in order. Options of `juggler
    driver` may follow after `--`. The run directory must be on a file system that all nodes share.
    """

    partition: str = ""
    """Partition of all jobs. none: Slurm's default."""

    time: str = ""
    """Time limit of all jobs, as Slurm takes it, such as 04:00:00. Two minutes before it, the run
    writes a checkpoint and queues again. none: Slurm's default."""

    sbatch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A further option of sbatch for all jobs, such as --account=lab; repeat for each one."""

    sbatch_learner: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A further option of sbatch for learners, such as --gres=gpu:1; repeat for each one."""

    sbatch_envrunner: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A further option of sbatch for EnvRunners and evaluators, such as --partition=cpu; repeat for
    each one."""


@dataclass(kw_only=True)
class SwarmArguments(EngineArguments):
    """Train with a stack on a Docker Swarm. Ctrl-C ends the run in order. Options of `juggler
    driver` may follow after `--`. Give the command on a manager of the swarm: the driver runs
    there, with the directory of the run."""

    image: str = "juggler"
    """The image of Juggler. Nodes that do not have it take it from a registry."""

    compose: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A further compose file, which changes the stack; repeat for each one."""


@dataclass(kw_only=True)
class KubernetesArguments(EngineArguments):
    """Train on Kubernetes, by `kubectl`. Ctrl-C ends the run in order. Options of `juggler driver`
    may follow after `--`. The run is kept in a claim of the cluster, and --run-dir names it."""

    image: str = "juggler"
    """The image of Juggler."""

    namespace: str = ""
    """Namespace of everything. none: that of kubectl."""

    component: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A part that changes the manifests: autoscale, gpu, or the directory of a component of
    kustomize; repeat for each one."""


ENGINES = ("ssh", "slurm", "swarm", "kubernetes")


def run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    engine, *rest = arguments
    if engine not in ENGINES:
        print(f"juggler launch: no engine {engine!r}{nearest(engine, ENGINES)}", file=sys.stderr)
        return 2
    at = rest.index("--") if "--" in rest else len(rest)
    own, options = rest[:at], rest[at + 1 :]
    if engine == "ssh":
        ssh = parse(SshArguments, own, "launch ssh")
        return report_errors("launch", lambda: _ssh(ssh, options))
    if engine == "slurm":
        slurm = parse(SlurmArguments, own, "launch slurm")
        return report_errors("launch", lambda: _slurm(slurm, options))
    if engine == "swarm":
        swarm = parse(SwarmArguments, own, "launch swarm")
        return report_errors("launch", lambda: _swarm(swarm, options))
    kubernetes = parse(KubernetesArguments, own, "launch kubernetes")
    return report_errors("launch", lambda: _kubernetes(kubernetes, options))


def _launch(given: LaunchArguments, options: Sequence[str]) -> Launch:
    """The run to launch, once its configuration and the driver's options have been checked."""
    from juggler.cli.driver import read_arguments
    from juggler.launch.commands import LaunchError
    from juggler.learner.process.program import must_allow_receivers

    must_allow_receivers(given.receivers)
    config = given.config or ""
    run_dir = launch_directory(given.run_dir, config).absolute()
    checked = [*([config] if config else []), "--run-dir", str(run_dir), "--go-on"]
    gateway = read_arguments([*checked, *options]).arguments.run.env_runner.gateway
    if gateway and not isinstance(given, KubernetesArguments):
        raise LaunchError(
            f"gateway = {gateway!r}: EnvRunners of this engine make environments, and those of "
            "this run are simulators'. Launch it on kubernetes; or start its processes yourself, "
            "with `juggler driver`, `juggler learner` and `juggler envrunner --gateway HOST:PORT`"
        )
    return Launch(
        run_dir,
        config,
        options,
        isinstance(given, HostArguments) and given.insecure,
        given.plain_gradients,
        given.receivers,
        gateway,
    )


def _ssh(given: SshArguments, options: Sequence[str]) -> int:
    from juggler.launch.hosts import read_hosts
    from juggler.launch.ssh import SshRun

    hosts = read_hosts(Path(given.hosts))
    ssh = SshRun(_launch(given, options), hosts, _say)
    if given.dry_run:
        _print_commands(ssh.commands())
        return 0
    return ssh.run()


def _slurm(given: SlurmArguments, options: Sequence[str]) -> int:
    from juggler.launch.slurm import Jobs, SlurmRun

    jobs = Jobs(
        numbers=given.numbers,
        partition=given.partition,
        time=given.time,
        all=given.sbatch,
        learner=given.sbatch_learner,
        envrunner=given.sbatch_envrunner,
    )
    slurm = SlurmRun(_launch(given, options), jobs, _say)
    if given.dry_run:
        for path, script in slurm.scripts().items():
            if given.numbers.get(path.stem) == 0:
                script = "# Nothing is submitted of it now: it is there for `juggler scale`.\n"
            print(f"# {path}\n{script}")
        return 0
    return _submit(slurm, given.detach)


def _swarm(given: SwarmArguments, options: Sequence[str]) -> int:
    from juggler.launch.swarm import SwarmRun

    launch = _launch(given, options)
    swarm = SwarmRun(launch, given.numbers, given.image, given.compose, _say)
    if given.dry_run:
        print(swarm.stack())
        return 0
    return _submit(swarm, given.detach)


def _kubernetes(given: KubernetesArguments, options: Sequence[str]) -> int:
    from juggler.launch.kubernetes import KubernetesRun

    launch = _launch(given, options)
    where = given.namespace, given.component
    kubernetes = KubernetesRun(launch, given.numbers, given.image, *where, _say)
    if given.dry_run:
        print(kubernetes.manifests())
        return 0
    return _submit(kubernetes, given.detach)


def _submit(run: EngineRun, detach: bool) -> int:
    run.submit()
    return 0 if detach else follow(run, _say)


def _print_commands(commands: Sequence[tuple[str, Sequence[str]]]) -> None:
    import shlex

    for name, words in commands:
        print(f"# {name}\n{shlex.join(words)}")


def _say(text: str) -> None:
    print(f"juggler launch: {text}", file=sys.stderr, flush=True)
