"""What learners and EnvRunners are told of a module that is trained."""

from __future__ import annotations

from dataclasses import asdict

from juggler.driver.config import RunConfig
from juggler.driver.workers.module_spaces import Spaces
from juggler.envrunner.setup import ActingSetup
from juggler.learner.algorithms.registry import find_algorithm
from juggler.learner.process.setup import ModuleSetup
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
