"""Builds an EnvRunner's environments with several agents. No torch here."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Collection
from typing import Any, Final

from gymnasium.envs.registration import EnvSpec, WrapperSpec, load_env_creator

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments import envpool
from juggler.envrunner.environments.envpool import (
    AT_OWN_PACE,
    make_envpool_rows,
    number_of_agents,
)
from juggler.envrunner.environments.envpool import SCHEME as ENVPOOL
from juggler.envrunner.environments.find_environment import TUPLES, find_environment, wrapper_specs
from juggler.envrunner.environments.simulator_extras import check_extra
from juggler.envrunner.failures import failures_of
from juggler.envrunner.multi_agent import openspiel, pettingzoo_games
from juggler.envrunner.multi_agent.agent_adapters import (
    PaddedAgents,
    PassingAgents,
    find_tuple_game,
)
from juggler.envrunner.multi_agent.games import (
    Game,
    GamesInTurn,
    ParallelGame,
    TurnBasedGame,
)
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv
from juggler.envrunner.multi_agent.vector_turns import VectorTurns
from juggler.runtime.near_matches import all_of, one_of

#: Functions that find a game, by the scheme of its name.
FINDERS: Final[dict[str, Callable[[str], Callable[..., Any]]]] = {
    ENVPOOL: envpool.find_game,
    openspiel.SCHEME: openspiel.find_game,
    pettingzoo_games.SCHEME: pettingzoo_games.find_game,
    TUPLES: find_tuple_game,
}


def has_several_agents(
    config: EnvRunnerConfig, env_factory: Callable[..., Any] | None = None
) -> bool:
    """Return whether the environments of a run have several agents.

    They do if their name begins with "pettingzoo:", "open_spiel:" or "tuples:", or if they come
    from a class with PettingZoo's Parallel or AEC interface, or from a `MultiAgentVectorEnv`. The
    class of a function is its return annotation. EnvPool knows the number of agents of its games;
    its environments at their own pace count too, because their rows fill like agents' rows. No
    environment is made.

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
        or all(callable(getattr(made, name, None)) for name in pettingzoo_games.METHODS)
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


#: Makes one environment from env_kwargs, or N of them from env_kwargs and num_envs.
MultiAgentFactory = Callable[..., Any]


def make_multi_agent_envs(
    config: EnvRunnerConfig,
    env_factory: MultiAgentFactory | None = None,
    *,
    just_one: bool = False,
    critics_see: Collection[str] = (),
) -> MultiAgentEnvs:
    """Build an EnvRunner's environments with several agents.

    Args:
        just_one: make only one environment, to read its agents and spaces.
        critics_see: values of `critic_sees` that turns must have.

    Raises:
        ValueError: `config` names an environment that does not exist, or an option that is not for
            several agents; or the environments have no state for a critic.
        EnvironmentFailed: the constructor of an environment failed, or its agents break
            PettingZoo's rules.
    """
    config.validate()
    envs = _made(config, 1 if just_one else config.envs_per_runner, env_factory, critics_see)
    if not config.pad_agents or len(envs.groups) == 1:
        return envs
    try:
        return PaddedAgents(envs)
    except BaseException:
        envs.close()
        raise


def _made(
    config: EnvRunnerConfig,
    num_envs: int,
    env_factory: MultiAgentFactory | None,
    critics_see: Collection[str],
) -> MultiAgentEnvs:
    if env_factory is None and config.env.startswith(ENVPOOL) and AT_OWN_PACE in config.env_kwargs:
        _check_options(config, config.env, True)
        return make_envpool_rows(config, num_envs, critics_see)
    make, name = find_games(config, env_factory)
    is_vector = steps_all_at_once(make)
    _check_options(config, name, is_vector)
    # A vector makes all of its environments itself.
    if is_vector:
        if "num_envs" in config.env_kwargs:
            raise ValueError("env_kwargs must not have num_envs: set envs_per_runner instead")
        with failures_of(name, "constructor"):
            vector = make(num_envs=num_envs, **config.env_kwargs)
        try:
            _check_vector(vector, num_envs, name)
            return VectorTurns(vector, name, critics_see)
        except BaseException:
            vector.close()
            raise
    # Games that were made are closed if a later one fails.
    wrappers = wrapper_specs(config.env_wrappers)
    games: list[Game] = []
    try:
        for i in range(num_envs):
            with failures_of(f"environment {i} ({name})", "constructor"):
                env = _wrapped(make(**config.env_kwargs), wrappers)
            games.append(_game(env, i, name, config.max_episode_steps))
        return GamesInTurn(games, name, critics_see)
    except BaseException:
        for game in games:
            game.close()
        raise


