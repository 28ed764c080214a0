"""The command lines of a run's processes, and the directory of what its launch needs."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from juggler.driver.monitoring import MOST_WORKERS
from juggler.envrunner.program import ENVRUNNER, EVALUATOR
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.tls import TLS_VARIABLE
from juggler.runtime.installing import installing

#: By the role of workers, the option that says how many there are to be.
OPTIONS = {LEARNER: "--learners", ENVRUNNER: "--env-runners", EVALUATOR: "--evaluators"}
ROLES = tuple(OPTIONS)


class LaunchError(RuntimeError):
    """A run cannot be launched; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One run that is launched.

    Attributes:
        run_dir: of the run.
        config: a shipped configuration or a file; "": the defaults and `options` alone.
        options: of `juggler driver`, besides those that the engine sets.
        insecure: without TLS and tokens.
        plain_gradients: several learners add up gradients without encryption, which is faster.
        receivers: how many processes receive episodes for each learner.
        gateway: the key of its configuration; "": EnvRunners make environments.
    """

    run_dir: Path
    config: str
    options: Sequence[str] = ()
    insecure: bool = False
    plain_gradients: bool = False
    receivers: int = 0
    gateway: str = ""

    @property
    def tag(self) -> str:
        """A name for this run alone, whatever other runs are called."""
        whole = str(self.run_dir.absolute()).encode()
        return f"{self.run_dir.name}-{hashlib.blake2b(whole, digest_size=4).hexdigest()}"

    @property
    def label(self) -> str:
        """The tag as engines take names: of lower-case letters, digits and hyphens."""
        name, _, digest = self.tag.rpartition("-")
        words = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:24].strip("-")
        return f"juggler-{words}-{digest}" if words else f"juggler-{digest}"

    @property
    def config_file(self) -> Path | None:
        """The file of the configuration; None: it ships with Juggler, or there is none."""
        path = Path(self.config)
        return path if path.suffix == ".toml" or (self.config and path.exists()) else None

    @property
    def of_learners(self) -> list[str]:
        """Options of `juggler learner` that all learners have."""
        plain = self.plain_gradients or self.insecure
        receivers = [f"--receivers={self.receivers}"] if self.receivers else []
        return [*(["--insecure"] if plain else []), *receivers]

    @property
    def directory(self) -> Path:
        """What the launch needs and writes: certificates, scripts, logs. It lies beside the run's
        directory, which a new run wants empty."""
        return self.run_dir.with_name(f"{self.run_dir.name}.launch")

    @property
    def tls(self) -> Path:
        return self.directory / "tls"

    def driver(self, bind: str, juggler: Sequence[str], learners: int) -> list[str]:
        """The driver's command.

        Args:
            bind: where it listens, HOST:PORT.
            juggler: the words that start Juggler.
            learners: how many it waits for at the start.
        """
        config = [self.config] if self.config else []
        own = ["--run-dir", str(self.run_dir), "--go-on", "--bind", bind]
        insecure = ["--insecure"] if self.insecure else ["--tls", str(self.tls)]
        return [*juggler, "driver", *config, *own, *insecure, *self.options_with(learners)]

    def driver_there(self, run_dir: str, config: str, learners: int, *more: str) -> list[str]:
        """The words of a driver in a container, where certificates are secrets.

        Args:
            run_dir: the directory of the run there.
            config: the file of the configuration there, if it is a file.
            learners: how many it waits for at the start.
            more: further options.
        """
        name = config if self.config_file else self.config
        own = ["--run-dir", run_dir, "--go-on", "--bind", "0.0.0.0:5005", *more]
        return ["driver", *([name] if name else []), *own, *self.options_with(learners)]

    def config_there(self) -> str:
        """The text of the file of the configuration, for a container.

        Raises:
            LaunchError: it cannot be read.
        """
        if self.config_file is None:
            return "# The driver takes the configuration that its command names.\n"
        try:
            return self.config_file.read_text()
        except OSError as error:
            raise LaunchError(f"cannot read {self.config}: {error.strerror}") from error

    def options_with(self, learners: int) -> list[str]:
        """The options of the driver, with the number of learners that it waits for at the start
        unless they say it."""
        given = any(each.partition("=")[0] == "--num-learners" for each in self.options)
        return [*self.options, *([] if given else ["--num-learners", str(learners)])]

    def make_certificates(self, hosts: Sequence[str]) -> None:
        """Make the certificates and the token of this run, unless an earlier launch made them.

        Args:
            hosts: names and addresses by which the driver and the learners are dialed.

        Raises:
            LaunchError: the package that makes them is not installed, or the disk refuses.
        """
        if self.insecure:
            return
        # A launch that goes on with a run may use other hosts than the one before.
        known = self.tls / "hosts"
        text = "".join(f"{host}\n" for host in sorted(set(hosts)))
        if known.is_file() and known.read_text() == text:
            return
        try:
            from juggler.runtime.actors.certificates import make_certificates
        except ImportError as error:
            raise LaunchError(
                f"certificates need a package that is not installed ({error}): "
                f"{installing('certs')}; or, on a network that you trust, give --insecure"
            ) from error
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o700)
            if self.tls.is_dir():
                for file in self.tls.iterdir():
                    file.unlink()
            make_certificates(self.tls, hosts, days=365.0)
            known.write_text(text)
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot make certificates in {self.tls}: {error}") from error


def must_allow(numbers: Mapping[str, int | None]) -> None:
    """
    Args:
        numbers: how many workers are wanted, by role; None: whatever there is.

    Raises:
        LaunchError: so many cannot take part.
    """
    for role, number in numbers.items():
        least = 0 if role == EVALUATOR else 1
        if number is not None and not least <= number <= MOST_WORKERS:
            what = OPTIONS[role]
            raise LaunchError(f"{what} {number}: must be from {least} to {MOST_WORKERS}")


def player(role: str, driver: str, juggler: Sequence[str], index: int | str) -> list[str]:
    """The command of an EnvRunner, or of an evaluator.

    Args:
        role: which of the two.
        driver: the driver's address, or the directory of the run on a shared file system.
        juggler: the words that start Juggler.
        index: of this worker; -1: the driver chooses.
    """
    return [*juggler, role, "--driver", driver, "--index", str(index)]


def learner(
    driver: str, juggler: Sequence[str], index: int | str, host: str, own: Sequence[str]
) -> list[str]:
    """The command of a learner.

    Args:
        driver: as for `player`.
        juggler: the words that start Juggler.
        index: of this learner; -1: the driver chooses.
        host: by which EnvRunners dial it; "": as the host calls itself.
        own: further options, which all learners have.
    """
    here = ["--index", str(index), "--bind", "0.0.0.0:0"]
    here += ["--advertise", f"{host}:0"] if host else []
    return [*juggler, "learner", "--driver", driver, *here, *own]


def shell(words: Sequence[str], tls: str = "") -> str:
    """A command for a shell, with the directory of its certificates in its environment."""
    command = shlex.join(words)
    return f"{TLS_VARIABLE}={tls} {command}" if tls else command


def launch_directory(run_dir: str, config: str) -> Path:
    """The directory of the run: as given, or one under runs/ that is named after the
    configuration."""
    if run_dir:
        return Path(run_dir)
    stem = Path(config).stem or "run"
    return Path("runs", f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
