"""Worker processes that a driver starts on its own host."""

from __future__ import annotations

import itertools
import math
from typing import Any

from juggler.driver.config import DriverConfig
from juggler.driver.core.group import worker_order
from juggler.envrunner.envrunner_program import (
    ENVRUNNER,
    EVALUATOR,
    EnvRunnerProgram,
    GatewayAddress,
)
from juggler.learner.process.learner_program import LEARNER, LearnerProgram
from juggler.runtime.actors.attachment import Contact
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.actors.processes import (
    WorkerProgram,
    forkserver_pid,
    release_forkserver,
    share_forkserver,
)
from juggler.runtime.actors.resources import seconds_used
from juggler.runtime.actors.supervisor import RestartPolicy, Supervisor
from juggler.runtime.actors.temporary import HeldDirectory, multiprocessings_is_there
from juggler.runtime.streams.shared_directory import remove_abandoned

#: An environment that fails from time to time costs a restart. An environment that repeatedly
#: fails before this number of batches is broken.
_OF_ENV_RUNNERS = RestartPolicy(enough_uses=50)


class LocalWorkers:
    """Starts EnvRunners, the learner and the evaluator, and keeps them alive.

    They communicate over Unix sockets in a directory that no other user may enter.
    """

    def __init__(self, events: Mailbox[Any], run_id: str, token: str, own_code: bytes) -> None:
        remove_abandoned()  # of a run whose driver was killed
        self._directory = HeldDirectory()
        self.supervisor = Supervisor(events.put)  # keeps their processes running
        self._run_id = run_id
        self._token = token
        self._own_code = own_code
        # By worker id: "up", also between two processes; "down"; or "leaving", because fewer are
        # wanted
        self._states: dict[str, str] = {}
        self._shares = False  # whether this uses the shared forkserver
        self._gateway: GatewayAddress | None = None
        self._timeout = 20.0  # seconds for a worker to reach the driver

    @property
    def driver_address(self) -> str:
        return f"unix:{self._directory.path / 'driver.sock'}"

    def start(self, config: DriverConfig, gateway: GatewayAddress | None = None) -> None:
        """Start the workers; call this in a thread that outlives them."""
        self._gateway = gateway
        self._timeout = config.worker_timeout_seconds
        self._num_evaluators = config.num_evaluators
        for index in range(config.learners):
            self.start_learner(index)
        for index in range(config.num_env_runners):
            self._start(ENVRUNNER, index, _OF_ENV_RUNNERS)

    def scale(self, role: str, number: int) -> tuple[int, list[str]]:
        """Start workers of a role, or dismiss the last ones.

        Returns:
            The former number, and the ids of leaving workers: `end` each of them.
        """
        here, wanted = self._up(role), self.wanted(role, number)
        leaving = sorted(here - {*wanted}, key=worker_order)
        for worker_id in leaving:
            self._states[worker_id] = "leaving"
            self.supervisor.dismiss(worker_id, math.inf)
        policy = _OF_ENV_RUNNERS if role == ENVRUNNER else RestartPolicy()
        for worker_id in wanted:
            if worker_id not in here:
                self._start(role, worker_order(worker_id)[1], policy)
        return len(here), leaving

    def wanted(self, role: str, number: int) -> list[str]:
        """Return ids of a role's workers after `scale`."""
        here = sorted(self._up(role), key=worker_order)
        # The number of a worker that is still leaving is not reused.
        ids = (f"{role}-{index}" for index in itertools.count())
        free = (each for each in ids if self._states.get(each, "down") == "down")
        return here[:number] + list(itertools.islice(free, max(0, number - len(here))))

    def end(self, worker_id: str, *, was_asked: bool) -> None:
        """End a leaving worker; at once, unless it was asked to leave."""
        self.supervisor.dismiss(worker_id, self._timeout if was_asked else 0.0)

    def is_dismissed(self, worker_id: str) -> bool:
        """Return whether a worker leaves because fewer are wanted."""
        return self._states.get(worker_id) == "leaving"

    def was_dismissed(self, worker_id: str) -> bool:
        """Return whether an ended process was dismissed; free its number."""
        if not self.is_dismissed(worker_id):
            return False
        del self._states[worker_id]
        return True

    def start_learner(self, index: int) -> None:
        """Start one learner."""
        self._start(LEARNER, index, RestartPolicy())

    def start_evaluators(self) -> None:
        """Start evaluators, once; a run with gateways has none."""
        for index in range(0 if self._gateway else self._num_evaluators):
            if f"{EVALUATOR}-{index}" not in self._states:
                self._start(EVALUATOR, index, RestartPolicy())

    def cpu_seconds(self) -> float:
        """Return processor time of running processes and the forkserver."""
        return seconds_used([*self.supervisor.pids().values(), forkserver_pid()])

    def gave_up_on(self, worker_id: str) -> None:
        """Note that a worker's process stays down."""
        self._states[worker_id] = "down"

    def any_up(self, role: str) -> bool:
        """Return whether a process of this role runs or will run again."""
        return bool(self._up(role))

    def is_up(self, worker_id: str) -> bool:
        """Return whether a worker is up or restarting, and not leaving."""
        return self._states.get(worker_id) == "up"

    def _up(self, role: str) -> set[str]:
        """Return ids of a role's workers that run and stay."""
        return {each for each in self._states if each.startswith(f"{role}-") and self.is_up(each)}

    def keep_failing(self, role: str) -> bool:
        """Return whether all processes of a role keep dying before any work."""
        worker_ids = [each for each in self._states if each.startswith(f"{role}-")]
        return bool(worker_ids) and all(map(self.supervisor.keeps_failing, worker_ids))

    def directory_is_gone(self) -> str:
        """Describe missing files that workers need, or ""."""
        if self._directory.is_there() and (not self._shares or multiprocessings_is_there()):
            return ""
        return f"the directory of this run's sockets in {self._directory.path.parent} was removed"

    def close(self, grace: float) -> None:
        try:
            self.supervisor.close(grace)
        finally:
            if self._shares:
                self._shares = False
                release_forkserver()
            remove_abandoned()  # of workers that were killed
            self._directory.remove()

    def _start(self, role: str, index: int, policy: RestartPolicy) -> None:
        if not self._shares:
            share_forkserver()
            self._shares = True
        contact = Contact(
            address=self.driver_address,
            index=index,
            token=self._token,
            run_id=self._run_id,
            local=True,
            socket_dir=str(self._directory.path),
            timeout=self._timeout,
        )
        # By name, because the driver imports no environments or algorithms.
        program: EnvRunnerProgram | LearnerProgram
        if role == LEARNER:
            target = "juggler.learner.process.learner_worker:main"
            program = LearnerProgram(contact, own_code=self._own_code)
        else:
            gateway = self._gateway if role == ENVRUNNER else None
            of_gateway = "juggler.gateway.gateway_worker:main"
            target = of_gateway if gateway else "juggler.envrunner.envrunner_worker:main"
            program = EnvRunnerProgram(contact, role, self._own_code, gateway)
        worker_id = f"{role}-{index}"
        self._states[worker_id] = "up"
        self.supervisor.add(worker_id, WorkerProgram(target, program), policy)
