"""From a config to a vector of environments."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import (
    AsyncVectorEnv,
    AutoresetMode,
    SyncVectorEnv,
    VectorEnv,
    VectorWrapper,
)

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.environments.action_masks import observe_masks
from juggler.envrunner.environments.autoreset import autoreset_mode
from juggler.envrunner.environments.environment_processes import EnvironmentProcesses
from juggler.envrunner.environments.environments_in_turn import EnvironmentsInTurn
from juggler.envrunner.environments.envpool import SCHEME as ENVPOOL
from juggler.envrunner.environments.envpool import envpool_environments
from juggler.envrunner.environments.naming import Env, EnvironmentFactory, VectorEnvironment, find
from juggler.envrunner.environments.one_environment import EnvironmentFunction
from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.environments.wrappers import wrapped, wrapper_specs
from juggler.envrunner.failures import EnvironmentFailed

_AUTORESET = {
    "auto": AutoresetMode.SAME_STEP,
    "next_step": AutoresetMode.NEXT_STEP,
    "same_step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}


def make_vector_env(
    config: EnvRunnerConfig,
    factory: EnvironmentFactory | None = None,
    runner: int = 0,
    *,
    just_one: bool = False,
) -> VectorEnvironment:
    """A runner's environments.

    Arrays that it returns may be views of its own memory, valid until its next step. Action masks
    that environments give in their infos are in its observations.

    Args:
        config: which environments and how many.
        factory: makes them, instead of what `config.env` names.
        runner: this one's number, by which simulators are shared among EnvRunners.
        just_one: make one environment, in this process, where each is made by itself: enough to
            see its spaces.

    Raises:
        ValueError: `config` names nothing that exists, or what cannot be had.
        EnvironmentFailed: an environment could not be constructed.
    """
    config.validate()
    if factory is None and config.env.startswith(SCHEME):
        # It brings gRPC, which environments do without.
        from juggler.envrunner.dm_env_rpc.vector_env import simulators

        return _as_it_is(config, simulators(config, runner), config.env)
    if factory is None and config.env.startswith(ENVPOOL):
        return _as_it_is(config, envpool_environments(config), config.env)
    source = wrapped(factory or find(config.env), wrapper_specs(config.env_wrappers))
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
    """Seed and reset all environments -> their first observations [N, ...]."""
    seeds = environment_seeds(seed, env.num_envs)
    # Other vectors of environments take one seed, and make of it what they need.
    each = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
    first: Any = seeds if each else seeds[0]
    observations, _ = env.reset(seed=first)
    return observations


def _from_registry(config: EnvRunnerConfig, spec: EnvSpec, just_one: bool) -> VectorEnvironment:
    native = spec.vector_entry_point is not None and not spec.additional_wrappers
    if config.vectorize == "native" and not native:
        lack = "has no vector entry point" if spec.vector_entry_point is None else "has wrappers"
        raise ValueError(f"vectorize = 'native': {spec.id} {lack}; use auto, sync or async")
    if config.vectorize == "native" or (config.vectorize == "auto" and native):
        try:
            env = gymnasium.make_vec(
                spec,
                num_envs=config.envs_per_runner,
                vectorization_mode="vector_entry_point",
                **config.env_kwargs,
            )
        except Exception as error:
            raise EnvironmentFailed.during(spec.id, "constructor", error) from None
        return _as_it_is(config, env, spec.id)
    if spec.entry_point is None:
        raise ValueError(f"vectorize = {config.vectorize!r}: {spec.id} must be native")
    make = functools.partial(gymnasium.make, spec)
    # Gymnasium's checks cost time in every step: one environment of many equal ones shows enough.
    unchecked = functools.partial(make, disable_env_checker=True)
    return _of_single_ones(config, make, unchecked, spec.id, just_one)


def _from_callable(
    config: EnvRunnerConfig, factory: EnvironmentFactory, just_one: bool
) -> VectorEnvironment:
    name = getattr(factory, "__qualname__", type(factory).__name__)
    try:
        first = factory(**config.env_kwargs)
    except Exception as error:
        raise EnvironmentFailed.during(f"environment 0 ({name})", "constructor", error) from None
    if isinstance(first, VectorEnv):
        if config.vectorize in ("sync", "async"):
            first.close()
            raise ValueError(
                f"vectorize = {config.vectorize!r}: {name} makes a VectorEnv; use auto or native"
            )
        return _as_it_is(config, first, name)
    if not isinstance(first, gymnasium.Env):
        raise ValueError(
            f"{name} must make a gymnasium.Env or a gymnasium.vector.VectorEnv, "
            f"not a {type(first).__name__}"
        )
    if lacking := [key for key in ("observation_space", "action_space") if not hasattr(first, key)]:
        first.close()
        raise ValueError(f"{name} must have {' and '.join(lacking)}: set them in its constructor")
    if config.vectorize == "native":
        first.close()
        raise ValueError(
            f"vectorize = 'native': {name} makes single environments; use auto, sync or async"
        )
    return _of_single_ones(config, factory, factory, name, just_one, first)


def _as_it_is(config: EnvRunnerConfig, env: VectorEnvironment, name: str) -> VectorEnvironment:
    """A vector of environments that makes its own choices."""
    if env.num_envs != config.envs_per_runner:
        env.close()
        raise ValueError(
            f"{name} makes {env.num_envs} environments, and envs_per_runner is "
            f"{config.envs_per_runner}: make them equal"
        )
    mode = autoreset_mode(env)
    if config.autoreset != "auto" and mode != _AUTORESET[config.autoreset]:
        warnings.warn(
            f"autoreset = {config.autoreset!r} has no effect: {name} resets its environments in "
            f"its own way ({mode.name.lower()})",
            stacklevel=4,
        )
    return _ReportingVector(env, f"one of {env.num_envs} environments ({name})")


def _of_single_ones(
    config: EnvRunnerConfig,
    make_first: Callable[..., Any],
    make_other: Callable[..., Any],
    name: str,
    just_one: bool,
    first: Env | None = None,
) -> VectorEnvironment:
    separate = config.vectorize == "async" and not just_one
    others = 0 if just_one else config.envs_per_runner - 1
    functions = [
        EnvironmentFunction(make, config.env_kwargs, f"environment {i} ({name})", separate)
        for i, make in enumerate([make_first] + [make_other] * others)
    ]
    functions[0].ready = first
    mode = _AUTORESET[config.autoreset]
    if separate:
        return EnvironmentProcesses(functions, mode, config.step_deadline_seconds, name)
    return EnvironmentsInTurn(functions, mode, name)


class _ReportingVector(VectorWrapper):
    """The same for what a vector of environments raises by itself."""

    def __init__(self, env: VectorEnvironment, where: str) -> None:
        super().__init__(env)
        self._where = where

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        try:
            return self.env.reset(seed=seed, options=options)
        except EnvironmentFailed:
            raise
        except Exception as error:
            raise EnvironmentFailed.during(self._where, "reset", error) from None

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        try:
            return self.env.step(actions)
        except EnvironmentFailed:
            raise
        except Exception as error:
            raise EnvironmentFailed.during(self._where, "step", error) from None


def environment_in(frame: FrameType | None) -> str:
    """For people: the call of an environment that a thread is in, such as
    "step of environment 3 (CartPole-v1)"; "" where it is in none.

    Read off the stack, so that steps that take no longer than they should pay nothing for it.

    Args:
        frame: the innermost of the thread.
    """
    found = ""
    while frame is not None:
        call, there = frame.f_code.co_name, frame.f_locals
        env = there.get("self")
        if isinstance(env, VectorEnv) and call in ("step", "reset"):
            if isinstance(env, EnvironmentsInTurn) and "i" in there:
                return f"{there.get('call', call)} of {env.name_of(there['i'])}"
            found = found or f"{call} of {type(env).__name__}"
        elif frame.f_code is make_vector_env.__code__:
            found = found or "the constructor of an environment"
        frame = frame.f_back
    return found
