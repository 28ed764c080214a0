"""A Docker engine for tests with Juggler's image, and runs on it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from juggler.launch.engine import Launch
from support.place import Command, Place

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
    """A daemon with its own directory, socket and containerd.

    Attributes:
        directory: for its data and the files of a test.
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

    def build(self) -> None:
        """Build the image on a stand-in for the Dockerfile's base."""
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
            command, cwd=cwd, env=self._environment, capture_output=True, text=True, timeout=seconds
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


PATIENCE = 240.0  # seconds


class Cluster:
    """Containers of a driver, two learners and some EnvRunners.

    Attributes:
        run_dir: of the present run, on this host.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._directory = engine.directory / "project"
        shutil.copytree(REPOSITORY / "docker", self._directory)
        self.run_dir, self._project = Path(), ""
        self.configure()

    def configure(self, project: str = "jc", options: str = "", **variables: object) -> None:
        """Write `.env`: two learners and three EnvRunners, unless `variables` say otherwise."""
        own = {
            "COMPOSE_PROJECT_NAME": project,
            "JUGGLER_IMAGE": IMAGE,
            "JUGGLER_RUN": f"cartpole --checkpoint-seconds 5 {options}",
            "JUGGLER_LEARNERS": 2,
            "JUGGLER_ENVRUNNERS": 3,
            "JUGGLER_METRICS_PORT": 0,
        }
        lines = (f"{key}={value}\n" for key, value in {**own, **variables}.items())
        (self._directory / ".env").write_text("".join(lines))
        self._project = f"label=com.docker.compose.project={project}"
        volume = self._engine.directory / "data" / "volumes" / f"{project}_runs"
        self.run_dir = volume / "_data" / str(variables.get("JUGGLER_NAME", "run"))

    def compose(self, *arguments: str) -> str:
        return self._engine.run("docker-compose", *arguments, cwd=self._directory)

    def docker(self, *arguments: str) -> str:
        return self._engine.run("docker", *arguments).strip()

    def containers(self, service: str, *options: str) -> list[str]:
        """Ids of the running ones, in the order of their numbers."""
        whose = f"--filter={self._project}", f"--filter=label=com.docker.compose.service={service}"
        number = '{{.Label "com.docker.compose.container-number"}} {{.ID}}'
        lines = self.docker("ps", *options, *whose, "--format", number).splitlines()
        return [line.split()[1] for line in sorted(lines, key=lambda each: int(each.split()[0]))]

    def ended(self, service: str, number: int) -> list[str]:
        """Ids of the ended ones, as soon as there are N."""

        def found() -> list[str]:
            return self.containers(service, "--all", "--filter", "status=exited")

        self.wait_until(lambda: len(found()) == number, f"{number} ended: {service}")
        return found()

    def inspect(self, container: str, what: str) -> str:
        return self.docker("inspect", "--format", f"{{{{{what}}}}}", container)

    def kill(self, container: str) -> None:
        """Send SIGKILL from outside of docker, as the kernel would."""
        os.kill(int(self.inspect(container, ".State.Pid")), signal.SIGKILL)

    def lines(self) -> list[dict[str, Any]]:
        """Complete lines of metrics so far, with balanced books."""
        try:
            text = (self.run_dir / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        for line in lines:
            dropped = sum(line["env_steps_dropped"].values())
            accounted = line["env_steps_trained"] + dropped + line["env_steps_in_flight"]
            assert line["env_steps_sampled"] == accounted, line
        return lines

    def events(self) -> list[str]:
        """What people were told so far; []: the run has not begun."""
        file = self.run_dir / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [str(json.loads(line)["message"]) for line in lines]

    def newest(self) -> dict[str, Any]:
        lines = self.lines()
        return lines[-1] if lines else {"env_steps_trained": 0, "num_env_runners": 0}

    def wait_until(self, what: Callable[[], Any], why: str, seconds: float = PATIENCE) -> None:
        begun = time.monotonic()
        while not what():
            if time.monotonic() - begun > seconds:
                logs = self.compose("logs", "--no-color", "--tail", "40")
                raise AssertionError(f"{why}: not within {seconds:.0f} s\n{self.newest()}\n{logs}")
            time.sleep(0.2)

    def wait_for_training(self) -> None:
        """Until some updates' worth of steps was trained on."""
        goal = self.newest()["env_steps_trained"] + 20_000
        self.wait_until(lambda: self.newest()["env_steps_trained"] > goal, "training goes on")

    def wait_for_workers(self, env_runners: int, learners: int = 2) -> None:
        """Wait for a new line of metrics with this many."""
        before = len(self.lines())

        def all_there() -> bool:
            *earlier, line = [{}, *self.lines()]
            there = line.get("num_env_runners"), line.get("num_learners")
            return len(earlier) > before and there == (env_runners, learners)

        self.wait_until(all_there, f"{env_runners} EnvRunners and {learners} learners")

    def wait_for_event(self, text: str, after: int) -> None:
        """Wait for this event, skipping at most N others."""
        self.wait_until(lambda: any(text in each for each in self.events()[after:]), text)

    def close(self) -> None:
        self.compose("down", "--volumes", "--timeout", "1")


class Swarm:
    """Makes the engine a swarm of its own.

    Attributes:
        variables: with which commands find it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.variables = {"DOCKER_HOST": engine.host}
        own = ["--advertise-addr", "127.0.0.1", "--listen-addr", "127.0.0.1:2377"]
        engine.run("docker", "swarm", "init", *own)

    def launch(self, place: Place, config: str, *options: str) -> Command:
        """A run of two EnvRunners in the directory `run`."""
        own = ["--env-runners", "2", "--run-dir", "run", "--image", IMAGE]
        return place.start("launch", "swarm", config, *own, *options, **self.variables)

    def kill_one(self, run_dir: Path, role: str) -> None:
        """SIGKILL from outside, as the kernel would do it."""
        name = f"label=com.docker.swarm.service.name={Launch(run_dir, '').label}_{role}"
        victim = self._engine.run("docker", "ps", "-q", "--filter", name).split()[0]
        pid = self._engine.run("docker", "inspect", "--format", "{{.State.Pid}}", victim)
        os.kill(int(pid), signal.SIGKILL)

    def make_node(self, availability: str) -> None:
        """ "drain": it gives up its tasks; "active": it gets them."""
        node = self._engine.run("docker", "node", "ls", "-q").strip()
        self._engine.run("docker", "node", "update", "--availability", availability, node)

    def left(self) -> list[str]:
        """What the swarm has of runs."""
        found = []
        for kind in ("service", "config", "secret", "network"):
            names = self._engine.run("docker", kind, "ls", "--format", "{{.Name}}").split()
            found += [f"{kind} {name}" for name in names if name.startswith("juggler-")]
        return found

    def close(self) -> None:
        self._engine.run("docker", "swarm", "leave", "--force")
        self._engine.run("docker", "network", "rm", "docker_gwbridge")
