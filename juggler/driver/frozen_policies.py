"""Builds modules that are not trained, in processes that have torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gymnasium import Space

from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.policies.loading import PolicyConfig, restore_parts
from juggler.runtime.connectors.env_to_module import EnvToModule
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.modules.by_name import given_or_named
from juggler.runtime.modules.rl_module import RLModule


def frozen_parts(
    frozen: FrozenModule,
    observation_space: Space[Any],
    action_space: Space[Any],
    factory: Callable[..., Any] | None,
    own: Mapping[str, type[Any]],
) -> tuple[RLModule, EnvToModule, ModuleToEnv]:
    """A module and the connectors on both sides of it, with all that it plays with.

    Args:
        frozen: the module.
        observation_space: of its agents.
        action_space: of its agents.
        factory: what the key `module` was given in Python.
        own: other classes of a script, by the names that stand for them.

    Raises:
        CheckpointError: the weights are another module's.
        ValueError: a part cannot be built; says which one.
    """
    given = given_or_named(frozen.config.module.module, factory, own)
    config = PolicyConfig(
        frozen.config.module,
        frozen.config.connectors.parsed(),
        given if callable(given) else None,
        own,
    )
    return restore_parts(frozen.checkpoint, config, observation_space, action_space, frozen.source)
