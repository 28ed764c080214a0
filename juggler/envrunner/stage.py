"""The environments of an EnvRunner, with the modules that act in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from gymnasium import Space
from gymnasium.vector import VectorEnv

from juggler.envrunner.datasets.recorded_envs import RecordedEnvs
from juggler.envrunner.device_sampler import DeviceSampler, why_on_host
from juggler.envrunner.environments.accepted_vector import tensors_on
from juggler.envrunner.environments.seeding import seed_process
from juggler.envrunner.evaluation import Goal, PlayedEpisodes, evaluate
from juggler.envrunner.finiteness import NonFiniteBatch
from juggler.envrunner.frozen_weights import load_tree
from juggler.envrunner.rounds import PlayedRound
from juggler.envrunner.sampler import Sampler
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.connectors.pipelines import EnvToModule, ModuleToEnv, build_runner_pipelines
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.acting_part import strip_to_acting
from juggler.runtime.modules.import_by_name import given_or_named
from juggler.runtime.modules.models import exploration_of, with_own_exploration
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


class Stage(ABC):
    """Environments, and modules that act in them; by default, without a league."""

    _has_league = False

    def __init__(self) -> None:
        # Of the modules that are trained.
        self._parts: dict[str, ActingParts] = {}
        self._policies: dict[str, Actor] = {}

    @abstractmethod
    def ready(self) -> list[training_pb2.Ready.Module]:
        """Report the spaces and the batch size of each module."""

    def load(self, module_id: str, weights: Tree) -> None:
        """Let a module act with other weights."""
        self._policies[module_id].load(self._parts[module_id].as_here(weights))

    def set_connector_state(self, module_id: str, state: State) -> None:
        """Use what the connectors of all EnvRunners have learned."""
        self._parts[module_id].connectors.set_state(state)

    def load_trees(self, trees: Mapping[str, Tree]) -> None:
        """Load the weights and connectors of every module, from `playing_trees`.

        Raises:
            ValueError: a module is missing, or its part does not fit. Players of a league that are
                not in the checkpoint stay as they are.
        """
        for module_id, policy in self._policies.items():
            if module_id in trees:
                load_tree(module_id, trees[module_id], policy)
            elif not self._has_league:
                raise ValueError(f"the checkpoint to play has no weights of module {module_id!r}")

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Restart, like a new process whose Setup has this seed."""

    @abstractmethod
    def play(self, collected: Collection[str], versions: Mapping[str, Version]) -> PlayedRound:
        """Play fragment_steps steps of each environment.

        Raises:
            EnvironmentFailed: an environment failed.
        """

    def assign(self, line_ups: Iterable[training_pb2.LineUp]) -> None:
        """Play these line-ups of a league in the episodes that begin next.

        Raises:
            ValueError: there is no league, or a line-up does not fit the agents.
        """
        refuse_league()

    def add_player(self, module_id: str, acting: ActingSetup) -> None:
        """Let another module be in line-ups from now on, trained or not.

        Raises:
            ValueError: there is no league, or its weights are not the ones in the setup.
        """
        refuse_league()

    def remove_player(self, module_id: str) -> None:
        """Remove a module once no running episode has it.

        Raises:
            ValueError: there is no league.
        """
        refuse_league()

    @abstractmethod
    def evaluate(
        self,
        episodes: int,
        seed: int,
        watch: Callable[[int, int], None],
        *,
        most_steps: int,
        goal: Goal | None,
    ) -> PlayedEpisodes:
        """Play whole episodes, as the function `evaluate` does."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments."""


@dataclass(frozen=True, slots=True)
class UserCode:
    """Code of a notebook or script."""

    module_factory: Any = None  # the value of the run's key `module`; None: a name, or nothing
    classes: Any = None  # other classes, by name; None: no classes


