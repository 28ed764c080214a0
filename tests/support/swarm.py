"""A swarm of one node on a Docker engine, and the runs of `juggler launch swarm` there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from juggler.launch.commands import Launch
from support.engine import IMAGE, Engine
from support.place import Command, Place


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
        """ "drain": it gives up its tasks and gets none; "active": it gets tasks again."""
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
