"""A run on hosts that are reached by SSH: the driver here, the workers there."""

from __future__ import annotations

import io
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from juggler.driver.signals import ending_signals
from juggler.envrunner.program import EVALUATOR
from juggler.launch.commands import ROLES, Launch, LaunchError, learner, must_allow, player, shell
from juggler.launch.following import Say
from juggler.launch.hosts import Host, Hosts
from juggler.launch.scaling import Wanted, shared_out
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.supervisor import RestartPolicy

#: A command that ran for `window_seconds` has worked: the next pause is short again.
_POLICY = RestartPolicy(first_delay=1.0)
_LAST_LINES = 1
#: What moves the cursor or colours a terminal.
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class KeptRunning:
    """A command that is started, and started again whenever it ends with another status than 0.

    Attributes:
        name: for people.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, say: Say) -> None:
        """
        Args:
            name: for people.
            command: its words.
            log: the file that takes what it prints.
            say: tells people.
        """
        self.name = name
        self._command, self._log, self._say = list(command), log, say
        self._process: subprocess.Popen[bytes] | None = None
        self._last: list[str] = []  # lines that it printed
        self._deaths, self._due, self._began = 0, 0.0, 0.0
        self._reader: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether it runs now."""
        return self._process is not None

    def look(self) -> None:
        """Start the command if it is due, and notice if it has ended. Call it often."""
        now = time.monotonic()
        if self._process is None:
            if 0 <= self._due <= now:
                self._start(now)
            return
        status = self._process.poll()
        if status is not None:
            self._ended(status, now)

    def start_no_more(self) -> None:
        """Do not start it again when it ends."""
        self._due = -1.0

    def end(self, number: int) -> None:
        """Send a signal to it, and do not start it again."""
        self.start_no_more()
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _start(self, now: float) -> None:
        self._last, self._began = [], now
        try:
            # A group of its own: Ctrl-C is the driver's, which sends all others home.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._later(now, f"cannot start it: {error}")
            return
        self._reader = threading.Thread(
            target=self._read, args=(self._process,), name=self.name, daemon=True
        )
        self._reader.start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout, self._log.open("ab", buffering=0) as log:
            for line in process.stdout:
                text = _CONTROLS.sub("", line.decode(errors="replace")).strip()
                if text:
                    log.write(f"{text}\n".encode())
                    self._last = [*self._last, text][-_LAST_LINES:]

    def _ended(self, status: int, now: float) -> None:
        if self._reader is not None:
            self._reader.join(1.0)
        self._process = None
        if self._due < 0:
            return
        if status == 0:  # it was sent home
            self._due = -1.0
            return
        if now - self._began > _POLICY.window_seconds:
            self._deaths = 0
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        said = f": {' | '.join(self._last)}" if self._last else ""
        self._later(now, f"ended with {how}{said}")

    def _later(self, now: float, why: str) -> None:
        self._deaths += 1
        pause = _POLICY.delay(self._deaths, jitter=0.0)
        self._say(f"{self.name} {why}; starting it again in {pause:.0f} s")
        self._due = now + pause


#: A host that does not answer within 15 s counts as cut off, and nobody is asked for a password.
_SSH = [
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
]
_JUGGLER_HERE = [sys.executable, "-m", "juggler"]
_ANSWER_SECONDS = 60.0  # of a host, to begin with
_LEAVE_SECONDS = 30.0  # for workers, once the driver has ended
_LOOK_SECONDS = 0.2
#: A driver that dies sooner than this does so again.
_DRIVER_LIVED_SECONDS = 10.0
_NO_COMMAND = 127
_NO_CONNECTION = 255


