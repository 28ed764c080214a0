"""Builds the vector of environments that a config describes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import FrameType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import MultiDiscrete
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.environments.accepted_vector import AcceptedVector
from juggler.envrunner.environments.action_masks import observe_masks
from juggler.envrunner.environments.autoreset import autoreset_mode
from juggler.envrunner.environments.environment_processes import EnvironmentProcesses
from juggler.envrunner.environments.environments_in_turn import (
    EnvironmentsInTurn,
    make_environment,
)
from juggler.envrunner.environments.envpool import SCHEME as ENVPOOL
from juggler.envrunner.environments.envpool import make_envpool_vector
from juggler.envrunner.environments.find_environment import (
    Env,
    EnvironmentFactory,
    VectorEnvironment,
    add_wrappers,
    find_environment,
    wrapper_specs,
)
from juggler.envrunner.environments.pufferlib import as_vector
from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.failures import failures_of
from juggler.envrunner.multi_agent.pettingzoo_games import METHODS
from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv
from juggler.runtime.annotations import signature
from juggler.runtime.near_matches import all_of


class EqualChoices(MultiDiscrete):
    """A MultiDiscrete of N equal choices that start at 0.

    `contains` equals Gymnasium's, in a quarter of the time for arrays of its own shape and dtype.
    """

    def contains(self, x: Any) -> bool:
        if type(x) is not np.ndarray or x.dtype != np.int64 or x.shape != self.nvec.shape:
            return super().contains(x)
        # As unsigned integers, negative numbers are the largest.
        return bool(np.maximum.reduce(x.view(np.uint64), axis=None) < self.nvec.item(0))


def check_actions_faster(env: VectorEnv[Any, Any, Any]) -> None:
    """Let a vector check its actions faster, if they are equal choices."""
    inner = env.unwrapped
    space = vars(inner).get("action_space")
    if type(space) is not MultiDiscrete or space.dtype != np.int64 or not space.nvec.size:
        return
    if not space.start.any() and (space.nvec == space.nvec.item(0)).all():
        space.__class__ = EqualChoices  # the rest stays, with its random generator


#: Hints for an environment with several agents that a function or a class has made.
_SEVERAL = '; for several agents, write the class of what it makes after the "->" of the function'
_UNNAMED = (
    "; name its agents in the run's table agents: juggler driver does not make the environment"
)


def make_vector_env(
    config: EnvRunnerConfig,
    factory: EnvironmentFactory | None = None,
    runner: int = 0,
    *,
    just_one: bool = False,
) -> VectorEnvironment:
    """Build an EnvRunner's environments.

    The next step may overwrite the arrays that they return. Action masks in infos become part of
    the observations.

    Args:
        config: the environments and their number.
        factory: makes the environments instead of `config.env`.
        runner: the EnvRunner's index, by which EnvRunners share simulators.
        just_one: make only one environment, in this process, to read its spaces. A vector's
            environments are all made.

    Raises:
        ValueError: `config` names an environment that does not exist, or an invalid option.
        EnvironmentFailed: the constructor of an environment failed.
    """
    config.validate()
    if factory is None and config.env.startswith(SCHEME):
        # Imported here because it imports gRPC.
        from juggler.envrunner.dm_env_rpc.simulator_vector import simulators

        return _accept_vector(config, simulators(config, runner), config.env)
    if factory is None and config.env.startswith(ENVPOOL):
        return _accept_vector(config, make_envpool_vector(config), config.env)
    # Everything else is made in Python, where wrappers fit around it.
    source = factory or find_environment(config.env)
    specs = wrapper_specs(config.env_wrappers)
    if (limit := config.max_episode_steps) is not None:
        # A registered environment may be a vector of its own, which no wrapper fits around.
        if isinstance(source, EnvSpec):
            kwargs = {**config.env_kwargs, "max_episode_steps": limit}  # as native vectors take it
            config = dataclasses.replace(config, env_kwargs=kwargs, max_episode_steps=None)
        else:
            specs += wrapper_specs([{"use": "TimeLimit", "max_episode_steps": limit}])
    source = add_wrappers(source, specs)
    if isinstance(source, EnvSpec):
        env = _from_registry(config, source, just_one)
    else:
        env = _from_callable(config, source, just_one)
    try:
        return observe_masks(env)
    except BaseException:
        env.close()
        raise


def reset_environments(env: VectorEnvironment, seed: int) -> Any:
    """Seed and reset all environments; return their first observations [N, ...]."""
    seeds = environment_seeds(seed, env.num_envs)
    # Other vectors take one seed and derive the rest from it.
    each = isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv | EnvironmentProcesses)
    first: Any = seeds if each else seeds[0]
    observations, _ = env.reset(seed=first)
    return observations


def environment_in(frame: FrameType | None) -> str:
    """Name the environment's call that a thread is in; "": none.

    For example "step of environment 3 (CartPole-v1)". It reads the stack, and so costs steps
    nothing.
    """
    found = ""
    while frame is not None:
        call, variables = frame.f_code.co_name, frame.f_locals
        env = variables.get("self")
        name_of = getattr(env, "name_of", None)
        if call in ("step", "reset") and "i" in variables and callable(name_of):
            return f"{variables.get('call', call)} of {name_of(variables['i'])}"
        if isinstance(env, VectorEnv) and call in ("step", "reset"):
            found = found or f"{call} of {type(env).__name__}"
        elif call in ("make_vector_env", "make_multi_agent_envs"):
            found = found or "the constructor of an environment"
        frame = frame.f_back
    return found


def _from_registry(config: EnvRunnerConfig, spec: EnvSpec, just_one: bool) -> VectorEnvironment:
    native = spec.vector_entry_point is not None and not spec.additional_wrappers
    if config.vectorize == "native" and not native:
        lack = "has no vector entry point" if spec.vector_entry_point is None else "has wrappers"
        raise ValueError(f"vectorize = 'native': {spec.id} {lack}; use auto, sync or async")
    if config.vectorize == "native" or (config.vectorize == "auto" and native):
        with failures_of(spec.id, "constructor"):
            env = gymnasium.make_vec(
                spec,
                num_envs=config.envs_per_runner,
                vectorization_mode="vector_entry_point",
                **config.env_kwargs,
            )
        return _accept_vector(config, env, spec.id)
    # Without an entry point for one environment, it only makes vectors.
    if spec.entry_point is None:
        raise ValueError(f"vectorize = {config.vectorize!r}: {spec.id} must be native")
    make = functools.partial(gymnasium.make, spec)
    # Gymnasium's checks slow every step, so only one of N equal environments has them.
    spec = dataclasses.replace(spec, order_enforce=False)
    unchecked = functools.partial(gymnasium.make, spec, disable_env_checker=True)
    return _from_single(config, make, unchecked, spec.id, just_one)


def _from_callable(
    config: EnvRunnerConfig, factory: EnvironmentFactory, just_one: bool
) -> VectorEnvironment:
    name = getattr(factory, "__qualname__", type(factory).__name__)
    env_kwargs = config.env_kwargs
    if _makes_several(factory):
        env_kwargs = {"num_envs": config.envs_per_runner, **env_kwargs}
    with failures_of(f"environment 0 ({name})", "constructor"):
        first = as_vector(factory(**env_kwargs))
    if isinstance(first, VectorEnv):
        if config.vectorize in ("sync", "async"):
            first.close()
            raise ValueError(
                f"vectorize = {config.vectorize!r}: {name} makes a VectorEnv; use auto or native"
            )
        return _accept_vector(config, first, name)
    # What it makes is only known once it has made one.
    if not isinstance(first, gymnasium.Env):
        raise ValueError(
            f"{name} must make a gymnasium.Env or a gymnasium.vector.VectorEnv, "
            f"not a {type(first).__name__}" + _about_agents(factory, first)
        )
    # A base class declares both attributes without a value.
    if lacking := [key for key in ("observation_space", "action_space") if not hasattr(first, key)]:
        first.close()
        raise ValueError(f"{name} must have {all_of(lacking)}: set them in its constructor")
    if config.vectorize == "native":
        first.close()
        raise ValueError(
            f"vectorize = 'native': {name} makes single environments; use auto, sync or async"
        )
    return _from_single(config, factory, factory, name, just_one, first)


def _makes_several(factory: EnvironmentFactory) -> bool:
    """Return whether a factory has a parameter for the number of environments."""
    try:
        return "num_envs" in signature(factory).parameters
    except (TypeError, ValueError):  # written in C
        return False


def _accept_vector(config: EnvRunnerConfig, env: VectorEnvironment, name: str) -> VectorEnvironment:
    """Check a vector with its own `step` and `reset`."""
    if env.num_envs != config.envs_per_runner:
        env.close()
        raise ValueError(
            f"{name} makes {env.num_envs} environments, and envs_per_runner is "
            f"{config.envs_per_runner}: make them equal, or let it have a parameter num_envs"
        )
    autoreset_mode(env)  # raises if it has none
    check_actions_faster(env)
    return AcceptedVector(env, f"one of {env.num_envs} environments ({name})")


def _from_single(
    config: EnvRunnerConfig,
    make_first: Callable[..., Any],
    make_other: Callable[..., Any],
    name: str,
    just_one: bool,
    first: Env | None = None,
) -> VectorEnvironment:
    others = 0 if just_one else config.envs_per_runner - 1
    makers = [make_first] + [make_other] * others
    is_async = config.vectorize == "async" and not just_one
    if first is not None and not is_async:
        makers[0] = lambda **_: first
    functions = [
        functools.partial(make_environment, make, config.env_kwargs, f"environment {i} ({name})")
        for i, make in enumerate(makers)
    ]
    if is_async:
        return EnvironmentProcesses(functions, config.step_deadline_seconds, name, first)
    return EnvironmentsInTurn(functions, name)


def _about_agents(factory: Callable[..., Any], made: Any) -> str:
    """Explain what environments with several agents need; "": it has one agent."""
    if not (hasattr(made, "possible_agents") or hasattr(made, "agents")):
        return ""
    lacking = [each for each in METHODS if not callable(getattr(made, each, None))]
    if lacking and not isinstance(made, MultiAgentVectorEnv):
        return f"; for several agents, it lacks PettingZoo's methods {all_of(lacking)}"
    return _UNNAMED if isinstance(factory, type) else _SEVERAL
