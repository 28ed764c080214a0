"""A run whose workers are on hosts reached by SSH."""

from __future__ import annotations

import io
import ipaddress
import itertools
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

import msgspec

from juggler.driver.reporting.wording import plain
from juggler.envrunner.envrunner_program import ENVRUNNER, EVALUATOR
from juggler.launch.engine import ROLES, DriverState, EngineRun, Launch, LaunchError, Report
from juggler.learner.process.learner_program import LEARNER
from juggler.runtime.actors.command_processes import CommandLine
from juggler.runtime.actors.endpoints import EndpointError, split_address
from juggler.runtime.actors.supervisor import Exited, RestartPolicy, Supervisor
from juggler.runtime.actors.tls import TLS_VARIABLE

#: Workers are started again until the driver releases them.
_POLICY = RestartPolicy(
    until_success=True,
    first_delay=1.0,
    quarantine_after=sys.maxsize,
    window_seconds=600.0,
    most_in_window=sys.maxsize,
)
#: A host that does not answer within 15 s counts as disconnected. SSH never asks for a password.
_SSH = [
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
]
_ANSWER_SECONDS = 60.0  # of a host, at the start
_LEAVE_SECONDS = 30.0  # for workers, once the driver has ended
_KILL_SECONDS = 5.0  # for a driver that was asked to end, and its workers
_LOOK_SECONDS = 0.2
_DRIVER_LIVED_SECONDS = 10.0  # a driver that dies sooner than this would die again
_NO_COMMAND = 127
_NO_CONNECTION = 255


#: Maximum number of workers of one role on one host: more is a typing error.
_Number = Annotated[int, msgspec.Meta(ge=0, le=4096)]
_COMMON = ("directory", "juggler")


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host and its workers."""

    name: str  # for `ssh`: a host, an alias of ~/.ssh/config, or user@host
    env_runners: _Number = 0  # number of EnvRunners
    learners: _Number = 0  # number of learners
    evaluators: _Number = 0  # number of evaluators
    address: str = ""  # at which EnvRunners dial its learners; "": the name, without the user
    directory: str = ""  # working directory of its commands; "": the home directory
    juggler: str = "juggler"  # the command there

    @property
    def dialed(self) -> str:
        return self.address or self.name.rpartition("@")[2]


class Hosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All hosts of a run."""

    driver: str  # the address of this host, HOST:PORT, at which other hosts dial the driver
    hosts: tuple[Host, ...]  # hosts of the workers

    @property
    def dialed(self) -> list[str]:
        """Names and addresses at which the driver and the learners are dialed."""
        learners = [host.dialed for host in self.hosts if host.learners]
        return list(dict.fromkeys([split_address(self.driver)[0], *learners]))


