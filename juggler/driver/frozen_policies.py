"""Builds modules that are not trained, in processes that have torch."""

from __future__ import annotations

from typing import Any

from gymnasium import Space

from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.policies.loading import PolicyConfig, restore_parts
from juggler.runtime.connectors.env_to_module import EnvToModule
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.modules.rl_module import RLModule


def frozen_parts(
    frozen: FrozenModule, observation_space: Space[Any], action_space: Space[Any]
) -> tuple[RLModule, EnvToModule, ModuleToEnv]:
    """A module and the connectors on both sides of it, with all that it plays with.

    Args:
        frozen: the module.
        observation_space: of its agents.
        action_space: of its agents.

    Raises:
        CheckpointError: the weights are another module's.
        ValueError: a part cannot be built; says which one.
    """
    config = PolicyConfig(frozen.config.module, frozen.config.connectors.parsed(), None, {})
    return restore_parts(frozen.checkpoint, config, observation_space, action_space, frozen.source)
