"""Launches a run on an engine, scales it, and ends it."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from juggler.driver.monitoring import MOST_WORKERS
from juggler.driver.signals import ending_signals
from juggler.envrunner.envrunner_program import ENVRUNNER, EVALUATOR
from juggler.learner.process.learner_program import LEARNER
from juggler.runtime.actors.tls import AUTHORITY, CERTIFICATE, KEY, TOKEN
from juggler.runtime.install_commands import installing
from juggler.runtime.plain_files import open_plain, read_plain, try_lock

Report = Callable[[str], None]

#: Options for numbers of workers, by role.
OPTIONS = {LEARNER: "--learners", ENVRUNNER: "--env-runners", EVALUATOR: "--evaluators"}
ROLES = tuple(OPTIONS)
JUGGLER = [sys.executable, "-m", "juggler"]  # the words of a command that starts Juggler here
FILES = (AUTHORITY, CERTIFICATE, KEY, TOKEN)  # suffix of the directory of certificates
#: Names that Kubernetes accepts: labels of RFC 1123.
LABEL = re.compile("(?!.{64})[a-z0-9]([a-z0-9-]*[a-z0-9])?")
SIGNALLED = 128  # minimum exit status of a container that a signal ended

_MOST_BYTES = 128  # of a file with a number or the name of an engine
_ANSWER_SECONDS = 60.0  # of an engine
_CERTIFICATE_DAYS = 365.0
_LOOK_SECONDS = 1.0
_ASK_SECONDS = 5.0  # between two requests to the engine
_LAST_LINES_SECONDS = 3.0  # for a command that shows a process's output
_REMOVED_SECONDS = 90.0  # for an engine, to end all processes


class LaunchError(RuntimeError):
    """A run that cannot be launched; the message has a remedy."""


class NoAnswer(LaunchError):
    """An engine gave no answer, or an error; it may recover."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One run to launch."""

    run_dir: Path
    config: str = ""  # a shipped configuration or a file; "": only the defaults and `options`
    options: Sequence[str] = ()  # of `juggler driver`, in addition to the engine's
    insecure: bool = False  # without TLS and tokens
    # Several learners add up gradients without encryption, which is faster
    plain_gradients: bool = False
    gateway: str = ""  # the configuration's key; "": EnvRunners make environments

    @property
    def tag(self) -> str:
        """A name that is unique to this run: from its whole path."""
        whole = str(self.run_dir.absolute()).encode()
        return f"{self.run_dir.name}-{hashlib.blake2b(whole, digest_size=4).hexdigest()}"

    @property
    def label(self) -> str:
        """The tag as a name for engines: lower-case letters, digits and hyphens."""
        name, _, digest = self.tag.rpartition("-")
        words = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:24].strip("-")
        return f"juggler-{words}-{digest}" if words else f"juggler-{digest}"

    def name(self, role: str) -> str:
        """Name a role's jobs or pods at an engine."""
        return f"{self.label}-{role}"

    @property
    def config_file(self) -> Path | None:
        """The configuration, if it is a file."""
        path = Path(self.config)
        return path if path.suffix == ".toml" or (self.config and path.exists()) else None

    @property
    def directory(self) -> Path:
        """Directory of certificates, scripts and logs, next to the run's directory."""
        return self.run_dir.with_name(f"{self.run_dir.name}.launch")

    @property
    def tls(self) -> Path:
        return self.directory / "tls"

    def driver(self, bind: str, learners: int) -> list[str]:
        """Return the command of a driver here."""
        insecure = ["--insecure"] if self.insecure else ["--tls", str(self.tls)]
        words = self.driver_there(str(self.run_dir), self.config, learners, *insecure, bind=bind)
        return [*JUGGLER, *words]

    def driver_there(
        self, run_dir: str, config: str, learners: int, *more: str, bind: str = "0.0.0.0:5005"
    ) -> list[str]:
        """Return the command of a driver elsewhere, such as in a container."""
        name = config if self.config_file else self.config
        given = any(each.partition("=")[0] == "--num-learners" for each in self.options)
        options = [*self.options, *([] if given else ["--num-learners", str(learners)])]
        own = ["--run-dir", run_dir, "--go-on", "--bind", bind, *more]
        return ["driver", *([name] if name else []), *own, *options]

    def worker(
        self, role: str, driver: str, juggler: Sequence[str] = (), index: int = -1, host: str = ""
    ) -> list[str]:
        """Return the command of a worker."""
        words = [*juggler, role, "--driver", driver, "--index", str(index)]
        if role != LEARNER:
            takes = self.gateway if role == ENVRUNNER else ""
            return [*words, "--gateway", takes] if takes else words
        words += ["--bind", "0.0.0.0:0", *(["--advertise", f"{host}:0"] if host else [])]
        return [*words, *self.of_learners]

    @property
    def of_learners(self) -> list[str]:
        """Return options of `juggler learner` for all learners."""
        return ["--insecure"] if self.plain_gradients or self.insecure else []

    def config_there(self) -> str:
        """Return the text of the configuration file, for a container."""
        if self.config_file is None:
            return "# The driver's command names its configuration.\n"
        try:
            return self.config_file.read_text()
        except OSError as error:
            raise LaunchError(f"cannot read {self.config}: {error.strerror}") from error

    def make_certificates(self, hosts: Sequence[str]) -> None:
        """Make certificates and token, unless an earlier launch did."""
        # A launch that resumes a run may use other hosts than before.
        known = self.tls / "hosts"
        text = "".join(f"{host}\n" for host in sorted(set(hosts)))
        if self.insecure or (known.is_file() and known.read_text() == text):
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o700)
            new_certificates(self.tls, hosts, replace=True)
            known.write_text(text)
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot make certificates in {self.tls}: {error}") from error

    def count_file(self, role: str) -> Path:
        """Return the file with a role's wanted number of workers."""
        return self.directory / f"{role}.count"

    @property
    def _engine_file(self) -> Path:
        """File with the scaling engine; missing: a process reads the counts."""
        return self.directory / "engine"

    @property
    def _reader_file(self) -> Path:
        """File that is locked by the process that reads the counts."""
        return self.directory / "reader.lock"

    @property
    def is_running(self) -> bool:
        return all(self.count_file(role).is_file() for role in ROLES)

    @property
    def is_abandoned(self) -> bool:
        """Return whether the process that should read the counts is gone."""
        try:
            with open_plain(self._reader_file) as file:
                return try_lock(file, shared=True) is True
        except OSError:  # without a reader process, the engine reads the files
            return False

    @contextmanager
    def read_here(self) -> Iterator[None]:
        """Have this process read the counts, and remove them at the end."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.fdopen(os.open(self._reader_file, flags, 0o666), "w")
        except OSError as error:
            raise LaunchError(f"cannot write {self._reader_file}: {error.strerror}") from error
        # The kernel unlocks it if this process is killed, by which `juggler scale` knows it.
        with file:
            if try_lock(file) is False:
                raise LaunchError(
                    f"another `juggler launch` has already started the run of {self.directory}"
                )
            try:
                yield
            finally:
                self.forget_counts()

    def begin_counts(self, numbers: Mapping[str, int], engine: str = "") -> None:
        """Write the first numbers of workers, for an engine or a process."""
        self._engine_file.unlink(missing_ok=True)
        if engine:
            self._reader_file.unlink(missing_ok=True)  # of an earlier launch over SSH
            _write_new(self._engine_file, engine)
        for role, number in numbers.items():
            _write_new(self.count_file(role), f"{number}\n")

    def count(self, role: str) -> int:
        """Read the wanted number of workers of a role."""
        path = self.count_file(role)
        try:
            return int(read_plain(path, _MOST_BYTES))
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot read {path}: {error}") from error

    def scale(self, role: str, number: int) -> str:
        """Set the number of workers, and return a report."""
        before = self.count(role)
        if self._engine_file.exists():
            ask(*self._scaling(role, number), advice="scale the run where it was launched")
        _write_new(self.count_file(role), f"{number}\n")
        return f"{role}: {number} instead of {before}"

    def _scaling(self, role: str, number: int) -> list[str]:
        try:
            engine_words = read_plain(self._engine_file, _MOST_BYTES).decode().split()
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot read {self._engine_file}: {error}") from error
        match engine_words:
            case ["swarm"]:
                return ["docker", "service", "scale", "--detach", f"{self.label}_{role}={number}"]
            case ["kubernetes", namespace] if LABEL.fullmatch(namespace):
                kind = "statefulset" if role == LEARNER else "deployment"
                what = [f"{kind}/{self.name(role)}", f"--replicas={number}"]
                return ["kubectl", "scale", "-n", namespace, *what]
        raise LaunchError(f"{self._engine_file} names no engine: launch the run again")

    def forget_counts(self) -> None:
        """Remove the files, because the run has ended."""
        for role in ROLES:
            self.count_file(role).unlink(missing_ok=True)
        self._engine_file.unlink(missing_ok=True)
        self._reader_file.unlink(missing_ok=True)


def new_certificates(directory: Path, hosts: Sequence[str], *, replace: bool = False) -> list[Path]:
    """Make certificates and a token, and return their files.

    Raises:
        LaunchError: a package for certificates is not installed.
        OSError: writing fails.
        ValueError: a host is neither a name nor an IP address.
    """
    try:
        from juggler.runtime.actors.certificates import make_certificates
    except ImportError as error:
        raise LaunchError(
            f"certificates need a package that is not installed ({error}): {installing('certs')}; "
            "or run without them, with --insecure, on a network that you trust"
        ) from error
    for file in directory.iterdir() if replace and directory.is_dir() else ():
        file.unlink()
    return make_certificates(directory, hosts, _CERTIFICATE_DAYS)


def must_allow(numbers: Mapping[str, int | None]) -> None:
    """Check numbers of workers by role; None: unchanged."""
    for role, number in numbers.items():
        least = 0 if role == EVALUATOR else 1
        if number is not None and not least <= number <= MOST_WORKERS:
            what = OPTIONS[role]
            raise LaunchError(f"{what} {number}: must be from {least} to {MOST_WORKERS}")


def ask(*command: str, advice: str) -> str:
    """Run a command of an engine, and return its output.

    Raises:
        LaunchError: the command is missing.
        NoAnswer: the command does not end, or fails.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
            start_new_session=True,  # Ctrl-C is for the run
        )
    # An engine may be busy, but a missing command stays missing.
    except FileNotFoundError:
        raise LaunchError(f"the command `{command[0]}` is not installed here: {advice}") from None
    except subprocess.TimeoutExpired:
        problem = f"`{command[0]}` gave no answer within {_ANSWER_SECONDS:.0f} s"
        raise NoAnswer(problem) from None
    if done.returncode:
        raise NoAnswer(f"`{shlex.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _write_new(path: Path, text: str) -> None:
    """Replace a file, whole or not at all; never follow a link."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        with new.open("x") as file:
            file.write(text)
        new.rename(path)
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}") from error


class Tail:
    """An engine's command that shows a process's output."""

    def __init__(self, *command: str) -> None:
        # In its own process group: Ctrl-C is for the run, whose end is still to be shown.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """Wait for the last lines, and end the command."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_LINES_SECONDS)
        self._process.terminate()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class DriverState:
    """State of the driver's process, as reported by an engine."""

    text: str = ""  # description of its state and the reason; "": nothing to report
    running: bool = False  # whether it is running
    # The exit status of an ended run; -1: it ended as requested, and the engine does not know its
    # status; None: it is running
    status: int | None = None


class EngineRun(ABC):
    """A run whose processes are managed by an engine."""

    ask_seconds: float | None = None  # between two requests about the driver; None: the default
    end_seconds: float = 90.0  # for the driver to end normally

    def __init__(self, launch: Launch, numbers: Mapping[str, int], report: Report) -> None:
        must_allow(numbers)
        self._launch, self._numbers, self._report = launch, dict(numbers), report
        self._tail: Tail | None = None  # shows the driver's output
        self.signals: list[int] = []  # signals received while the run is followed

    @abstractmethod
    def plan(self) -> str:
        """Describe what would be started or submitted."""

    @abstractmethod
    def submit(self) -> None:
        """Submit everything to the engine."""

    @abstractmethod
    def driver_state(self, ending: bool) -> DriverState:
        """Return the state of the driver.

        Raises:
            NoAnswer: the engine gave no answer.
            LaunchError: the run is gone.
        """

    def poll(self) -> None:
        """Do periodic work; called every second."""
        return

    @abstractmethod
    def end(self) -> None:
        """Ask the driver to end normally."""

    @abstractmethod
    def tear_down(self) -> None:
        """End all processes at once, and remove the run."""

    def stop_showing(self) -> None:
        """Remove the counts, and stop showing the driver's output."""
        self._launch.forget_counts()
        if self._tail is not None:
            self._tail.close()

    @contextmanager
    def submitting(self, hosts: Sequence[str], engine: str = "") -> Iterator[None]:
        """Make certificates and counts; take the run down if the rest fails.

        Raises:
            LaunchError: a file cannot be written.
        """
        self._launch.make_certificates(hosts)
        try:
            self._launch.directory.mkdir(parents=True, exist_ok=True)
            self._launch.begin_counts(self._numbers, engine)
            with self.torn_down():
                yield
        except OSError as error:
            where, why = error.filename or self._launch.directory, error.strerror or error
            raise LaunchError(f"cannot write {where}: {why}") from error

    @contextmanager
    def torn_down(self) -> Iterator[None]:
        """Take the run down if something goes wrong within, such as Ctrl-C."""
        try:
            yield
        except BaseException:
            with suppress(LaunchError):  # the first error is the one to report
                self.tear_down()
            raise


def follow(run: EngineRun, report: Report) -> int:
    """Follow a run to its end; return the driver's exit status.

    A signal ends the run normally; a second one ends all processes at once.
    """

    def note(number: int, frame: FrameType | None) -> None:
        run.signals.append(number)

    with ExitStack() as last:
        for number in ending_signals():
            last.callback(signal.signal, number, signal.signal(number, note))
        with run.torn_down():
            status = _follow(run, report)
            run.poll()
        run.tear_down()
    return status


def _follow(run: EngineRun, report: Report) -> int:
    state, due, silent = DriverState(), 0.0, False
    first, end, handled = 0, float("inf"), 0
    while True:
        run.poll()
        now = time.monotonic()
        asked_to_end = handled < len(run.signals)
        if (asked_to_end and handled) or now > end:
            report("ending all processes at once")
            return 128 + first
        # A driver that was pending seconds ago may be running now, and should then end normally.
        if asked_to_end or now >= due:
            due = now + (_ASK_SECONDS if run.ask_seconds is None else run.ask_seconds)
            before = state
            try:
                state, silent = run.driver_state(bool(first)), False
            except NoAnswer as error:
                if not silent:
                    report(f"{error}; the run continues, and this command will ask again")
                silent = True
            if state.status is not None:
                return state.status if state.status >= 0 else 128 + first
            if state.text and state.text != before.text:
                report(f"the driver: {state.text}")
        # A driver that is not running has nothing to save.
        if asked_to_end:
            first, handled = run.signals[0], len(run.signals)
            if not state.running:
                report("ending all processes at once")
                return 128 + first
            report("ending the run; another signal ends all processes at once")
            end = now + run.end_seconds
            try:
                run.end()
            except NoAnswer as error:
                report(str(error))
        time.sleep(_LOOK_SECONDS)


def wait_until_removed(there: Callable[[], object], advice: str) -> None:
    """Wait until an engine has removed a run."""
    end = time.monotonic() + _REMOVED_SECONDS
    while True:
        why = ""
        try:
            if not there():
                return
        except NoAnswer as error:
            why = f" ({error})"
        if time.monotonic() > end:
            late = f"were not removed within {_REMOVED_SECONDS:.0f} s{why}: see {advice}"
            raise LaunchError(f"the launched processes {late}")
        time.sleep(_LOOK_SECONDS)
