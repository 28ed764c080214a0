"""Setups of modules for learners and EnvRunners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

import gymnasium
from google.protobuf.json_format import MessageToDict

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.reporting.metrics import CONFIRMING_EPISODES
from juggler.envrunner.envrunner_program import EVALUATOR
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup
from juggler.learner.algorithms.registry import find_algorithm
from juggler.learner.process.learner_program import ModuleSetup
from juggler.runtime.actors.worker import to_json
from juggler.runtime.near_matches import nearest
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import spaces_pb2, training_pb2

_LONGEST_TEXT: Final = 1000  # characters of a description of spaces


def in_batches(module: training_pb2.Ready.Module) -> dict[str, spaces_pb2.Space]:
    """Return the spaces of the columns of a module's batches, by name."""
    spaces = {
        "observation": module.observation_space,
        "action": module.action_space,
        "critic": module.critic_space,
    }
    return {name: space for name, space in spaces.items() if space.ByteSize()}


def described(spaces: Mapping[str, spaces_pb2.Space]) -> str:
    """Describe spaces for people, unless that is too long."""
    size = sum(space.ByteSize() for space in spaces.values())
    if size >= _LONGEST_TEXT:
        return f"spaces of {size} bytes"
    return str({name: MessageToDict(space) for name, space in spaces.items()})


def spaces_of_environment(module: training_pb2.Ready.Module) -> dict[str, object]:
    """Return a module's spaces before connectors, for a checkpoint; {}: no encoding."""
    if not module.environment_action_space.ByteSize():
        return {}
    return {
        "observation": MessageToDict(module.environment_observation_space),
        "action": MessageToDict(module.environment_action_space),
    }


def acting_setup(config: RunConfig, own: Mapping[str, type[Any]] | None = None) -> ActingSetup:
    """Make the acting setup of one module from its configuration."""
    learner = config.learner
    algorithm = (own or {}).get(learner.algorithm) or find_algorithm(learner.algorithm)
    return ActingSetup(
        module=config.module,
        connectors=config.connectors.connectors,
        algorithm=learner.algorithm,
        off_policy=algorithm.off_policy,
        row_age=config.staleness.row_age,
    )


def exploration_exponents(config: RunConfig, runner: int, environments: int) -> tuple[float, ...]:
    """Return exponents of an EnvRunner's exploration, one per environment.

    Horgan et al. 2018, "Distributed Prioritized Experience Replay", section 4: of N environments,
    the i-th has 1 + α i / (N - 1). With a gateway or several agents, the exponent holds for all
    rows of the i-th of N EnvRunners.
    """
    alpha = getattr(config.learner, "exploration_ladder", 0.0)
    if not alpha:
        return ()
    each = 1 if config.agents.agents or config.env_runner.gateway else environments
    last = max(1, config.driver.num_env_runners * each - 1)
    places = range(runner * each, (runner + 1) * each)
    return tuple(1 + alpha * min(1.0, place / last) for place in places)


def add_module(
    config: RunConfig, module_id: str, spaces: training_pb2.Ready.Module, seed: int
) -> training_pb2.AddModule:
    """Make the command that has a learner process host a module.

    Raises:
        TypeError, ValueError: a value does not fit JSON or the message.
    """
    setup = ModuleSetup(
        learner=asdict(config.learner),
        module=config.module,
        connectors=config.connectors.connectors,
    )
    return training_pb2.AddModule(
        module_id=module_id,
        config=to_json(setup),
        observation_space=spaces.observation_space,
        action_space=spaces.action_space,
        critic_space=spaces.critic_space if spaces.critic_space.ByteSize() else None,
        seed=seed,
    )


def environments(config: RunConfig, role: str) -> int:
    """Return how many environments a worker steps."""
    rows = config.env_runner.envs_per_runner
    if role == EVALUATOR:
        most = config.driver.evaluation_episodes
        if config.driver.confirm and config.driver.stop_return is not None:
            most = max(most, CONFIRMING_EPISODES)
        rows = min(rows, most)
    return rows


def env_runner_setup(
    config: RunConfig,
    role: str,
    trained: Mapping[str, ActingSetup],
    others: Mapping[str, ActingSetup],
) -> EnvRunnerSetup:
    """Make the setup of an EnvRunner or an evaluator."""
    own = replace(config.env_runner, envs_per_runner=environments(config, role))
    agents = config.agents.agents
    if config.agents.league:  # its players come and go
        players = list(dict.fromkeys([*trained, *config.others, *others]))
        agents = {agent: list(players) for agent in agents}
    return EnvRunnerSetup(
        env_runner=replace(own, dataset="", record="") if role == EVALUATOR else own,
        modules={**trained, **others},
        agents=agents,
        mapping=config.agents.mapping,
        league=bool(config.agents.league),
        evaluates=config.driver.evaluation_seconds > 0,
    )


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """A module and its training, in names instead of objects: see `juggler.RunConfig`."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    learner: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the algorithm: `algorithm`, `lr`, …"""
    module: str | None = None
    """The RLModule, or the Catalog that builds it, as "package.module:Class"."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the module."""
    distribution: str | None = None
    """The function that makes the distribution of actions, as "package.module:function"."""
    connectors: Mapping[str, Any] = field(default_factory=dict)
    """The table `connectors` of a run; only its part `learner` is used."""
    seed: int | None = None
    """Seed of the first parameters; None: derived from the group's seed and the module's id."""

    def command(self, module_id: str, seed: int) -> training_pb2.AddModule:
        """Make the command that adds this module to a learner process.

        Raises:
            ConfigError: a value is wrong.
        """
        try:
            if not isinstance(self.learner, Mapping):
                raise ConfigError(f"learner = {self.learner!r}: expected a table of keys")
            keys: dict[str, Any] = dict(self.learner)
            if isinstance(burn_in := keys.get("burn_in"), int):
                keys["fragment_steps"] = max(burn_in, 0) + 1  # no sampling here
            for name in ("module", "model", "distribution", "connectors"):
                keys[name] = getattr(self, name)
            config = RunConfig.from_flat(keys, "learner")
            # A whole configuration has keys that a learner ignores.
            known = [each.name for each in fields(config.learner)]
            for key in self.learner:
                if key not in known:
                    raise ConfigError(f"learner has no key {key!r}{nearest(key, known)}")
            spaces = training_pb2.Ready.Module(
                observation_space=space_to_message(self.observation_space),
                action_space=space_to_message(self.action_space),
            )
            seed = seed if self.seed is None else self.seed
            return add_module(config, module_id, spaces, seed)
        except (TypeError, ValueError) as error:  # also values that do not fit JSON or a message
            raise ConfigError(f"module {module_id!r}: {error}") from error
