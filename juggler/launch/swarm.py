"""A run on a Docker Swarm: a service for each role."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from juggler.launch.engine import (
    FILES,
    ROLES,
    SIGNALLED,
    DriverState,
    EngineRun,
    Launch,
    LaunchError,
    NoAnswer,
    Report,
    Tail,
    ask,
    wait_until_removed,
)
from juggler.learner.process.learner_program import LEARNER

_STACK = resources.files("juggler.launch") / "manifests" / "swarm.yaml"
_CONFIG = "/run.toml"  # path in the driver's container
_RUNNING = ("running", "starting", "preparing", "ready", "assigned", "accepted", "pending", "new")
_ask = partial(ask, advice="launch from a host that has Docker, and is a manager of a swarm")


class SwarmRun(EngineRun):
    """Deploys the stack of a run, and follows it.

    The driver runs on the node of the command, with the run directory. Docker restarts the tasks
    of driver and workers, and distributes workers over all nodes.

    Raises:
        LaunchError: a number is out of range, or a compose file is missing.
    """

    def __init__(
        self,
        launch: Launch,
        numbers: Mapping[str, int],
        report: Report,
        image: str,
        compose: Sequence[str] = (),
    ) -> None:
        super().__init__(launch, numbers, report)
        for file in compose:
            if not Path(file).is_file():
                raise LaunchError(f"--compose {file}: there is no such file")
        self._image = image
        self._more = [word for file in compose for word in ("-c", str(Path(file).absolute()))]
        self._file = launch.directory / "stack.yaml"
        self._config = launch.directory / "run.toml"
        self._seen = False  # whether a running driver was seen

    def plan(self) -> str:
        """Return the stack for Docker."""
        launch = self._launch
        run_dir = str(launch.run_dir)
        driver = launch.driver_there(run_dir, _CONFIG, self._numbers[LEARNER])
        values: dict[str, Any] = {
            "image": self._image,
            "user": f"{os.getuid()}:{os.getgid()}",
            "uid": str(os.getuid()),
            "driver": driver,
            **{role: launch.worker(role, "driver:5005") for role in ROLES},
            "here": f"node.hostname == {socket.gethostname()}",
            "run_dir": run_dir,
            **{f"{role}s": number for role, number in self._numbers.items()},
            "config": str(self._config),
            **{Path(name).stem: str(launch.tls / name) for name in FILES},
        }
        # Docker substitutes variables after a dollar, and replaces two dollars by one.
        filled = {name: json.dumps(value).replace("$", "$$") for name, value in values.items()}
        return Template(_STACK.read_text()).substitute(filled)

    def submit(self) -> None:
        """Write the stack and the certificates, and deploy the stack.

        Raises:
            LaunchError: this host is not a manager of a swarm, Docker refuses, or the run already
                exists.
        """
        state = "{{.Swarm.LocalNodeState}} {{.Swarm.ControlAvailable}}"
        if _ask("docker", "info", "--format", state).split() != ["active", "true"]:
            raise LaunchError(
                "this host is not a manager of a swarm: launch from a manager, or make a swarm of "
                "only this host with `docker swarm init`"
            )
        if self._there():
            raise LaunchError(
                f"{self._launch.run_dir} already has a stack: end it with "
                f"`docker stack rm {self._launch.label}`"
            )
        deploy = ["docker", "stack", "deploy", "--with-registry-auth", "-c", str(self._file)]
        with self.submitting(["driver", "*.learner.internal"], "swarm"):
            # Docker would make the directory of a mount for root.
            self._launch.run_dir.mkdir(parents=True, exist_ok=True)
            self._file.write_text(self.plan())
            self._config.write_text(self._launch.config_there())
            _ask(*deploy, *self._more, self._launch.label)
        self._report(
            f"deployed the stack {self._launch.label}: `docker stack ps {self._launch.label}` "
            f"shows its tasks, and `docker service logs {self._name('learner')}` their output"
        )

    def driver_state(self, ending: bool) -> DriverState:
        try:
            ids = _ask("docker", "service", "ps", "-q", "--no-trunc", self._name("driver")).split()
            filled = json.loads(_ask("docker", "inspect", *ids)) if ids else []
        except NoAnswer:
            if self._there():
                raise
            raise LaunchError("the stack was removed") from None
        # Docker keeps the last tasks of a service, and each restart makes another one.
        tasks = sorted(filled, key=lambda task: str(task["CreatedAt"]), reverse=True)
        states = [task["Status"] for task in tasks]
        self._seen |= any(each["State"] == "running" for each in states)
        if ending:
            over = not any(each["State"] in _RUNNING for each in states)
            return DriverState(status=-1) if over else DriverState(running=True)
        # Above 127, a signal ended it, and Docker starts it again.
        for each in states:
            status = int(each.get("ContainerStatus", {}).get("ExitCode", 0))
            if each["State"] == "complete" or (
                each["State"] == "failed" and 0 < status < SIGNALLED
            ):
                return DriverState(status=status)
        if states and states[0]["State"] == "running":
            return DriverState(running=True)
        why = next((each["Err"] for each in states if each.get("Err")), "")
        return DriverState(f"its task is {states[0]['State']} ({why})" if why else "")

    def poll(self) -> None:
        # It would show nothing of an ended task.
        if self._seen and (self._tail is None or self._tail.ended):
            since = [] if self._tail is None else ["--tail", "0"]
            logs = ["docker", "service", "logs", "--raw", "--follow", *since]
            self._tail = Tail(*logs, self._name("driver"))

    def end(self) -> None:
        _ask("docker", "service", "scale", "--detach", f"{self._name('driver')}=0")

    def tear_down(self) -> None:
        self._launch.forget_counts()
        if self._tail is None and self._there():  # it may have ended before it was seen running
            self._tail = Tail("docker", "service", "logs", "--raw", self._name("driver"))
        self.stop_showing()
        _ask("docker", "stack", "rm", self._launch.label)
        wait_until_removed(self._there, f"`docker stack ps {self._launch.label}`")

    def _name(self, role: str) -> str:
        return f"{self._launch.label}_{role}"

    def _there(self) -> bool:
        """Return whether Docker has objects of the run."""
        whose = f"label=com.docker.stack.namespace={self._launch.label}"
        return any(
            _ask("docker", kind, "ls", "-q", "--filter", whose).strip()
            for kind in ("service", "network", "secret", "config")
        )
