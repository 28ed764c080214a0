"""The workers of a run, from their setups to their departures."""

from __future__ import annotations

import re
import textwrap
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from juggler.driver.checkpoint.first_weights import FrozenModule
from juggler.driver.config import RunConfig
from juggler.driver.driver_config import UPDATES_IN_FLIGHT
from juggler.driver.module_placement import ModulePlacement
from juggler.driver.workers.module_setups import (
    acting_setup,
    add_module,
    described,
    env_runner_setup,
    environments,
    exploration_exponents,
    in_batches,
)
from juggler.envrunner.envrunner_program import ENVRUNNER, EVALUATOR
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup
from juggler.learner.process.learner_program import LEARNER, LearnerSetup
from juggler.runtime.actors.hub import Worker, WorkerLeft
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.actors.worker import to_json, worker_seed
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

if TYPE_CHECKING:
    from juggler.driver.run_parts import RunParts

_REMEMBERED = 100  # failures

#: The numbers of environments and steps in a failure differ between processes.
_NUMBER = re.compile(r"(?<=environment )\d+|(?<=at step )\d+")
_WHEN = re.compile(r"(?<=in round )\d+|(?<=update )\d+|(?<=batch )\d+")


@dataclass(slots=True)
class WorkerRegistry:
    """Workers by id, from attaching to leaving."""

    config: RunConfig
    first_update: int = 0  # update with which the run begins; above 0 if resumed
    most_learners: int = 1  # maximum at once; a single learner need not meet others
    # The modules that are not trained, by id; a league adds and removes them
    frozen: dict[str, FrozenModule] = field(default_factory=dict)
    # By id of each trained module, the module of the configuration whose settings it has; a league
    # adds and removes them. {}: all have their own settings.
    trained: dict[str, str] = field(default_factory=dict)
    attached: dict[str, Worker] = field(default_factory=dict)
    ready: dict[str, Worker] = field(default_factory=dict)  # attached workers that are set up
    # By module id; {}: no EnvRunner is ready yet
    spaces: dict[str, training_pb2.Ready.Module] = field(default_factory=dict)
    # By module id and worker id, for learners that host or have hosted the module
    meeting_points: dict[str, dict[str, str]] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)  # devices of learners, by worker id
    # Bytes of this host's memory for a learner's steps, by its device in the configuration and
    # module id
    kept_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    _lives: Counter[str] = field(default_factory=Counter)  # processes set up, by worker id
    most_steps: int = 0  # maximum live steps in a batch
    hosting: ModulePlacement = field(init=False)

    def __post_init__(self) -> None:
        self.trained = self.trained or {each: each for each in self.config.module_ids}
        self.hosting = ModulePlacement(self.config, self.trained)

    def add(self, module_id: str, settings_of: str) -> None:
        """Train another module, with the settings of a configured one."""
        all_known = {settings_of: settings_of, **self.trained}
        alike = [key for key, each in all_known.items() if self._see_the_same(each, settings_of)]
        known = [self.spaces[key] for key in alike if key in self.spaces]
        if not known:
            raise ValueError(f"no module here has the spaces of {settings_of}")
        here = {each.index for each in self.attached.values() if each.role == LEARNER}
        self.hosting.add(module_id, here)
        self.trained[module_id], self.spaces[module_id] = settings_of, known[0]

    def remove(self, module_id: str) -> None:
        """Note that a module is no longer trained."""
        self.hosting.remove(module_id)
        del self.trained[module_id]
        self.meeting_points.pop(module_id, None)
        if module_id not in self.config.module_ids:  # further modules may have its settings
            self.spaces.pop(module_id, None)

    def joined(self, worker: Worker) -> list[tuple[Worker, training_pb2.Setup]]:
        """Note a worker; return workers to set up now."""
        self.attached[worker.worker_id] = worker
        # Learners wait for the spaces.
        waits = worker.role == LEARNER and not self.spaces
        return [] if waits else [(worker, self._setup(worker))]

    def runner_ready(
        self, worker: Worker, message: training_pb2.Ready
    ) -> list[tuple[Worker, training_pb2.Setup]]:
        """Note a ready worker; return workers to set up now."""
        for module in message.modules:
            self._must_have_the_same_spaces(worker, module)
        learners = [each for each in self.attached.values() if each.role == LEARNER]
        waiting = [] if self.spaces else learners
        for module in message.modules:
            self.spaces.setdefault(module.module_id, module)
            if worker.role == ENVRUNNER:
                self.most_steps = max(self.most_steps, module.rows * module.steps)
        self.ready[worker.worker_id] = worker
        return [(learner, self._setup(learner)) for learner in waiting]

    def learner_ready(self, worker: Worker, message: training_pb2.ModuleReady) -> None:
        """Note that a learner hosts a module."""
        self.ready[worker.worker_id] = worker
        points = self.meeting_points.setdefault(message.module_id, {})
        points[worker.worker_id] = message.meeting_point
        self.devices[worker.worker_id] = message.description
        device = self.config.driver.device_name(worker.index)
        self.kept_bytes[device, message.module_id] = message.kept_bytes

    def why_no_member(self, worker: Worker, learner: training_pb2.ModuleReady) -> str:
        """Return why a ready learner cannot update with others, or ""."""
        module_id, points = learner.module_id, self.meeting_points.get(learner.module_id, {})
        others = [
            points[other.worker_id]
            for other in self.learners_of(module_id)
            if other.worker_id != worker.worker_id
        ]
        alone = self.hosting.processes_of(module_id) == 1 and not others
        if alone:
            return ""
        if learner.why_alone and self.hosting.processes_of(module_id) == 1:  # it trains alone
            return learner.why_alone
        # A local learner started alone has no meeting point, and uses other learners'.
        if not worker.local and not all([learner.meeting_point, *others]):
            return (
                "several learners would add up their gradients unencrypted and unauthenticated "
                "between hosts. Start each of them with --tls, or with --insecure if the network "
                "between them is private (the variable GLOO_SOCKET_IFNAME names its interface)"
            )
        if len({point.startswith("tls:") for point in (learner.meeting_point, *others)}) > 1:
            return (
                "some learners of this group would encrypt their gradients and others would not: "
                "start all of them with --tls, and all or none with --insecure"
            )
        return ""

    def learners_of(self, module_id: str) -> list[Worker]:
        """Return the ready learners that host this module."""
        hosts = self.meeting_points.get(module_id, {})
        return [worker for worker in self.of_role(LEARNER) if worker.worker_id in hosts]

    def left(self, worker: Worker) -> None:
        for table in (self.attached, self.ready):
            if table.get(worker.worker_id) is worker:
                del table[worker.worker_id]

    def acting_workers(self) -> list[Worker]:
        """Return workers that play, or are about to."""
        return [worker for worker in self.attached.values() if worker.role != LEARNER]

    def hosts(self, module_id: str) -> list[Worker]:
        """Return set-up learner processes that host this module."""
        return [
            worker
            for worker in self.attached.values()
            if worker.role == LEARNER and self.spaces
            if module_id in self.hosting.modules_of(worker.index)
        ]

    def of_role(self, role: str) -> list[Worker]:
        """Return ready workers of a role."""
        return [worker for worker in self.ready.values() if worker.role == role]

    def seed(self, worker: Worker, update: int, life: int = 1) -> int:
        """Return a worker's seed at an update."""
        return worker_seed(self.config.driver.seed, worker.role, worker.index, life, update)

    def complete(self) -> bool:
        """Whether the workers needed for training are ready."""
        return bool(self.of_role(ENVRUNNER)) and bool(self.of_role(LEARNER))

    def describe(self) -> str:
        """Describe how many workers are attached and ready."""
        parts = []
        for role in (ENVRUNNER, LEARNER):
            attached = sum(worker.role == role for worker in self.attached.values())
            parts.append(f"{role}s: {attached} attached, {len(self.of_role(role))} ready")
        return "; ".join(parts)

    def module_setup(self, module_id: str, seed: int) -> training_pb2.AddModule:
        """Make the command that has a learner host a module."""
        if module_id not in self.config.module_ids:  # the same at all learners of its group
            seed = worker_seed(self.config.driver.seed, module_id, index=0)
        elif len(self.config.module_ids) > 1:  # equal networks must not have equal first weights
            seed = worker_seed(seed, module_id, index=0)
        spaces = self.spaces[module_id]  # learners are set up after EnvRunners
        return add_module(self.config.of(self.trained[module_id]), module_id, spaces, seed)

    def acting_setup(self, module_id: str, worker: Worker | None = None) -> ActingSetup:
        """Make a trained module's setup, with the worker's own exploration if given."""
        config = self.config.of(self.trained[module_id])
        setup = acting_setup(config)
        if worker is None:
            return setup
        rows = environments(self.config, worker.role)
        exponents = exploration_exponents(config, worker.index, rows)
        return replace(setup, exploration_exponents=exponents)

    def _see_the_same(self, one: str, other: str) -> bool:
        """Return whether batches of these modules have the same spaces."""
        first, second = self.config.of(one), self.config.of(other)
        same_critic = first.module.critic_sees == second.module.critic_sees
        return same_critic and first.connectors.connectors == second.connectors.connectors

    def _setup(self, worker: Worker) -> training_pb2.Setup:
        config, role = self.config, worker.role
        self._lives[worker.worker_id] += 1
        seed = self.seed(worker, self.first_update, self._lives[worker.worker_id])
        setup: LearnerSetup | EnvRunnerSetup
        if role == LEARNER:
            setup = LearnerSetup(
                device=config.driver.device_name(worker.index),
                threads=config.driver.learner_threads,
                updates_in_flight=UPDATES_IN_FLIGHT,
                may_meet=self.most_learners > 1,
                shared=config.agents.shared,
                synchronous=config.driver.synchronous,
            )
        else:
            # An evaluator acts without exploration.
            explores = None if role == EVALUATOR else worker
            trained = {each: self.acting_setup(each, explores) for each in self.trained}
            others = {each: module.acting_setup() for each, module in self.frozen.items()}
            setup = env_runner_setup(config, role, trained, others)
        return training_pb2.Setup(config=to_json(setup), seed=seed)

    def _must_have_the_same_spaces(self, worker: Worker, module: training_pb2.Ready.Module) -> None:
        """Check that spaces are the same as at earlier EnvRunners."""
        spaces = in_batches(module)
        before = in_batches(self.spaces.get(module.module_id, module))
        if spaces == before:
            return
        several = len(self.config.module_ids) > 1
        of_module = f" for module {module.module_id!r}" if several else ""
        raise ValueError(
            f"{worker.worker_id} on {worker.host} has other spaces{of_module} than earlier "
            f"EnvRunners: {described(spaces)}, not {described(before)}. Do all hosts have the "
            "same version of the environment?"
        )