class SshRun:
    """Starts a driver here and workers on other hosts, starts again what dies, and takes all down.

    The worker that loses its driver ends at once: `KeptRunning` starts the next one. Each has a
    terminal there (`ssh -tt`), so that it ends when its connection does.
    """

    def __init__(self, launch: Launch, hosts: Hosts, say: Say) -> None:
        """
        Args:
            launch: the run.
            hosts: where its workers run.
            say: tells people.

        Raises:
            LaunchError: there are too many workers.
        """
        self._launch, self._hosts, self._say = launch, hosts, say
        self._numbers = {role: sum(_number(role, host) for host in hosts.hosts) for role in ROLES}
        must_allow(self._numbers)
        self._there = f'"$HOME"/.juggler/{shlex.quote(launch.tag)}'  # on the other hosts
        self._logs = launch.directory / "logs"
        self._wanted = Wanted(launch.directory)
        # By role and host, then by number; and by role and number those that are too many.
        self._kept: dict[tuple[str, str], dict[int, KeptRunning]] = {}
        self._leaving: dict[tuple[str, int], KeptRunning] = {}
        self._signals: list[int] = []
        self._have_copies: list[Host] = []  # of the certificates

    def commands(self) -> list[tuple[str, list[str]]]:
        """Everything that is started -> for each what it is, and its words; the driver first."""
        found = [("the driver", self._driver())]
        for role in ROLES:
            index = itertools.count()
            for host in self._hosts.hosts:
                found += [self._worker(role, host, next(index)) for _ in range(_number(role, host))]
        return found

    def run(self) -> int:
        """Train until the driver ends -> its exit status.

        Raises:
            LaunchError: a host cannot be reached, or has no Juggler or another version of it.
        """
        with ExitStack() as last:
            last.enter_context(self._wanted.read_here())
            self._launch.make_certificates(self._hosts.dialed)
            try:
                self._prepare_all()
            except BaseException:  # of one of the hosts, or Ctrl-C
                self._forget()
                raise
            self._logs.mkdir(parents=True, exist_ok=True)
            for role, number in self._numbers.items():
                self._wanted.begin(role, number)
            self._say(f"what the workers print is in {self._logs}")
            for number in ending_signals():
                before = signal.signal(number, self._note)
                last.callback(signal.signal, number, before)
            last.callback(self._forget)
            last.callback(self._end)
            return self._drive()

    # -- the driver and its workers -------------------------------------------------------------

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _drive(self) -> int:
        while True:
            began, asked = time.monotonic(), False
            driver = subprocess.Popen(self._driver(), start_new_session=True)
            while (status := driver.poll()) is None:
                while self._signals:
                    asked = True
                    driver.send_signal(self._signals.pop(0))
                self._have_as_many_as_are_wanted()
                for each in self._all():
                    each.look()
                time.sleep(_LOOK_SECONDS)
            died = status < 0 and not asked
            if not died or time.monotonic() - began < _DRIVER_LIVED_SECONDS:
                return status if status >= 0 else 128 - status
            self._say(f"the driver died ({signal.Signals(-status).name}); starting it again")

    def _have_as_many_as_are_wanted(self) -> None:
        """Start workers, or end those that came last, where somebody wants another number."""
        self._leaving = {at: each for at, each in self._leaving.items() if each.running}
        for role in ROLES:
            try:
                wanted = self._wanted.read(role)
            except LaunchError:
                continue  # somebody has removed the file, or changes it now
            weights = self._weights(role)
            for host, number in zip(self._hosts.hosts, shared_out(wanted, weights), strict=True):
                here = self._kept.setdefault((role, host.name), {})
                for index in sorted(here)[number:]:
                    here[index].end(signal.SIGTERM)
                    self._leaving[role, index] = here.pop(index)
                for index in self._free(role, number - len(here)):
                    name, words = self._worker(role, host, index)
                    log = self._logs / f"{name.replace(' ', '-')}.log"
                    here[index] = KeptRunning(name, words, log, self._say)

    def _weights(self, role: str) -> list[int]:
        """The shares of all hosts in a role. Where the file gives it to none: as of EnvRunners."""
        found = [_number(role, host) for host in self._hosts.hosts]
        return found if any(found) else [host.env_runners for host in self._hosts.hosts]

    def _free(self, role: str, count: int) -> list[int]:
        """So many numbers that no worker of a role has."""
        taken = {index for of, index in self._leaving if of == role}
        taken |= {index for (of, _), here in self._kept.items() if of == role for index in here}
        free = (index for index in itertools.count() if index not in taken)
        return list(itertools.islice(free, max(0, count)))

    def _all(self) -> list[KeptRunning]:
        kept = [each for here in self._kept.values() for each in here.values()]
        return [*kept, *self._leaving.values()]

    def _end(self) -> None:
        """Give workers time to leave, and end those that stay. A signal cuts a wait short."""
        for each in self._all():
            each.start_no_more()
        for number, seconds in ((0, _LEAVE_SECONDS), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            for each in self._all():
                if number:
                    each.end(number)
            end = time.monotonic() + seconds
            while any(each.running for each in self._all()) and time.monotonic() < end:
                if self._signals:
                    self._signals.pop()
                    break
                for each in self._all():
                    each.look()
                time.sleep(_LOOK_SECONDS)

    # -- the commands ---------------------------------------------------------------------------

    def _driver(self) -> list[str]:
        return self._launch.driver(self._hosts.driver, _JUGGLER_HERE, self._numbers[LEARNER])

    def _worker(self, role: str, host: Host, index: int) -> tuple[str, list[str]]:
        """What a worker is, and its words."""
        juggler, driver = shlex.split(host.juggler), self._hosts.driver
        if role == LEARNER:
            words = learner(driver, juggler, index, host.dialed, self._launch.of_learners)
        else:
            words = player(role, driver, juggler, index)
        return f"{role} {index} on {host.name}", self._at(host, words)

    def _at(self, host: Host, words: Sequence[str]) -> list[str]:
        """A worker's command on a host."""
        tls = "" if self._launch.insecure else f"{self._there}/tls"
        command = shell([*words, "--reattach-seconds", "0"], tls)
        where = f"cd {shlex.quote(host.directory)} && " if host.directory else ""
        return [*_SSH, "-tt", host.name, f"{where}{command}"]

    # -- the hosts ------------------------------------------------------------------------------

    def _prepare(self, host: Host) -> str:
        """Check that Juggler is there, and copy certificates -> "" or what is wrong."""
        where = f"cd {shlex.quote(host.directory)} && " if host.directory else ""
        status, said = _asked(host, f"{where}{host.juggler} --version")
        here = _version()
        if status == _NO_COMMAND:
            return f"{host.name} has no command {host.juggler!r}: install Juggler there, or say \
where it is with `juggler = ` in the file of hosts ({said})"
        if status:
            return f"{host.name} cannot be used: {said or f'ssh ended with status {status}'}"
        if here not in said:
            return f"{host.name} has {said!r}, and this host {here!r}: install the same version"
        if self._launch.insecure:
            return ""
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            for path in sorted(self._launch.tls.iterdir()):
                archive.add(path, arcname=f"tls/{path.name}")
        self._have_copies.append(host)
        there = self._there
        unpack = f"umask 077 && mkdir -p {there} && tar -x -C {there} --no-same-owner -f -"
        status, said = _asked(host, unpack, content.getvalue())
        return f"cannot copy certificates to {host.name}: {said}" if status else ""

    def _prepare_all(self) -> None:
        """
        Raises:
            LaunchError: something is wrong with one of the hosts, or several.
        """
        with ThreadPoolExecutor(min(32, len(self._hosts.hosts))) as pool:
            problems = [text for text in pool.map(self._prepare, self._hosts.hosts) if text]
        if problems:
            raise LaunchError("\n".join(problems))

    def _forget(self) -> None:
        """Delete the certificates on the hosts, where they can still be reached."""
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(lambda host: _asked(host, f"rm -rf {self._there}"), self._have_copies))


def _number(role: str, host: Host) -> int:
    """How many workers of a role the file gives to a host."""
    return {LEARNER: host.learners, EVALUATOR: host.evaluators}.get(role, host.env_runners)


def _asked(host: Host, command: str, given: bytes = b"") -> tuple[int, str]:
    """Run a command on a host -> its exit status, and the last lines that it printed."""
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
        raise LaunchError(
            "there is no command `ssh` here: install it (Debian: openssh-client)"
        ) from None
    except subprocess.TimeoutExpired:
        return _NO_CONNECTION, f"no answer within {_ANSWER_SECONDS:.0f} s"
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return done.returncode, " | ".join(lines[-3:])


def _version() -> str:
    from importlib.metadata import version

    return f"juggler {version('juggler')}"
