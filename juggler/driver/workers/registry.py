"""Who is attached, who is ready, and what each of them has to be told first."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace

from google.protobuf.json_format import MessageToDict

from juggler.driver.config import RunConfig
from juggler.driver.record.candidates import CONFIRMING_EPISODES
from juggler.envrunner.program import ENVRUNNER, EVALUATOR
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup
from juggler.learner.algorithms.registry import find_algorithm
from juggler.learner.process.program import LEARNER
from juggler.learner.process.setup import LearnerSetup, ModuleSetup
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.actors.seeds import worker_seed
from juggler.runtime.actors.setups import to_json
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.streams.permits import Permits
from juggler.runtime.wire.v1 import spaces_pb2, training_pb2

_LONGEST_SPACES = 1000  # bytes, for people


@dataclass(frozen=True, slots=True)
class Spaces:
    """Of one environment, as the first EnvRunner found them."""

    observation: spaces_pb2.Space
    action: spaces_pb2.Space

    def __str__(self) -> str:
        sides = self.observation, self.action
        size = sum(side.ByteSize() for side in sides)
        return str(self.to_json()) if size < _LONGEST_SPACES else f"spaces of {size} bytes"

    def to_json(self) -> dict[str, object]:
        return {
            "observation": MessageToDict(self.observation),
            "action": MessageToDict(self.action),
        }


@dataclass(slots=True)
class WorkerRegistry:
    """Workers by id, from attaching to leaving."""

    config: RunConfig
    first_update: int = 0  # that the run begins with; above 0 where it is resumed
    most_learners: int = 1  # that may take part at once
    attached: dict[str, Worker] = field(default_factory=dict)
    ready: dict[str, Worker] = field(default_factory=dict)
    spaces: Spaces | None = None
    had_runner: bool = False
    meeting_points: dict[str, str] = field(default_factory=dict)  # of learners
    devices: dict[str, str] = field(default_factory=dict)  # that learners compute on
    permits: Permits = field(default_factory=Permits.new)  # to send learners what was asked for
    _lives: Counter[str] = field(default_factory=Counter)  # processes set up, by worker id
    _waiting: dict[str, Worker] = field(default_factory=dict)  # learners, for the spaces

    def joined(self, worker: Worker) -> list[tuple[Worker, training_pb2.Setup]]:
        """Who is to be set up now that this worker is here."""
        self.attached[worker.worker_id] = worker
        if worker.role == LEARNER and self.spaces is None:
            self._waiting[worker.worker_id] = worker
            return []
        return [(worker, self._setup(worker))]

    def runner_ready(
        self, worker: Worker, message: training_pb2.Ready
    ) -> list[tuple[Worker, training_pb2.Setup]]:
        """Who is to be set up now that this EnvRunner or evaluator has told its spaces.

        Raises:
            ValueError: its spaces are not those of the others, or its batches not as it was told.
        """
        rows, steps = self._batch_shape(worker.role)
        if [module.module_id for module in message.modules] != [DEFAULT_MODULE]:
            raise ValueError(f"it must act with the module {DEFAULT_MODULE!r} alone")
        (module,) = message.modules
        if (module.rows, module.steps) != (rows, steps):
            raise ValueError(
                f"batches of {module.rows} rows of {module.steps} steps: it was told to make "
                f"them of {rows} rows (envs_per_runner) of {steps} steps (fragment_steps)"
            )
        spaces = Spaces(module.observation_space, module.action_space)
        if self.spaces is not None and spaces != self.spaces:
            raise ValueError(
                f"{worker.worker_id} on {worker.host} has other spaces than the EnvRunners before "
                f"it: {spaces}, not {self.spaces}. Do all hosts have the same version of the "
                "environment?"
            )
        self.spaces = spaces
        self.ready[worker.worker_id] = worker
        self.had_runner = self.had_runner or worker.role == ENVRUNNER
        waiting, self._waiting = self._waiting, {}
        return [(learner, self._setup(learner)) for learner in waiting.values()]

    def must_fit_a_batch(self, live_steps: int) -> None:
        """
        Raises:
            ValueError: no batch has so many.
        """
        rows, steps = self._batch_shape(ENVRUNNER)
        if live_steps > rows * steps:
            raise ValueError(f"{live_steps} steps in one batch of {rows} rows of {steps} steps")

    def learner_ready(self, worker: Worker, message: training_pb2.ModuleReady) -> None:
        self.ready[worker.worker_id] = worker
        self.meeting_points[worker.worker_id] = message.meeting_point
        self.devices[worker.worker_id] = message.description

    def why_no_member(self, learner: training_pb2.ModuleReady) -> str:
        """Why a learner that is ready cannot update with the others; "" where it can."""
        others = [self.meeting_points[worker.worker_id] for worker in self.of_role(LEARNER)]
        alone = self.config.driver.learners == 1 and not others
        if alone or all([learner.meeting_point, *others]):
            return ""
        return (
            "several learners would add up their gradients unencrypted and unauthenticated between "
            "hosts, with TLS too. Start each of them with --insecure if the network between them "
            "is private (the variable GLOO_SOCKET_IFNAME names its interface)"
        )

    def left(self, worker: Worker) -> None:
        for table in (self.attached, self.ready, self._waiting):
            if table.get(worker.worker_id) is worker:
                del table[worker.worker_id]

    def of_role(self, role: str) -> list[Worker]:
        """Those that are ready."""
        return [worker for worker in self.ready.values() if worker.role == role]

    def seed(self, worker: Worker, update: int, life: int = 1) -> int:
        """What a worker begins with at an update: as a new process there, or anew."""
        return worker_seed(self.config.driver.seed, worker.role, worker.index, life, update)

    def learners_message(self, module_id: str, generation: int) -> training_pb2.Learners:
        """For EnvRunners: where the learners of a module are."""
        return training_pb2.Learners(
            module_id=module_id,
            generation=generation,
            learners=[
                training_pb2.Learners.Learner(
                    worker_id=worker.worker_id,
                    incarnation=worker.incarnation,
                    addresses=worker.data_addresses,
                )
                for worker in self.of_role(LEARNER)
            ],
        )

    def complete(self) -> bool:
        """Whether there is what training needs."""
        return bool(self.of_role(ENVRUNNER)) and bool(self.of_role(LEARNER))

    def describe(self) -> str:
        """For people who wait: who is here and who is not."""
        parts = []
        for role in (ENVRUNNER, LEARNER):
            attached = sum(worker.role == role for worker in self.attached.values())
            parts.append(f"{role}s: {attached} attached, {len(self.of_role(role))} ready")
        return "; ".join(parts)

    def module_setup(self, module_id: str, seed: int) -> training_pb2.AddModule:
        """What a learner process is told of a module, once the spaces are known.

        Args:
            module_id: of the module.
            seed: of its first parameters.
        """
        assert self.spaces is not None  # learners wait for them
        return add_module(self.config, module_id, self.spaces, seed)

    def _setup(self, worker: Worker) -> training_pb2.Setup:
        self._lives[worker.worker_id] += 1
        life = self._lives[worker.worker_id]
        setup = training_pb2.Setup(
            config=self._config_for(worker),
            seed=self.seed(worker, self.first_update, life),
        )
        if worker.role == LEARNER:
            setup.permits_key = self.permits.key
        return setup

    def _batch_shape(self, role: str) -> tuple[int, int]:
        """Rows and steps of every batch."""
        config = self.config.env_runner
        rows = config.envs_per_runner
        if role == EVALUATOR:
            most = self.config.driver.evaluation_episodes
            if self.config.driver.confirms:
                most = max(most, CONFIRMING_EPISODES)
            rows = min(rows, most)
        return rows, config.fragment_steps

    def _config_for(self, worker: Worker) -> str:
        """As JSON."""
        config, role = self.config, worker.role
        if role == LEARNER:
            devices = config.driver.device_names()
            of_learner = LearnerSetup(
                device=devices[worker.index % len(devices)],
                updates_in_flight=config.driver.updates_in_flight,
                may_meet=self.most_learners > 1,
            )
            return to_json(of_learner)
        rows, _ = self._batch_shape(role)
        learner = config.learner
        acting = ActingSetup(
            module=config.module,
            connectors=config.connectors.connectors,
            algorithm=learner.algorithm,
            off_policy=find_algorithm(learner.algorithm).off_policy,
            row_age=config.staleness.row_age,
        )
        setup = EnvRunnerSetup(
            env_runner=replace(config.env_runner, envs_per_runner=rows),
            modules={DEFAULT_MODULE: acting},
        )
        return to_json(setup)


def add_module(
    config: RunConfig, module_id: str, spaces: Spaces, seed: int
) -> training_pb2.AddModule:
    """The command that has a learner process host a module.

    Args:
        config: says what the module is and how it is trained.
        module_id: of the module.
        spaces: of what its batches hold.
        seed: of its first parameters.

    Raises:
        TypeError, ValueError: JSON, or the message, cannot hold something in it.
    """
    setup = ModuleSetup(
        learner=asdict(config.learner),
        module=config.module,
        connectors=config.connectors.connectors,
    )
    return training_pb2.AddModule(
        module_id=module_id,
        config=to_json(setup),
        observation_space=spaces.observation,
        action_space=spaces.action,
        seed=seed,
    )