class Departures:
    """Reports lost workers, and ends runs that need them."""

    def __init__(self, parts: RunParts) -> None:
        self.last_failure = ""  # of any worker, in its own words
        self.last_exit = ""  # a message about the last process that ended by itself
        self.failures: dict[str, attach_pb2.Failure] = {}  # by worker id, of local workers
        self._parts, self._end, self._registry = parts, parts.end, parts.registry
        self._local, self._progress = parts.local, parts.progress
        # Failures that were already shown, and the last worker with each of them.
        self._shown: dict[str, str] = {}

    def hopeless(self, event: WorkerLeft) -> bool:
        """Return whether an EnvRunner failed before any has ever worked."""
        return bool(event.failure) and not self._registry.spaces and self._parts.only_local

    def left(self, event: WorkerLeft) -> None:
        """Report a lost worker, unless the end of the run reports it."""
        failure = event.failure
        if self._local.is_dismissed(event.worker.worker_id):
            return  # its exit is reported
        if self._end.reached or (self.hopeless(event) and failure and not failure.traceback):
            return
        text = f"{event.worker.worker_id} left: {event.reason}"
        if failure is not None:
            self.last_failure = failure.message
            if event.worker.local:  # it may stay down, and is then shown again
                self._fails(event.worker, failure)
            # A failure that was already shown is not printed in full again.
            words = _WHEN.sub("", _NUMBER.sub("", failure.message))
            before = self._shown.pop(words, "")
            self._shown[words] = event.worker.worker_id
            if len(self._shown) > _REMEMBERED:
                del self._shown[next(iter(self._shown))]
            if before:
                same = "before" if before == event.worker.worker_id else before
                text = f"{event.worker.worker_id} left for the same reason as {same}"
            elif failure.traceback:
                text += f"\n{_inset(failure.traceback)}"
        if event.stack:
            text += f"\nIt was here:\n{_inset(event.stack)}"
        self._progress.message(text, "error" if failure else "warning")

    def _fails(self, worker: Worker, failure: attach_pb2.Failure) -> None:
        """Note a local worker's failure; give up on a repeated one."""
        before = self.failures.get(worker.worker_id)
        self.failures[worker.worker_id] = failure
        if before is None or not (before.lasting and failure.lasting):
            return
        if _NUMBER.sub("", before.message) == _NUMBER.sub("", failure.message):
            self._local.supervisor.give_up(worker.worker_id, worker.pid)

    def exited(self, event: Exited) -> None:
        """Handle the end of a local process."""
        role = event.worker_id.rpartition("-")[0]
        dismissed = self._local.is_dismissed(event.worker_id)
        self._parts.metrics.workers.exited(event, failed=not dismissed)
        if self._end.reached or (dismissed and event.restart_in is not None):
            return None  # dismissed before its restart: reported as staying down next
        self.last_exit = f"{event.worker_id} ended: {event.how}"
        if self._local.was_dismissed(event.worker_id):
            return self._progress.message(f"{event.worker_id} has left, as requested", "info")
        if event.restart_in is not None:
            text = f"{event.worker_id} (pid {event.pid}) ended: {event.how}. Starting it again"
            return self._progress.message(text, "warning")
        # From here on, the process stays down.
        self._local.gave_up_on(event.worker_id)
        none_left = self._parts.only_local and not self._local.any_up(role)
        if role == LEARNER and none_left:
            return self._end.fail(f"{event.worker_id} is lost: {event.how}", "learner_lost")
        text = f"{event.worker_id} keeps ending (the last time: {event.how}) and stays down"
        if role == ENVRUNNER and none_left:
            env = self._parts.config.env_runner.env
            text = f"no EnvRunner is left to step {env}: {text}. {self.last_failure}"
            return self._end.fail(text.rstrip(), "no_envrunner")
        if role == EVALUATOR and none_left:
            self._parts.evaluations.cannot_confirm(f"{event.worker_id} keeps ending")
        if role == LEARNER and (orphans := self._without_learners(event.worker_id)):
            text += f". Without a learner: {' and '.join(orphans)}"
            # Its turns need all modules.
            if self._parts.config.driver.synchronous:
                return self._end.fail(text, "learner_lost")
            text += ". Other modules continue, without checkpoints"
        failure = self.failures.get(event.worker_id)
        why = failure.message if failure else ""
        return self._progress.message(f"{text}. {why}".rstrip(". "), "error")

    def _without_learners(self, worker_id: str) -> list[str]:
        """Return modules that only this lost learner hosted."""
        index = int(worker_id.rpartition("-")[2])
        return [
            f"module {module_id!r}"
            for module_id in self._registry.hosting.modules_of(index)
            if not self._registry.learners_of(module_id)
        ]


