"""Who is attached, who is ready, and what each worker is told first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.config import RunConfig
from juggler.driver.hosting import Hosting
from juggler.driver.workers.module_setups import acting_setup, add_module, exploration_exponents
from juggler.driver.workers.module_spaces import Spaces
from juggler.driver.workers.worker_setups import env_runner_of, environments, learner_setup
from juggler.envrunner.agent_names import MOST_AGENTS
from juggler.envrunner.program import ENVRUNNER, EVALUATOR
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.actors.seeds import worker_seed
from juggler.runtime.actors.setups import to_json
from juggler.runtime.streams.permits import Permits
from juggler.runtime.wire.v1 import training_pb2


@dataclass(slots=True)
class WorkerRegistry:
    """Workers by id, from attaching to leaving.

    Attributes:
        config: of the run.
        first_update: that the run begins with; above 0 where it is resumed.
        most_learners: that may take part at once; one alone need not meet others.
        frozen: the modules that are not trained, by id; of a league, they come and go.
        trained: by id of each module that is trained, that of the module of the configuration whose
            settings it has; of a league, they come and go. {}: all have their own.
        attached: all who are here.
        ready: those of them who have been set up.
        spaces: by module id; {}: no EnvRunner is ready yet.
        had_runner: an EnvRunner was ready at some time.
        meeting_points: by module id, of the learners that host the module or have hosted it, by
            worker id.
        devices: that learners compute on, by worker id.
        kept_bytes: of this host's memory that a learner's steps will take, by the name of its
            device in the configuration and module id.
        permits: to send learners what was asked for.
    """

    config: RunConfig
    first_update: int = 0
    most_learners: int = 1
    frozen: dict[str, FrozenModule] = field(default_factory=dict)
    trained: dict[str, str] = field(default_factory=dict)
    attached: dict[str, Worker] = field(default_factory=dict)
    ready: dict[str, Worker] = field(default_factory=dict)
    spaces: dict[str, Spaces] = field(default_factory=dict)
    had_runner: bool = False
    meeting_points: dict[str, dict[str, str]] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    kept_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    permits: Permits = field(default_factory=Permits.new)
    _lives: Counter[str] = field(default_factory=Counter)  # processes set up, by worker id
    _waiting: dict[str, Worker] = field(default_factory=dict)  # learners, for the spaces
    _most_steps: dict[str, int] = field(default_factory=dict)  # in a batch, by module id
    _told: dict[Worker, list[str]] = field(default_factory=dict)  # modules in a Setup
    _hosting: Hosting = field(init=False)

    def __post_init__(self) -> None:
        self.trained = self.trained or {each: each for each in self.config.module_ids}
        self._hosting = Hosting(self.config, self.trained)

    def add(self, module_id: str, settings_of: str) -> None:
        """Another module is trained, where the fewest are, with the settings of one of the
        configuration.

        Raises:
            ValueError: nobody knows the spaces of its batches.
        """
        all_known = {settings_of: settings_of, **self.trained}
        alike = [key for key, each in all_known.items() if self._see_the_same(each, settings_of)]
        known = [self.spaces[key] for key in alike if key in self.spaces]
        if not known:
            raise ValueError(f"no module is here that sees what {settings_of} does")
        here = {each.index for each in self.attached.values() if each.role == LEARNER}
        self._hosting.add(module_id, here)
        self.trained[module_id], self.spaces[module_id] = settings_of, known[0]

    def remove(self, module_id: str) -> None:
        """A module is not trained any more."""
        self._hosting.remove(module_id)
        del self.trained[module_id]
        self.meeting_points.pop(module_id, None)
        if module_id not in self.config.module_ids:  # others may come with its settings
            self.spaces.pop(module_id, None)

    def begin_playing(self, module_id: str) -> int:
        """EnvRunners have a module that was added -> the most steps of its batches, as of those of
        any other player of a league."""
        self._most_steps[module_id] = max(self._most_steps.values())
        return self._most_steps[module_id]

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
        if sorted(named) != sorted(self._told[worker]):
            told, meant = ", ".join(named)[:1000], ", ".join(self._told[worker])
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
        device = self.config.driver.device_name(worker.index)
        self.kept_bytes[device, message.module_id] = message.kept_bytes

    def why_no_member(self, worker: Worker, learner: training_pb2.ModuleReady) -> str:
        """Why a learner that is ready cannot update with the others of its module; "": it can."""
        module_id, points = learner.module_id, self.meeting_points.get(learner.module_id, {})
        others = [
            points[other.worker_id]
            for other in self.learners_of(module_id)
            if other.worker_id != worker.worker_id
        ]
        alone = self.processes_of(module_id) == 1 and not others
        if alone:
            return ""
        if learner.why_alone and self.processes_of(module_id) == 1:  # another one trains alone
            return learner.why_alone
        # One of this host began alone where it has no meeting point, and meets others at theirs.
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

    def left_group(self, worker_id: str, module_id: str) -> None:
        """A learner that is here hosts this module no longer."""
        del self.meeting_points[module_id][worker_id]

    def modules_of(self, index: int) -> list[str]:
        """The modules that the learner process of this index is to host."""
        return self._hosting.modules_of(index)

    def processes_of(self, module_id: str) -> int:
        """How many learner processes the run begins with for this module."""
        return self._hosting.processes_of(module_id)

    def learners_of(self, module_id: str) -> list[Worker]:
        """The learners that are ready and host this module."""
        hosts = self.meeting_points.get(module_id, {})
        return [worker for worker in self.of_role(LEARNER) if worker.worker_id in hosts]

    def left(self, worker: Worker) -> None:
        for table in (self.attached, self.ready, self._waiting):
            if table.get(worker.worker_id) is worker:
                del table[worker.worker_id]
        self._told.pop(worker, None)

    def players(self) -> list[Worker]:
        """Those that play, or are about to."""
        return [worker for worker in self.attached.values() if worker.role != LEARNER]

    def env_runners(self) -> list[Worker]:
        """Those that sample: matches wait for them, and not for an evaluator."""
        return [worker for worker in self.players() if worker.role == ENVRUNNER]

    def hosts(self, module_id: str) -> list[Worker]:
        """The learner processes that are set up, and are to host this module."""
        return [
            worker
            for worker in self.attached.values()
            if worker.role == LEARNER and worker.worker_id not in self._waiting
            if module_id in self.modules_of(worker.index)
        ]

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
                    episode_addresses=worker.episode_addresses,
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
        if module_id not in self.config.module_ids:  # the same at all learners of its group
            seed = worker_seed(self.config.driver.seed, module_id, index=0)
        elif len(self.config.module_ids) > 1:  # equal networks must not begin with equal weights
            seed = worker_seed(seed, module_id, index=0)
        spaces = self.spaces[module_id]  # learners wait for them
        return add_module(self.config.of(self.trained[module_id]), module_id, spaces, seed)

    def acting_setup(self, module_id: str) -> ActingSetup:
        """What an EnvRunner is told of a module that is trained."""
        return acting_setup(self.config.of(self.trained[module_id]))

    def _exploring(self, module_id: str, worker: Worker) -> ActingSetup:
        """As `acting_setup`, for one EnvRunner: some explore less than others."""
        config = self.config.of(self.trained[module_id])
        rows = environments(self.config, worker.role)
        exponents = exploration_exponents(config, worker.index, rows)
        return replace(self.acting_setup(module_id), exploration_exponents=exponents)

    def _see_the_same(self, one: str, other: str) -> bool:
        """Whether batches of these modules of the configuration have the same spaces."""
        first, second = self.config.of(one), self.config.of(other)
        same_critic = first.module.critic_sees == second.module.critic_sees
        return same_critic and first.connectors.connectors == second.connectors.connectors

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
        rows, steps = environments(self.config, role), self.config.env_runner.fragment_steps
        several = bool(self.config.played_by)
        if self.config.env_runner.gateway:  # what it knows are patterns
            most = rows * MOST_AGENTS
        else:
            # One that is gone by now played as many agents as any other.
            own = self.trained.get(module.module_id, self.config.module_ids[0])
            most = rows * sum(own in each for each in self.config.played_by.values())
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

    def _config_for(self, worker: Worker) -> str:
        """As JSON."""
        config, role = self.config, worker.role
        if role == LEARNER:
            return to_json(learner_setup(config, worker.index, may_meet=self.most_learners > 1))
        trained = {each: self.acting_setup(each) for each in self.trained}
        if role != EVALUATOR:
            trained = {each: self._exploring(each, worker) for each in self.trained}
        self._told[worker] = list(trained)
        others = {each: module.acting_setup() for each, module in self.frozen.items()}
        agents = config.agents.agents
        if config.agents.league:  # in which players come and go
            players = list(dict.fromkeys([*trained, *config.others, *others]))
            agents = {agent: list(players) for agent in agents}
        setup = EnvRunnerSetup(
            env_runner=env_runner_of(config, role),
            modules={**trained, **others},
            agents=agents,
            mapping=config.agents.mapping,
            league=bool(config.agents.league),
        )
        return to_json(setup)
