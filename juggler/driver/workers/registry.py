"""Who is attached, who is ready, and what each worker is told first."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace

from google.protobuf.json_format import MessageToDict

from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.config import RunConfig
from juggler.driver.learner_group.placement import modules_of_process, processes_of_module
from juggler.driver.record.candidates import CONFIRMING_EPISODES
from juggler.envrunner.agent_names import MOST_AGENTS
from juggler.envrunner.program import ENVRUNNER, EVALUATOR
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup
from juggler.learner.algorithms.registry import find_algorithm
from juggler.learner.process.program import LEARNER
from juggler.learner.process.setup import LearnerSetup, ModuleSetup
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.actors.seeds import worker_seed
from juggler.runtime.actors.setups import to_json
from juggler.runtime.streams.permits import Permits
from juggler.runtime.wire.v1 import spaces_pb2, training_pb2

_LONGEST_TEXT = 1000  # about spaces or modules, for people


@dataclass(frozen=True, slots=True)
class Spaces:
    """What one module sees and does, as the first EnvRunner found it.

    Attributes:
        observation: of the observations in batches, behind the connectors.
        action: of the actions in batches.
        environment_observation: the environment's; an empty message if it has no encoding.
        environment_action: the same.
        critic: of what the value function sees beside observations; an empty message if nothing.
    """

    observation: spaces_pb2.Space
    action: spaces_pb2.Space
    environment_observation: spaces_pb2.Space = field(default_factory=spaces_pb2.Space)
    environment_action: spaces_pb2.Space = field(default_factory=spaces_pb2.Space)
    critic: spaces_pb2.Space = field(default_factory=spaces_pb2.Space)

    @classmethod
    def of(cls, ready: training_pb2.Ready.Module) -> Spaces:
        return cls(
            ready.observation_space,
            ready.action_space,
            ready.environment_observation_space,
            ready.environment_action_space,
            ready.critic_space,
        )

    @property
    def in_batches(self) -> dict[str, spaces_pb2.Space]:
        """Those of what batches hold, by name."""
        spaces = {"observation": self.observation, "action": self.action, "critic": self.critic}
        return {name: space for name, space in spaces.items() if space.ByteSize()}

    def __str__(self) -> str:
        size = sum(space.ByteSize() for space in self.in_batches.values())
        if size >= _LONGEST_TEXT:
            return f"spaces of {size} bytes"
        return str({name: MessageToDict(space) for name, space in self.in_batches.items()})

    def to_json(self) -> dict[str, object]:
        """The environment's spaces, for a checkpoint; {}: they have no encoding."""
        if not self.environment_action.ByteSize():
            return {}
        return {
            "observation": MessageToDict(self.environment_observation),
            "action": MessageToDict(self.environment_action),
        }


