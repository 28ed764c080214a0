"""The environments of an EnvRunner, with the modules that act in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
from gymnasium import Space

from juggler.envrunner.evaluation import Goal, PlayedEpisodes
from juggler.envrunner.rounds import PlayedRound
from juggler.envrunner.setup import ActingSetup
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.connectors.pipelines import EnvToModule, ModuleToEnv, build_runner_pipelines
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.acting_part import strip_to_acting
from juggler.runtime.modules.import_by_name import given_or_named
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.q_network import exploration_of, with_own_exploration
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


class Stage(Protocol):
    """Environments, and modules that act in them; by default, without a league."""

    def ready(self) -> list[training_pb2.Ready.Module]:
        """Report the spaces and the batch size of each module."""

    def load(self, module_id: str, weights: Tree) -> None:
        """Let a module act with other weights."""

    def set_connector_state(self, module_id: str, state: State) -> None:
        """Use what the connectors of all EnvRunners have learned."""

    def load_trees(self, trees: Mapping[str, Tree]) -> None:
        """Load the weights and connectors of every module, from `playing_trees`.

        Raises:
            ValueError: a module is missing.
        """

    def reset(self, seed: int) -> None:
        """Restart, like a new process whose Setup has this seed."""

    def play(self, recorded: Collection[str], versions: Mapping[str, Version]) -> PlayedRound:
        """Play fragment_steps steps of each environment.

        Args:
            recorded: ids of the modules whose steps are recorded.
            versions: of each module's weights.

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

    def close(self) -> None:
        """Close the environments."""


@dataclass(frozen=True, slots=True)
class UserCode:
    """Code of a notebook or script.

    Attributes:
        module_factory: the value of the run's key `module`; None: a name, or nothing.
        classes: other classes, by name; None: no classes.
    """

    module_factory: Any = None
    classes: Any = None


@dataclass(frozen=True, slots=True)
class ActingParts:
    """A module for acting, and its connectors.

    Attributes:
        connectors: from the environments to the module.
        module_to_env: from the module to the environments.
        module: the module.
        observation_space: the environments'.
        action_space: the environments'.
        exploration_exponents: as in `ActingSetup`.
    """

    connectors: EnvToModule
    module_to_env: ModuleToEnv
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
        """Build the parts that act.

        Args:
            setup: what they are built from.
            observation_space: the environments'.
            action_space: the environments'.
            own_code: may be used in the setup.
        """
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
        # The value function stays with the learner.
        strip_to_acting(module)  # learners do not send the rest
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
            module_id: of the module.
            rows: N.
            steps: T.
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
