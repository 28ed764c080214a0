"""Recognizes environments with several agents by their class. No torch here."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Any, Final

from gymnasium.envs.registration import EnvSpec

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments import envpool
from juggler.envrunner.environments.envpool import AT_OWN_PACE, number_of_agents
from juggler.envrunner.environments.envpool import SCHEME as ENVPOOL
from juggler.envrunner.environments.find_environment import TUPLES, find_environment
from juggler.envrunner.environments.simulator_extras import check_extra
from juggler.envrunner.multi_agent import openspiel, pettingzoo_games, tuple_agents
from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv

#: Functions that find a game, by the scheme of its name.
FINDERS: Final[dict[str, Callable[[str], Callable[..., Any]]]] = {
    ENVPOOL: envpool.find_game,
    openspiel.SCHEME: openspiel.find_game,
    pettingzoo_games.SCHEME: pettingzoo_games.find_game,
    TUPLES: tuple_agents.find_game,
}

#: Methods by which a class is recognized as one of PettingZoo's interfaces.
METHODS: Final = ("observation_space", "action_space", "reset", "step")


def has_several_agents(
    config: EnvRunnerConfig, env_factory: Callable[..., Any] | None = None
) -> bool:
    """Return whether the environments of a run have several agents.

    They do if their name begins with "pettingzoo:", "open_spiel:" or "tuples:", or if they come
    from a class with PettingZoo's Parallel or AEC interface, or from a `MultiAgentVectorEnv`. The
    class of a function is its return annotation. EnvPool knows the number of agents of its games;
    its environments at their own pace count too, because their rows fill like agents' rows. No
    environment is made.

    Args:
        config: the environments.
        env_factory: makes the environments instead of `config.env`.

    Raises:
        ValueError: there is no such environment, or its package is not installed.
        EnvironmentFailed: importing its module failed, or EnvPool cannot load it.
    """
    if env_factory is None:
        if config.gateway or config.is_served or ":" not in config.env:
            return False
        if config.env.startswith(ENVPOOL):
            check_extra(config.env)
            own_pace = AT_OWN_PACE in config.env_kwargs
            return own_pace or number_of_agents(config.env.removeprefix(ENVPOOL)) > 1
        # Only EnvPool has games of one agent, too.
        if config.env.startswith(tuple(FINDERS)):
            return True
        source = find_environment(config.env)
        if isinstance(source, EnvSpec):
            return False
        env_factory = source
    made = class_of(env_factory)
    return made is not None and (
        issubclass(made, MultiAgentVectorEnv)
        or all(callable(getattr(made, name, None)) for name in METHODS)
    )


def class_of(factory: Callable[..., Any]) -> type[Any] | None:
    """Return the class of what a factory makes; None: unknown."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    if isinstance(factory, type):
        return factory
    try:
        made = typing.get_type_hints(factory).get("return")
    except Exception:  # hints are code, and only a type checker can read some of them
        return None
    made = typing.get_origin(made) or made
    return made if isinstance(made, type) else None