@dataclass(slots=True)
class WorkerRegistry:
    """Workers by id, from attaching to leaving.

    Attributes:
        config: of the run.
        first_update: that the run begins with; above 0 where it is resumed.
        most_learners: that may take part at once.
        frozen: the modules that are not trained, by id; of a league, they come and go.
        attached: all who are here.
        ready: those of them who have been set up.
        spaces: by module id; {}: no EnvRunner is ready yet.
        had_runner: an EnvRunner was ready at some time.
        meeting_points: by module id, of the learners that host the module or have hosted it, by
            worker id.
        devices: that learners compute on, by worker id.
        permits: to send learners what was asked for.
    """

    config: RunConfig
    first_update: int = 0
    most_learners: int = 1
    frozen: dict[str, FrozenModule] = field(default_factory=dict)
    attached: dict[str, Worker] = field(default_factory=dict)
    ready: dict[str, Worker] = field(default_factory=dict)
    spaces: dict[str, Spaces] = field(default_factory=dict)
    had_runner: bool = False
    meeting_points: dict[str, dict[str, str]] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    permits: Permits = field(default_factory=Permits.new)
    _lives: Counter[str] = field(default_factory=Counter)  # processes set up, by worker id
    _waiting: dict[str, Worker] = field(default_factory=dict)  # learners, for the spaces
    _most_steps: dict[str, int] = field(default_factory=dict)  # in a batch, by module id

    def joined(self, worker: Worker) -> list[tuple[Worker, training_pb2.Setup]]:
        """Who is to be set up now that this worker is here."""
        self.attached[worker.worker_id] = worker
        if worker.role == LEARNER and not self.spaces:
            self._waiting[worker.worker_id] = worker
            return []
        return [(worker, self._setup(worker))]

    def runner_ready(
        self, worker: Worker, message: training_pb2.Ready
    ) -> list[tuple[Worker, training_pb2.Setup]]:
        """Who is to be set up now that this EnvRunner or evaluator has told its spaces.

        Raises:
            ValueError: its modules or spaces are not those of the others, or its batches not as it
                was told.
        """
        named = [module.module_id for module in message.modules]
        if sorted(named) != sorted(self.config.module_ids):
            told, meant = ", ".join(named)[:_LONGEST_TEXT], ", ".join(self.config.module_ids)
            raise ValueError(f"it acts with the modules {told or '(none)'}: it must with {meant}")
        for module in message.modules:
            self._must_make_batches(worker.role, module)
            self._must_have_the_same_spaces(worker, module)
        for module in message.modules:
            spaces = Spaces.of(module)
            self.spaces.setdefault(module.module_id, spaces)
            if worker.role == ENVRUNNER:
                before = self._most_steps.get(module.module_id, 0)
                self._most_steps[module.module_id] = max(before, module.rows * module.steps)
        self.ready[worker.worker_id] = worker
        self.had_runner = self.had_runner or worker.role == ENVRUNNER
        waiting, self._waiting = self._waiting, {}
        return [(learner, self._setup(learner)) for learner in waiting.values()]

    def must_fit_a_batch(self, module_id: str, live_steps: int) -> None:
        """
        Raises:
            ValueError: no batch of the module has so many.
        """
        most = self._most_steps.get(module_id, 0)
        if live_steps > most:
            raise ValueError(f"{live_steps} steps in one batch: at most {most}")

    def learner_ready(self, worker: Worker, message: training_pb2.ModuleReady) -> None:
        """It hosts a module."""
        self.ready[worker.worker_id] = worker
        points = self.meeting_points.setdefault(message.module_id, {})
        points[worker.worker_id] = message.meeting_point
        self.devices[worker.worker_id] = message.description

    def why_no_member(self, worker: Worker, learner: training_pb2.ModuleReady) -> str:
        """Why a learner that is ready cannot update with the others of its module; "": it can."""
        module_id, points = learner.module_id, self.meeting_points.get(learner.module_id, {})
        others = [
            points[other.worker_id]
            for other in self.learners_of(module_id)
            if other.worker_id != worker.worker_id
        ]
        alone = self.processes_of(module_id) == 1 and not others
        if alone or all([learner.meeting_point, *others]):
            return ""
        return (
            "several learners would add up their gradients unencrypted and unauthenticated between "
            "hosts, with TLS too. Start each of them with --insecure if the network between them "
            "is private (the variable GLOO_SOCKET_IFNAME names its interface)"
        )

    def modules_of(self, index: int) -> list[str]:
        """The modules that the learner process of this index is to host."""
        learners, together = self.config.driver.learners, self.config.trained_together
        return modules_of_process(index, learners, together)

    def processes_of(self, module_id: str) -> int:
        """How many learner processes the run begins with for this module."""
        learners, together = self.config.driver.learners, self.config.trained_together
        return processes_of_module(module_id, learners, together)

    def learners_of(self, module_id: str) -> list[Worker]:
        """The learners that are ready and host this module."""
        hosts = self.meeting_points.get(module_id, {})
        return [worker for worker in self.of_role(LEARNER) if worker.worker_id in hosts]

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
                for worker in self.learners_of(module_id)
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
            seed: of the learner process.
        """
        if len(self.config.module_ids) > 1:  # equal networks must not begin with equal weights
            seed = worker_seed(seed, module_id, index=0)
        spaces = self.spaces[module_id]  # learners wait for them
        return add_module(self.config.of(module_id), module_id, spaces, seed)

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

    def _must_make_batches(self, role: str, module: training_pb2.Ready.Module) -> None:
        """
        Raises:
            ValueError: it makes other batches of this module than it was told.
        """
        rows, steps = self._environments(role), self.config.env_runner.fragment_steps
        several = bool(self.config.played_by)
        if self.config.env_runner.gateway:  # what it knows are patterns
            most = rows * MOST_AGENTS
        else:
            most = rows * sum(module.module_id in each for each in self.config.played_by.values())
        right = 1 <= module.rows <= most if several else module.rows == rows
        if right and module.steps == steps:
            return
        agents = ", for each agent that the module plays," if several else ""
        raise ValueError(
            f"batches of {module.rows} rows of {module.steps} steps: it was told to make them of "
            f"{rows} rows (envs_per_runner){agents} of {steps} steps (fragment_steps)"
        )

    def _must_have_the_same_spaces(self, worker: Worker, module: training_pb2.Ready.Module) -> None:
        """
        Raises:
            ValueError: those before it have others.
        """
        spaces = Spaces.of(module)
        before = self.spaces.get(module.module_id, spaces)
        if spaces.in_batches == before.in_batches:
            return
        several = len(self.config.module_ids) > 1
        of_module = f" for module {module.module_id!r}" if several else ""
        raise ValueError(
            f"{worker.worker_id} on {worker.host} has other spaces{of_module} than the EnvRunners "
            f"before it: {spaces}, not {before}. Do all hosts have the same version of the "
            "environment?"
        )

    def _environments(self, role: str) -> int:
        """How many a worker steps."""
        rows = self.config.env_runner.envs_per_runner
        if role == EVALUATOR:
            most = self.config.driver.evaluation_episodes
            if self.config.driver.confirms:
                most = max(most, CONFIRMING_EPISODES)
            rows = min(rows, most)
        return rows

    def _config_for(self, worker: Worker) -> str:
        """As JSON."""
        config, role = self.config, worker.role
        if role == LEARNER:
            devices = config.driver.device_names()
            of_learner = LearnerSetup(
                device=devices[worker.index % len(devices)],
                updates_in_flight=config.driver.updates_in_flight,
                may_meet=self.most_learners > 1,
                shared=config.agents.shared,
                synchronous=config.driver.synchronous,
            )
            return to_json(of_learner)
        trained = {each: _acting_setup(config.of(each)) for each in config.module_ids}
        others = {each: module.acting_setup() for each, module in self.frozen.items()}
        agents = config.agents.agents
        if config.agents.league:  # in which copies come up
            players = [*config.agents.acting_ids]
            players += [each for each in others if each not in players]
            agents = {agent: list(players) for agent in agents}
        setup = EnvRunnerSetup(
            env_runner=replace(config.env_runner, envs_per_runner=self._environments(role)),
            modules={**trained, **others},
            agents=agents,
            mapping=config.agents.mapping,
            league=bool(config.agents.league),
        )
        return to_json(setup)


def _acting_setup(config: RunConfig) -> ActingSetup:
    """Of one module, from the configuration as that module has it."""
    learner = config.learner
    return ActingSetup(
        module=config.module,
        connectors=config.connectors.connectors,
        algorithm=learner.algorithm,
        off_policy=find_algorithm(learner.algorithm).off_policy,
        row_age=config.staleness.row_age,
    )


def add_module(
    config: RunConfig, module_id: str, spaces: Spaces, seed: int
) -> training_pb2.AddModule:
    """The command that has a learner process host a module.

    Args:
        config: as this module has it: what it is and how it is trained.
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
        critic_space=spaces.critic if spaces.critic.ByteSize() else None,
        seed=seed,
    )