@dataclass(frozen=True, slots=True)
class ActingParts:
    """A module for acting, and its connectors."""

    connectors: EnvToModule  # from the environments to the module
    module_to_env: ModuleToEnv  # from the module to the environments
    module: RLModule
    observation_space: Space[Any]
    action_space: Space[Any]
    exploration_exponents: tuple[float, ...]

    @classmethod
    def build(
        cls,
        setup: ActingSetup,
        observation_space: Space[Any],
        action_space: Space[Any],
        own_code: UserCode,
    ) -> ActingParts:
        """Build the parts that act."""
        connectors, module_to_env = build_runner_pipelines(
            ConnectorsConfig.parse(setup.connectors),
            observation_space,
            action_space,
            own_code.classes,
        )
        module = build_module(
            given_or_named(setup.module.module, own_code.module_factory, own_code.classes),
            connectors.module_observation_space,
            module_to_env.action_space,
            setup.module.model,
            distribution=setup.module.distribution,
            check_specs=setup.module.check_specs,
        )
        # Learners do not send the rest.
        strip_to_acting(module)
        if len(exponents := setup.exploration_exponents) > 1:
            with_own_exploration(module, len(exponents))
        spaces = observation_space, action_space
        return cls(connectors, module_to_env, module, *spaces, exponents)

    def as_here(self, weights: Tree) -> Tree:
        """Convert a learner's weights to this module's form."""
        if not self.exploration_exponents:
            return weights
        sent: Any = weights
        name = exploration_of(self.module)
        exploration = np.asarray(sent[name], np.float32)  # []
        powers = np.array(self.exploration_exponents, np.float32)  # [B], or [1]
        shape = self.module.get_buffer(name).shape  # (B, 1), (B, 1, 1) or ()
        return {**sent, name: (exploration**powers).reshape(shape)}

    def ready(
        self, module_id: str, rows: int, steps: int, critic_space: Space[Any] | None = None
    ) -> training_pb2.Ready.Module:
        """Report a module to the driver: batches of N x T steps.

        Args:
            critic_space: of "critic_observations" in its batches; None: no such column.
        """
        ready = training_pb2.Ready.Module(
            module_id=module_id,
            observation_space=space_to_message(self.connectors.observation_space),
            action_space=space_to_message(self.module_to_env.action_space),
            rows=rows,
            steps=steps,
            critic_space=None if critic_space is None else space_to_message(critic_space),
        )
        with suppress(WireError):  # a connector replaces a space that has no encoding
            sides = space_to_message(self.observation_space), space_to_message(self.action_space)
            ready.environment_observation_space.CopyFrom(sides[0])
            ready.environment_action_space.CopyFrom(sides[1])
        return ready


def refuse_league() -> NoReturn:
    """Raise ValueError, because there is no league."""
    raise ValueError("this run has no league, where line-ups and players come and go")


class SingleAgentStage(Stage):
    """A vector of environments with one agent each."""

    def __init__(
        self,
        setup: EnvRunnerSetup,
        env: VectorEnv[Any, Any, Any],
        seed: int,
        own_code: UserCode,
    ) -> None:
        super().__init__()
        ((self._module_id, acting),) = setup.modules.items()
        if seen := setup.critics_see:
            raise ValueError(
                f"critic_sees = {seen[0]!r}: the environment has one agent, whose value function "
                "sees its observation; leave it out"
            )
        self._env, self._steps = env, setup.env_runner.fragment_steps
        observation_space, action_space = env.single_observation_space, env.single_action_space
        parts = ActingParts.build(acting, observation_space, action_space, own_code)
        module, module_to_env, connectors = parts.module, parts.module_to_env, parts.connectors
        self._notes: list[training_pb2.Note] = []
        # On the host if anything around the environments needs arrays.
        device = tensors_on(env)
        if device and (why := why_on_host(env, connectors, module_to_env, device)):
            text = f"each step of the environments is copied from {device} to the host: {why}"
            self._notes = [training_pb2.Note(text=text, warning=False)]
            device = None
        shape = env.num_envs, self._steps
        self._policy = Actor(module, *shape, seed, module_to_env, connectors, device=device)
        self._policy.require_log_probabilities()
        self._parts[self._module_id], self._policies[self._module_id] = parts, self._policy
        seed_process(seed)  # as in every fresh start
        make_sampler = Sampler if device is None else DeviceSampler
        self._sampler = make_sampler(env, self._policy, self._steps, seed)

    def ready(self) -> list[training_pb2.Ready.Module]:
        shape = self._env.num_envs, self._steps
        return [parts.ready(module_id, *shape) for module_id, parts in self._parts.items()]

    def reset(self, seed: int) -> None:
        seed_process(seed)
        self._sampler.reset(seed)

    def play(self, collected: Collection[str], versions: Mapping[str, Version]) -> PlayedRound:
        try:
            fragment = self._sampler.sample(versions[self._module_id])
        except NonFiniteBatch as error:
            return PlayedRound({self._module_id: error}, {})
        # Returns in a data set are not returns of the trained policy.
        if isinstance(self._env, RecordedEnvs):
            fragment = replace(fragment, episode_returns=[], episode_lengths=[])
        notes, self._notes = [*self._notes, *self._policy.take_notes()], []
        results = {self._module_id: fragment}
        return PlayedRound(results, fragment.seconds, notes=notes, infos=fragment.infos)

    def evaluate(
        self,
        episodes: int,
        seed: int,
        watch: Callable[[int, int], None],
        *,
        most_steps: int,
        goal: Goal | None,
    ) -> PlayedEpisodes:
        return evaluate(
            self._env,
            self._policy,
            episodes,
            seed,
            watch,
            most_steps=most_steps,
            goal=goal,
        )

    def close(self) -> None:
        self._env.close()
