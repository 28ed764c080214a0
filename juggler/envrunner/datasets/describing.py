"""What a data set says of the environment that its episodes are of."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.naming import EnvironmentFactory, find_environment
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.modules.by_name import SCRIPT


def spec_of(config: EnvRunnerConfig, factory: Callable[..., Any] | None) -> EnvSpec | None:
    """How Gymnasium makes an environment again. Its id is what `env` would be; None: there is no
    such name, or nobody can write it down.

    Args:
        config: names the environment.
        factory: makes the environments instead of the name; None: the name does.
    """
    if config.gateway or config.is_elsewhere or config.env_wrappers:
        return None
    found = find_environment(config.env) if factory is None else _found_as(config.env, factory)
    if found is None or (isinstance(found, type) and not issubclass(found, gymnasium.Env)):
        return None  # such as a whole vector
    if isinstance(found, EnvSpec):
        spec = copy.deepcopy(found)
    else:
        spec = EnvSpec(config.env, entry_point=config.env)
    spec.kwargs.update(config.env_kwargs)
    if config.max_episode_steps is not None:
        spec.max_episode_steps = config.max_episode_steps
    try:
        spec = replace(spec, id=config.env)
    except gymnasium.error.Error:
        pass  # Gymnasium takes no module with a dot before a namespace: the id alone remains
    try:
        spec.to_json()
    except (TypeError, ValueError):
        return None
    return spec


def _found_as(name: str, factory: Callable[..., Any]) -> EnvironmentFactory | None:
    """What makes the environments, if others find it by its name: what belongs to a script, or is
    made within a function, is not found."""
    if name.startswith(SCRIPT):
        return None
    try:
        return factory if find_environment(name) is factory else None
    except (ValueError, EnvironmentFailed):
        return None


def words_of(env: str) -> str:
    """The name of an environment, as Minari allows it in that of a data set."""
    name = re.sub(r"-v\d+$", "", env.rpartition(":")[2])
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "env"
