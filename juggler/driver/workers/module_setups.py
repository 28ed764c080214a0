"""What learners and EnvRunners are told of a module that is trained."""

from __future__ import annotations

from dataclasses import asdict

from juggler.driver.config import RunConfig
from juggler.driver.workers.module_spaces import Spaces
from juggler.envrunner.setup import ActingSetup
from juggler.learner.algorithms.registry import find_algorithm
from juggler.learner.process.program import ModuleSetup
from juggler.runtime.actors.setups import to_json
from juggler.runtime.wire.v1 import training_pb2


def acting_setup(config: RunConfig) -> ActingSetup:
    """Of one module, from the configuration as that module has it."""
    learner = config.learner
    return ActingSetup(
        module=config.module,
        connectors=config.connectors.connectors,
        algorithm=learner.algorithm,
        off_policy=find_algorithm(learner.algorithm).off_policy,
        row_age=config.staleness.row_age,
    )


def exploration_exponents(config: RunConfig, runner: int, environments: int) -> tuple[float, ...]:
    """By which powers of the number that its learner sends a module explores in one EnvRunner
    (Horgan et al. 2018, "Distributed Prioritized Experience Replay", section 4). Of all N
    environments, the i-th has 1 + α i / (N - 1). Where an EnvRunner's rows are not those of its
    environments, with a gateway or several agents, it is the i-th of N EnvRunners.

    Args:
        config: as the module has it.
        runner: index of the EnvRunner; one beyond those of the configuration explores least.
        environments: of each EnvRunner.
    """
    alpha = getattr(config.learner, "exploration_ladder", 0.0)
    if not alpha:
        return ()
    each = 1 if config.agents.agents or config.env_runner.gateway else environments
    last = max(1, config.driver.num_env_runners * each - 1)
    places = range(runner * each, (runner + 1) * each)
    return tuple(1 + alpha * min(1.0, place / last) for place in places)


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