def find_games(
    config: EnvRunnerConfig, env_factory: MultiAgentFactory | None
) -> tuple[MultiAgentFactory, str]:
    """Find the factory of the environments, and their name.

    Raises:
        ValueError: there is no such environment, or it has one agent.
        EnvironmentFailed: importing its module failed.
    """
    scheme = next(filter(config.env.startswith, FINDERS), "")
    if env_factory is None and scheme:
        return FINDERS[scheme](config.env), config.env.removeprefix(scheme)
    source = env_factory or find_environment(config.env)
    if isinstance(source, EnvSpec):
        raise ValueError(f"env {config.env!r} has one agent: it is registered with Gymnasium")
    return source, getattr(source, "__qualname__", type(source).__name__)


def steps_all_at_once(make: MultiAgentFactory) -> bool:
    """Return whether a factory makes a `MultiAgentVectorEnv`."""
    made = class_of(make)
    return made is not None and issubclass(made, MultiAgentVectorEnv)


def _check_options(config: EnvRunnerConfig, name: str, is_vector: bool) -> None:
    """Check keys that have another meaning, or none, for several agents."""
    allowed = ("auto", "native") if is_vector else ("auto", "sync")
    if config.vectorize not in allowed:
        raise ValueError(
            f"vectorize = {config.vectorize!r}: the environments of {name} have several agents, "
            f"and are stepped in the EnvRunner's own process; use {one_of(allowed)}"
        )
    # A vector has no single environments to wrap or to cut.
    if is_vector and config.env_wrappers:
        raise ValueError(
            f"env_wrappers wrap single environments, and {name} steps all of its own: leave them "
            "out"
        )
    if is_vector and config.max_episode_steps is not None:
        raise ValueError(
            f"max_episode_steps: {name} steps all of its environments at once and has to truncate "
            "their episodes itself; leave it out, or see whether env_kwargs has a limit"
        )
    # Gymnasium's own wrappers expect one observation and one reward.
    for piece in wrapper_specs(config.env_wrappers):
        if piece.entry_point.startswith("gymnasium.wrappers:"):
            raise ValueError(
                f"env_wrappers: {piece.name} is for environments with one agent; name a wrapper of "
                "PettingZoo's interface as 'package.module:Class'"
            )


def _check_vector(vector: MultiAgentVectorEnv, num_envs: int, name: str) -> None:
    needed = ("num_envs", "agents", "observation_space", "action_space")
    if lacking := [each for each in needed if not hasattr(vector, each)]:
        raise ValueError(f"{name} must have {all_of(lacking)}: set them in its constructor")
    if vector.num_envs != num_envs:
        raise ValueError(
            f"{name} has {vector.num_envs} environments where {num_envs} were asked for"
        )
    if not vector.agents or len({*vector.agents}) < len(vector.agents):
        raise ValueError(f"{name} must have agents with different names, not {vector.agents!r}")


def _wrapped(env: Any, wrappers: tuple[WrapperSpec, ...]) -> Any:
    for wrapper in wrappers:
        wrap: Callable[..., Any] = load_env_creator(wrapper.entry_point)
        env = wrap(env, **wrapper.kwargs or {})
    return env


def _game(env: Any, index: int, name: str, limit: int | None) -> Game:
    env = pettingzoo_games.native(env)
    if callable(getattr(env, "last", None)):
        return TurnBasedGame(env, index, limit)
    if all(callable(getattr(env, each, None)) for each in pettingzoo_games.METHODS):
        if not hasattr(env, "possible_agents") and hasattr(env, "max_num_agents"):
            env = PassingAgents(env)
        return ParallelGame(env, index, limit)
    raise ValueError(
        f"{name} must make an environment with PettingZoo's Parallel or AEC interface, or be a "
        f"MultiAgentVectorEnv; it made a {type(env).__name__}"
    )