def read_hosts(path: Path) -> Hosts:
    """Read the file of hosts: see docs/clusters.md.

    Raises:
        LaunchError: it cannot be read, or has invalid content.
    """
    try:
        values = tomllib.loads(path.read_text())
        hosts = msgspec.convert(_named(values), Hosts)
    except OSError as error:
        raise LaunchError(f"cannot read the file of hosts {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path} is not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise LaunchError(f"{path}: {error}; see docs/clusters.md") from error
    # A wrong address would show only on the hosts, once their workers cannot connect.
    if not _can_be_dialed(hosts.driver):
        raise LaunchError(
            f"{path}: driver = {hosts.driver!r} cannot be dialed: give the address and the port at "
            'which other hosts dial this host, as in driver = "10.77.0.1:5005"'
        )
    for host in hosts.hosts:
        if host.name.startswith("-"):
            raise LaunchError(f"{path}: {host.name!r} is not the name of a host")
    for what in ("learners", "env_runners"):
        if not sum(getattr(host, what) for host in hosts.hosts):
            raise LaunchError(f"{path}: no host has {what}: a run needs at least one")
    return hosts


def _named(values: dict[str, Any]) -> dict[str, Any]:
    """Put common keys and names into the table of each host."""
    common = {key: values.pop(key) for key in _COMMON if key in values}
    tables = values.get("hosts", {})
    if isinstance(tables, dict) and all(isinstance(each, dict) for each in tables.values()):
        values["hosts"] = [{"name": name, **common, **own} for name, own in tables.items()]
    return values


def _can_be_dialed(address: str) -> bool:
    """Return whether other hosts can dial an address, with a definite port."""
    try:
        host, port = split_address(address)
    except EndpointError:
        return False
    try:
        return bool(port) and not ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return bool(port)  # a host name


class SshRun(EngineRun):
    """Starts a driver here and workers elsewhere, and restarts them.

    A worker that loses its driver ends at once, and the supervisor starts the next one. Each has a
    terminal on its host (`ssh -tt`), so that it ends with its connection.
    """

    ask_seconds = 0.0
    end_seconds = float("inf")  # the driver is local, and limits its own end

    def __init__(self, launch: Launch, hosts: Hosts, report: Report) -> None:
        numbers = {role: sum(_number(role, host) for host in hosts.hosts) for role in ROLES}
        super().__init__(launch, numbers, report)
        self._hosts = hosts
        self._there = f'"$HOME"/.juggler/{shlex.quote(launch.tag)}'  # on other hosts
        self._logs = launch.directory / "logs"
        self._exits: SimpleQueue[Exited] = SimpleQueue()
        self._workers = Supervisor(self._exits.put)
        self._kept: dict[str, dict[int, Host]] = {role: {} for role in ROLES}  # by number
        # By name, role and number of workers beyond the wanted number
        self._leaving: dict[str, tuple[str, int]] = {}
        self._have_copies: list[Host] = []  # hosts with copies of the certificates
        self._process: subprocess.Popen[bytes] | None = None  # the driver
        self._began = 0.0
        self._open = ExitStack()

    def plan(self) -> str:
        """Return the name and words of each command, the driver's first."""
        found = [("the driver", self._driver())]
        for role in ROLES:
            index = itertools.count()
            for host in self._hosts.hosts:
                found += [self._worker(role, host, next(index)) for _ in range(_number(role, host))]
        return "\n".join(f"# {name}\n{shlex.join(words)}" for name, words in found)

    def submit(self) -> None:
        """Prepare the hosts; `look` starts the driver and the workers.

        Raises:
            LaunchError: a host cannot be reached, or has no Juggler, or another version of it.
        """
        self._open.enter_context(self._launch.read_here())
        with self.torn_down():
            self._launch.make_certificates(self._hosts.dialed)
            with ThreadPoolExecutor(min(32, len(self._hosts.hosts))) as pool:
                problems = [text for text in pool.map(self._prepare, self._hosts.hosts) if text]
            if problems:
                raise LaunchError("\n".join(problems))
            self._logs.mkdir(parents=True, exist_ok=True)
            self._launch.begin_counts(self._numbers)
            self._report(f"output of the workers is in {self._logs}")

    def driver_state(self, ending: bool) -> DriverState:
        """Poll the driver, which is restarted after a signal."""
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            return DriverState(running=True)
        lived = time.monotonic() - self._began
        if ending or status >= 0 or lived < _DRIVER_LIVED_SECONDS:
            return DriverState(status=status if status >= 0 else 128 - status)
        self._report(f"the driver died ({signal.Signals(-status).name}); starting it again")
        self._start_driver()
        return DriverState(running=True)

    def poll(self) -> None:
        """Start the driver, and start or end workers as wanted."""
        if self._process is None:  # from here on, signals end it normally
            self._start_driver()
        while not self._exits.empty():
            exited = self._exits.get()
            if exited.restart_in is not None:
                again = f"starting it again in {exited.restart_in:.0f} s"
                self._report(f"{exited.worker_id} ended: {plain(exited.how)}; {again}")
        running = self._workers.pids()
        self._leaving = {name: at for name, at in self._leaving.items() if name in running}
        for role, kept in self._kept.items():
            try:
                wanted = self._launch.count(role)
            except LaunchError:
                continue  # the file was removed, or is being changed
            # The newest workers of a host leave first, so that numbers stay low.
            shares = shared_out(wanted, self._weights(role))
            for host, number in zip(self._hosts.hosts, shares, strict=True):
                here = sorted(index for index, at in kept.items() if at is host)
                for index in here[number:]:
                    name, _ = self._worker(role, kept.pop(index), index)
                    self._leaving[name] = role, index
                    self._workers.dismiss(name, 0.0)
                for index in self._free(role, number - len(here)):
                    kept[index] = host
                    self._start(*self._worker(role, host, index))

    def _start(self, name: str, words: list[str]) -> None:
        """Start a worker, and start it again until the driver releases it."""
        command = CommandLine(words, self._logs / f"{name.replace(' ', '-')}.log")
        self._workers.add(name, command, _POLICY)

    def end(self) -> None:
        assert self._process is not None
        self._process.send_signal(self.signals[0])

    def tear_down(self) -> None:
        """End all processes; workers that the driver released may leave first."""
        in_order = self._process is not None and self._process.poll() is not None
        if self._process is not None and not in_order:
            self._process.terminate()
        self._workers.stop_restarting()
        end = time.monotonic() + (_LEAVE_SECONDS if in_order else _KILL_SECONDS)
        signals = len(self.signals)
        while self._workers.pids() and time.monotonic() < end and len(self.signals) == signals:
            time.sleep(_LOOK_SECONDS)
        self._workers.close(0.0)  # on their hosts, they end with their connections
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_SECONDS)
            self._process.kill()
            self._process.wait()
        # Certificates are removed on hosts that can still be reached.
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(lambda host: _asked(host, f"rm -rf {self._there}"), self._have_copies))
        self._open.close()

    def _weights(self, role: str) -> list[int]:
        """Return all hosts' shares of a role; default: as for EnvRunners."""
        found = [_number(role, host) for host in self._hosts.hosts]
        return found if any(found) else [host.env_runners for host in self._hosts.hosts]

    def _free(self, role: str, count: int) -> list[int]:
        """Return free numbers for workers of a role."""
        taken = {index for of, index in self._leaving.values() if of == role}
        taken.update(self._kept[role])
        free = (index for index in itertools.count() if index not in taken)
        return list(itertools.islice(free, max(0, count)))

    def _driver(self) -> list[str]:
        return self._launch.driver(self._hosts.driver, self._numbers[LEARNER])

    def _start_driver(self) -> None:
        self._began = time.monotonic()
        self._process = subprocess.Popen(self._driver(), start_new_session=True)

    def _worker(self, role: str, host: Host, index: int) -> tuple[str, list[str]]:
        """Return a worker's name for people, and the words of its command."""
        juggler, driver = shlex.split(host.juggler), self._hosts.driver
        words = self._launch.worker(role, driver, juggler, index, host.dialed)
        tls = "" if self._launch.insecure else f"{TLS_VARIABLE}={self._there}/tls "
        command = f"{tls}{shlex.join([*words, '--reattach-seconds', '0'])}"
        name = f"{role} {index} on {host.name}"
        return name, [*_SSH, "-tt", host.name, f"{_cd(host)}{command}"]

    def _prepare(self, host: Host) -> str:
        """Check a host and copy certificates; return problems or ""."""
        status, output = _asked(host, f"{_cd(host)}{host.juggler} --version")
        here = f"juggler {version('juggler')}"
        if status == _NO_COMMAND:
            return (
                f"{host.name} has no command {host.juggler!r}: install Juggler there, or set "
                f"its path with `juggler = ` in the file of hosts ({output})"
            )
        if status:
            return f"{host.name} cannot be used: {output or f'ssh ended with status {status}'}"
        if here not in output:
            return f"{host.name} has {output!r}, and this host {here!r}: install the same version"
        if self._launch.insecure:
            return ""
        # By standard input, since names of files and secrets in a command are seen by all users.
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            for path in sorted(self._launch.tls.iterdir()):
                archive.add(path, arcname=f"tls/{path.name}")
        self._have_copies.append(host)
        there = self._there
        unpack = f"umask 077 && mkdir -p {there} && tar -x -C {there} --no-same-owner -f -"
        status, output = _asked(host, unpack, content.getvalue())
        return f"cannot copy certificates to {host.name}: {output}" if status else ""


def shared_out(total: int, weights: Sequence[int]) -> list[int]:
    """Share a number out in proportion to weights, by largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(each) for each in exact]
    order = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _number(role: str, host: Host) -> int:
    """Return the file's number of workers of a role on a host."""
    numbers = {LEARNER: host.learners, ENVRUNNER: host.env_runners, EVALUATOR: host.evaluators}
    return numbers[role]


def _cd(host: Host) -> str:
    return f"cd {shlex.quote(host.directory)} && " if host.directory else ""


def _asked(host: Host, command: str, given: bytes = b"") -> tuple[int, str]:
    """Run a command on a host; return its status and last lines."""
    try:
        done = subprocess.run(
            [*_SSH, host.name, command],
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    # Without ssh here, the other hosts need not be asked.
    except FileNotFoundError:
        output = "the command `ssh` is not installed here: install it (Debian: openssh-client)"
        raise LaunchError(output) from None
    except subprocess.TimeoutExpired:
        return _NO_CONNECTION, f"no answer within {_ANSWER_SECONDS:.0f} s"
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return done.returncode, " | ".join(lines[-3:])
