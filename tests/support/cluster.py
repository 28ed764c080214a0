"""A run of Juggler in containers, started from the compose files as people start it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support.engine import IMAGE, REPOSITORY, Engine

PATIENCE = 240.0  # seconds
LEAGUE = (
    "--env juggler:MatrixGame --algorithm ppo --envs-per-runner 16 --fragment-steps 16 "
    "--batch-size 256 --checkpoint-seconds 5 --stop-steps 1000000000 --league '"
    '{"builder": "alphastar", "max_historical": 5, "min_games": 1, "options": {"mains": 2, '
    '"main_exploiters": 1, "league_exploiters": 1, "min_phase_steps": 2000, '
    '"max_phase_steps": 4000}}\''
)


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
        """Ids of those that run, in the order of their numbers."""
        whose = f"--filter={self._project}", f"--filter=label=com.docker.compose.service={service}"
        number = '{{.Label "com.docker.compose.container-number"}} {{.ID}}'
        lines = self.docker("ps", *options, *whose, "--format", number).splitlines()
        return [line.split()[1] for line in sorted(lines, key=lambda each: int(each.split()[0]))]

    def ended(self, service: str, number: int) -> list[str]:
        """Ids of those that have ended, as soon as so many have."""

        def found() -> list[str]:
            return self.containers(service, "--all", "--filter", "status=exited")

        self.wait_until(lambda: len(found()) == number, f"{number} ended: {service}")
        return found()

    def inspect(self, container: str, what: str) -> str:
        return self.docker("inspect", "--format", f"{{{{{what}}}}}", container)

    def kill(self, container: str) -> None:
        """SIGKILL from outside: what docker itself does not know of, as the kernel would do it."""
        os.kill(int(self.inspect(container, ".State.Pid")), signal.SIGKILL)

    def pause(self, container: str) -> None:
        """Let all its processes stand still. On a busy host the kernel may not have frozen them by
        the time that the engine gives up, which lets them run again: then it is asked once more."""
        frozen = partial(self._engine.manages, "docker", "pause", container)
        self.wait_until(frozen, f"the engine pauses {container}")

    def cut_off(self, container: str, action: str) -> None:
        """Let no packet in or out of the container, and nobody hear of it.

        Args:
            container: that runs.
            action: "--append": from now on; "--delete": no more.
        """
        inside = ["nsenter", "--net", "--target", self.inspect(container, ".State.Pid")]
        for chain in ("INPUT", "OUTPUT"):
            self._engine.run(*inside, "iptables", action, chain, "--jump", "DROP")

    def status(self) -> dict[str, Any]:
        """What `juggler status` says."""
        (driver,) = self.containers("driver")
        run_dir = f"/runs/{self.run_dir.name}"
        said = self.docker("exec", driver, "juggler", "status", run_dir, "--once", "--json")
        found: dict[str, Any] = json.loads(said)
        return found

    def worker(self, container: str) -> str:
        """The id of the worker in a container, as the driver knows it."""
        workers = {each["host"]: each["worker_id"] for each in self.status()["workers"]}
        return str(workers[container])

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of metrics so far; in each of them the books balance."""
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

    def wait_until(self, what: Callable[[], Any], why: str, seconds: float = PATIENCE) -> float:
        """-> seconds that it took."""
        begun = time.monotonic()
        while not what():
            if time.monotonic() - begun > seconds:
                logs = self.compose("logs", "--no-color", "--tail", "40")
                raise AssertionError(f"{why}: not within {seconds:.0f} s\n{self.newest()}\n{logs}")
            time.sleep(0.2)
        return time.monotonic() - begun

    def wait_for_training(self) -> float:
        """Until some updates' worth of steps was trained on -> seconds."""
        goal = self.newest()["env_steps_trained"] + 20_000
        return self.wait_until(
            lambda: self.newest()["env_steps_trained"] > goal, "training goes on"
        )

    def wait_for_workers(self, env_runners: int, learners: int = 2) -> float:
        """Until a line of metrics that is still to come has so many."""
        before = len(self.lines())

        def all_there() -> bool:
            *earlier, line = [{}, *self.lines()]
            there = line.get("num_env_runners"), line.get("num_learners")
            return len(earlier) > before and there == (env_runners, learners)

        return self.wait_until(all_there, f"{env_runners} EnvRunners and {learners} learners")

    def wait_for_event(self, text: str, after: int) -> float:
        """Until somebody was told so, beyond so many other events."""
        return self.wait_until(lambda: any(text in each for each in self.events()[after:]), text)

    def close(self) -> None:
        self.compose("down", "--volumes", "--timeout", "1")


def players(cluster: Cluster) -> dict[str, Any]:
    """The players of a league that learn, as the newest line of metrics has them."""
    return dict(cluster.newest().get("league", {}).get("learning", {}))


def all_are_copied(cluster: Cluster) -> float:
    """Until every player has more steps and copies than now -> seconds."""
    before = players(cluster)

    def went_on() -> bool:
        now = players(cluster)
        return now.keys() >= before.keys() and all(
            bool(now[player][key] > was[key])
            for player, was in before.items()
            for key in ("steps", "copies")
        )

    return cluster.wait_until(went_on, "every player is trained and copied")