def _inset(text: str) -> str:
    """Indent a worker's lines, to set them off from the run's."""
    return textwrap.indent(text.rstrip(), "  ", lambda _: True)


class LeavingLearners:
    """Stops learners once `ReleaseLearner` reports that no module needs them.

    Their requested batches are then trained on, and other learners have their weights. A
    learner that takes too long, for example because an EnvRunner hangs, is stopped anyway: its
    batches are dropped, as after SIGTERM.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._deadlines: dict[Worker, float] = {}

    def add(self, learner: Worker) -> None:
        """Note a leaving learner; the core already knows it."""
        self._deadlines[learner] = (
            time.monotonic() + self._parts.config.driver.worker_timeout_seconds
        )

    def check(self) -> None:
        """Stop leaving learners that no module needs, or that are late."""
        for learner, deadline in list(self._deadlines.items()):
            if self._parts.registry.attached.get(learner.worker_id) is not learner:
                del self._deadlines[learner]  # it has already ended
            elif self._may_stop(learner, time.monotonic() > deadline):
                del self._deadlines[learner]
                self._parts.commands.send(learner, attach_pb2.Stop())
                self._parts.local.end(learner.worker_id, was_asked=True)

    def _may_stop(self, learner: Worker, is_late: bool) -> bool:
        if is_late:
            modules = self._parts.core.modules.values()
            return all(module.can_spare(learner.worker_id) for module in modules)
        owes_answers = self._parts.commands.pool.in_flight(learner) > 0  # such as a checkpoint
        return learner.worker_id not in self._parts.core.members and not owes_answers
