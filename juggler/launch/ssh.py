"""A run whose workers are on hosts reached by SSH."""

from __future__ import annotations

import io
import ipaddress
import itertools
import os
import re
import shlex
import signal
import subprocess
import tarfile
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec

from juggler.envrunner.program import ENVRUNNER, EVALUATOR
from juggler.launch.engine import (
    JUGGLER,
    ROLES,
    DriverState,
    EngineRun,
    Launch,
    LaunchError,
    Report,
    shell,
)
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.endpoints import EndpointError, split_address
from juggler.runtime.actors.supervisor import RestartPolicy

#: A command that ran for `window_seconds` counts as working: the next pause is short again.
_POLICY = RestartPolicy(first_delay=1.0)
#: Sequences that move the cursor or colour a terminal.
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: A host that does not answer within 15 s counts as disconnected. SSH never asks for a password.
_SSH = [
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
]
_ANSWER_SECONDS = 60.0  # of a host, at the start
_LEAVE_SECONDS = 30.0  # for workers, once the driver has ended
_KILL_SECONDS = 5.0  # until a worker that was asked to end is killed
_LOOK_SECONDS = 0.2
#: A driver that dies sooner than this would die again.
_DRIVER_LIVED_SECONDS = 10.0
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


class KeptRunning(threading.Thread):
    """Runs a command repeatedly until its status is 0.

    Args:
        log: file for its output.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, report: Report) -> None:
        super().__init__(name=name, daemon=True)
        self._command, self._log, self._report = list(command), log, report
        self._process: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()  # no process starts after the end

    def run(self) -> None:
        deaths = 0
        while True:
            began = time.monotonic()
            why = self._live()
            if self._over.is_set():
                return
            deaths = 1 if time.monotonic() - began > _POLICY.window_seconds else deaths + 1
            pause = _POLICY.delay(deaths, jitter=0.0)
            self._report(f"{self.name} {why}; starting it again in {pause:.0f} s")
            self._over.wait(pause)

    def start_no_more(self) -> None:
        """Do not start the command again when it ends."""
        self._over.set()

    def end(self, number: int) -> None:
        """Send a signal to the command, and do not start it again."""
        with self._lock:
            self._over.set()
            if self._process is not None and self._process.poll() is None:
                with suppress(ProcessLookupError):  # it may just have ended
                    os.killpg(self._process.pid, number)

    def _live(self) -> str:
        """Run the command once, and return how it ended."""
        try:
            with self._lock:
                if self._over.is_set():
                    return ""
                # In its own process group: Ctrl-C goes to the driver, which releases the workers.
                process = self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            return f"cannot start it: {error}"
        assert process.stdout is not None
        last = ""
        with process.stdout:
            for line in process.stdout:
                if text := _CONTROLS.sub("", line.decode(errors="replace")).strip():
                    last = f": {text}"
                    # Without a log, the worker still runs.
                    with suppress(OSError), self._log.open("ab", buffering=0) as log:
                        log.write(f"{text}\n".encode())
        status = process.wait()
        if status == 0:  # released by the driver
            self._over.set()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"ended with {how}{last}"


class SshRun(EngineRun):
    """Starts a driver here and workers elsewhere, and restarts them.

    A worker that loses its driver ends at once, and `KeptRunning` starts the next one. Each has a
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
        # Workers by role and host, then by number; and by role and number, workers beyond the
        # wanted number.
        self._kept: dict[tuple[str, str], dict[int, KeptRunning]] = {}
        self._leaving: dict[tuple[str, int], KeptRunning] = {}
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
        with self.taken_down():
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

    def look(self) -> None:
        """Start the driver, and start or end workers as wanted."""
        if self._process is None:  # from here on, signals end it normally
            self._start_driver()
        self._leaving = {at: each for at, each in self._leaving.items() if each.is_alive()}
        for role in ROLES:
            try:
                wanted = self._launch.count(role)
            except LaunchError:
                continue  # the file was removed, or is being changed
            shares = shared_out(wanted, self._weights(role))
            for host, number in zip(self._hosts.hosts, shares, strict=True):
                here = self._kept.setdefault((role, host.name), {})
                for index in sorted(here)[number:]:
                    here[index].end(signal.SIGTERM)
                    self._leaving[role, index] = here.pop(index)
                for index in self._free(role, number - len(here)):
                    name, words = self._worker(role, host, index)
                    log = self._logs / f"{name.replace(' ', '-')}.log"
                    here[index] = KeptRunning(name, words, log, self._report)
                    here[index].start()

    def end(self) -> None:
        assert self._process is not None
        self._process.send_signal(self.signals[0])

    def take_down(self) -> None:
        """End all processes; workers that the driver released may leave first."""
        all_kept = [*(each for here in self._kept.values() for each in here.values())]
        all_kept += self._leaving.values()
        in_order = self._process is not None and self._process.poll() is not None
        if self._process is not None and not in_order:
            self._process.terminate()
        for each in all_kept:
            each.start_no_more()
        steps = [(0, _LEAVE_SECONDS)] * in_order
        for number, seconds in (*steps, (signal.SIGTERM, _KILL_SECONDS), (signal.SIGKILL, 5.0)):
            for each in all_kept:
                if number:
                    each.end(number)
            end, signals = time.monotonic() + seconds, len(self.signals)
            while any(each.is_alive() for each in all_kept) and time.monotonic() < end:
                if len(self.signals) > signals:
                    break
                time.sleep(_LOOK_SECONDS)
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_SECONDS)
            self._process.kill()
            self._process.wait()
        with ThreadPoolExecutor(
            32
        ) as pool:  # removes certificates, on hosts that can still be reached
            list(pool.map(lambda host: _asked(host, f"rm -rf {self._there}"), self._have_copies))
        self._open.close()

    def _weights(self, role: str) -> list[int]:
        """Return all hosts' shares of a role; default: as for EnvRunners."""
        found = [_number(role, host) for host in self._hosts.hosts]
        return found if any(found) else [host.env_runners for host in self._hosts.hosts]

    def _free(self, role: str, count: int) -> list[int]:
        """Return free numbers for workers of a role."""
        taken = {index for of, index in self._leaving if of == role}
        taken |= {index for (of, _), here in self._kept.items() if of == role for index in here}
        free = (index for index in itertools.count() if index not in taken)
        return list(itertools.islice(free, max(0, count)))

    # -- commands -------------------------------------------------------------------------------

    def _driver(self) -> list[str]:
        return self._launch.driver(self._hosts.driver, JUGGLER, self._numbers[LEARNER])

    def _start_driver(self) -> None:
        self._began = time.monotonic()
        self._process = subprocess.Popen(self._driver(), start_new_session=True)

    def _worker(self, role: str, host: Host, index: int) -> tuple[str, list[str]]:
        """Return a worker's name for people, and the words of its command."""
        juggler, driver = shlex.split(host.juggler), self._hosts.driver
        words = self._launch.worker(role, driver, juggler, index, host.dialed)
        tls = "" if self._launch.insecure else f"{self._there}/tls"
        command = shell([*words, "--reattach-seconds", "0"], tls)
        name = f"{role} {index} on {host.name}"
        return name, [*_SSH, "-tt", host.name, f"{_cd(host)}{command}"]

    # -- hosts ----------------------------------------------------------------------------------

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
    """Share a number out in proportion to weights, by largest remainders.

    Args:
        weights: at least one is not 0; a weight of 0 gets nothing.
    """
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
    except FileNotFoundError:
        output = "the command `ssh` is not installed here: install it (Debian: openssh-client)"
        raise LaunchError(output) from None
    except subprocess.TimeoutExpired:
        return _NO_CONNECTION, f"no answer within {_ANSWER_SECONDS:.0f} s"
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return done.returncode, " | ".join(lines[-3:])
