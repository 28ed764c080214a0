"""A Docker engine of a test's own, and Juggler's image on it: from nothing but apt and pip."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
IMAGE = "juggler-under-test"

_PACKAGES = {
    "dockerd": "docker.io",
    "docker-compose": "docker-compose",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
}
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_NO_RULES = "*{}\n{}COMMIT\n"
_CHAINS = {
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
}


def missing() -> str:
    """Why there can be no Docker engine here; "" if there can."""
    if os.geteuid() != 0:
        return "needs root, for a Docker engine of its own"
    lacking = [package for name, package in _PACKAGES.items() if not shutil.which(name)]
    if lacking and not shutil.which("apt-get"):
        return f"needs a Docker engine (Debian: {' '.join(lacking)})"
    return ""


class Engine:
    """A daemon with a directory, a socket and a containerd of its own, and no default bridge.

    Attributes:
        directory: for its data and whatever a test adds.
    """

    def __init__(self) -> None:
        # Short: it holds Unix sockets.
        self.directory = Path(tempfile.mkdtemp(prefix="jd-"))
        self._environment = {
            **os.environ,
            "DOCKER_HOST": f"unix://{self.directory}/docker.sock",
            "DOCKER_BUILDKIT": "0",  # which needs a plugin that not every client has
        }
        self._daemon: subprocess.Popen[bytes] | None = None
        self._rules = ""
        self._forwarding = _FORWARDING.read_text()

    @property
    def host(self) -> str:
        """Where commands find it: the variable DOCKER_HOST."""
        return self._environment["DOCKER_HOST"]

    def start(self) -> None:
        self._install()
        self._rules = "".join(self._table(name) for name in _CHAINS)
        roots = [f"--data-root={self.directory}/data", f"--exec-root={self.directory}/exec"]
        names = [f"--pidfile={self.directory}/pid", f"--host={self.host}"]
        with self._log().open("wb") as log:
            self._daemon = subprocess.Popen(
                ["dockerd", *roots, *names, "--bridge=none"], stdout=log, stderr=log
            )
        deadline = time.monotonic() + 60
        while self._ask("docker", "info").returncode:
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no Docker engine starts here:\n{self._log().read_text()}")
            time.sleep(0.2)

    def run(self, *command: str | Path, cwd: Path = REPOSITORY, seconds: float = 300) -> str:
        """A command that finds the engine -> what it prints."""
        done = self._ask(*command, cwd=cwd, seconds=seconds)
        assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def manages(self, *command: str) -> bool:
        """Whether a command that finds the engine succeeds."""
        return self._ask(*command).returncode == 0

    def build(self) -> None:
        """Build the image, on one that stands in for that which the Dockerfile starts from."""
        (base,) = [
            line.split()[1]
            for line in DOCKERFILE.read_text().splitlines()
            if line.startswith("FROM ")
        ]
        stand_in = REPOSITORY / "tests" / "support" / "stand_in.sh"
        wheels = self.directory / "wheels"
        wheels.mkdir()
        # Both take their time, the one waiting for the network and the other for the disk.
        with ThreadPoolExecutor() as beside, _served(wheels) as address:
            downloaded = beside.submit(_download, wheels)
            self.run("sh", stand_in, base, address, self.directory, seconds=900)
            downloaded.result()
            # On the host's network, where that address is.
            options = ["--network", "host", "--build-arg", "TORCH_INDEX="]
            self.run("docker", "build", *options, "-f", DOCKERFILE, "-t", IMAGE, ".", seconds=1500)

    def close(self) -> None:
        """Leave nothing behind: no container, no network, no data, no rule."""
        if self._daemon is not None:
            running = self.run("docker", "ps", "-aq").split()
            if running:
                self.run("docker", "rm", "--force", "--volumes", *running)
            self.run("docker", "network", "prune", "--force")
            self._daemon.send_signal(signal.SIGTERM)
            self._daemon.wait(60)
            subprocess.run(["iptables-restore"], input=self._rules, text=True, check=True)
            _FORWARDING.write_text(self._forwarding)
        for line in Path("/proc/self/mounts").read_text().splitlines():
            if (mounted := line.split()[1]).startswith(f"{self.directory}/"):
                subprocess.run(["umount", mounted], check=True)
        shutil.rmtree(self.directory)

    def _log(self) -> Path:
        return self.directory / "dockerd.log"

    def _install(self) -> None:
        lacking = [package for name, package in _PACKAGES.items() if not shutil.which(name)]
        if lacking:
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            for command in (["update"], ["install", "-y", "--no-install-recommends", *lacking]):
                patient = ["-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=120"]
                subprocess.run(
                    ["apt-get", "-q", *patient, *command],
                    check=True,
                    env=environment,
                    capture_output=True,
                )

    def _ask(
        self, *command: str | Path, cwd: Path = REPOSITORY, seconds: float = 300
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=cwd,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def _table(self, name: str) -> str:
        """The rules of this host as `iptables-restore` takes them."""
        saved = self._ask("iptables-save", "-t", name).stdout
        return saved or _NO_RULES.format(name, "".join(f":{c} ACCEPT\n" for c in _CHAINS[name]))


def _download(wheels: Path) -> None:
    """What the image installs, from wherever pip takes packages on this host."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    needed = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["certs"],
    ]
    constraints = REPOSITORY / "constraints.txt"
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-cache-dir"]
    subprocess.run([*pip, "-d", wheels, "-c", constraints, *needed], check=True)


@contextlib.contextmanager
def _served(directory: Path) -> Iterator[str]:
    """The directory over HTTP, on loopback -> its address."""
    handler = partial(_Quiet, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass
