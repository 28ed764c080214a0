"""What a data set says of the environment that its episodes are of."""

from __future__ import annotations

import copy
import re

from gymnasium.envs.registration import EnvSpec

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.naming import find_environment


def spec_of(config: EnvRunnerConfig) -> EnvSpec | None:
    """How Gymnasium makes an environment again; None: it cannot, or nobody can write it down."""
    if config.gateway or config.is_elsewhere or config.env_wrappers:
        return None
    found = find_environment(config.env)
    if not isinstance(found, EnvSpec):
        return None
    spec = copy.deepcopy(found)
    spec.kwargs.update(config.env_kwargs)
    if config.max_episode_steps is not None:
        spec.max_episode_steps = config.max_episode_steps
    try:
        spec.to_json()
    except (TypeError, ValueError):
        return None
    return spec


def words_of(env: str) -> str:
    """The name of an environment, as Minari allows it in that of a data set."""
    name = re.sub(r"-v\d+$", "", env.rpartition(":")[2])
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "env"
