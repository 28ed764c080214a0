"""Builds the vector of environments that a config describes."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import MultiDiscrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, iterate
from numpy.typing import NDArray

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.environments.accepted_vector import AcceptedVector
from juggler.envrunner.environments.action_masks import observe_masks
from juggler.envrunner.environments.autoreset import autoreset_mode
from juggler.envrunner.environments.environment_processes import (
    EnvironmentFunction,
    EnvironmentProcesses,
    ReusedEnvironment,
)
from juggler.envrunner.environments.envpool import SCHEME as ENVPOOL
from juggler.envrunner.environments.envpool import make_envpool_vector
from juggler.envrunner.environments.find_environment import (
    Env,
    EnvironmentFactory,
    VectorEnvironment,
    find_environment,
)
from juggler.envrunner.environments.misfits import misfit, must_return, no_reward
from juggler.envrunner.environments.pufferlib import as_vector
from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.environments.step_infos import (
    BadMask,
    NoInfo,
    add_final,
    add_mask,
    mask_in,
    without_mask,
)
from juggler.envrunner.environments.wrappers import add_wrappers, wrapper_specs
from juggler.envrunner.failures import EnvironmentFailed, failures_of
from juggler.envrunner.info_numbers import keep_numbers
from juggler.envrunner.multi_agent.interfaces import METHODS
from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv
from juggler.runtime.annotations import signature
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.near_matches import all_of
from juggler.runtime.wire.flags import NoFlag, as_flag

#: Words in NumPy's error for a value that is not a number.
_NO_NUMBER = ("array element", "float")


class EnvironmentsInTurn(SyncVectorEnv):
    """A faster SyncVectorEnv whose errors name the environment that raised.

    The arrays that it returns are overwritten by the next step. Of infos, it returns only action
    masks, and the numbers of `step`: [N] each, NaN where an environment gave no number.

    Raises:
        EnvironmentFailed: in `reset` or `step`: an environment raised.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        autoreset_mode: AutoresetMode,
        name: str,
    ) -> None:
        super().__init__(functions, copy=False, autoreset_mode=autoreset_mode)
        self._name = name
        # The same memory [N * d, ...] of observations [N, d, ...], for one call of concatenate.
        self._one_by_one: NDArray[Any] | None = None
        if isinstance(self._observations, np.ndarray) and self._observations.ndim > 1:
            self._one_by_one = self._observations.reshape(-1, *self._observations.shape[2:])
        self._over = [False] * self.num_envs  # episodes that ended in the last step

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or only the ones in options["reset_mask"] [N], bool."""
        options = dict(options or {})
        mask = options.pop("reset_mask", None)
        rows = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        infos: dict[str, Any] = {}
        for i in rows:
            try:
                self._env_obs[i], info = self.envs[i].reset(
                    seed=None if seeds is None else seeds[i], options=options or None
                )
                infos = add_mask(self, infos, info, i)
            except Exception as error:
                raise self._failure(i, "reset", error) from None
            self._over[i] = False
        return self._batch_observations("reset"), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        next_step = self.autoreset_mode is AutoresetMode.NEXT_STEP
        same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        observations, rewards, over = self._env_obs, self._rewards, self._over
        terminated, truncated = self._terminations, self._truncations
        terminated.fill(False)
        truncated.fill(False)
        infos: dict[str, Any] = {}
        call, i = "step", 0
        try:
            each = zip(self.envs, iterate(self.action_space, actions), strict=True)
            for i, (env, action) in enumerate(each):
                if over[i] and next_step:
                    over[i], rewards[i] = False, 0
                    call = "reset"
                    observations[i], info = env.reset()
                    mask_in(info)  # it is a dict
                    call = "step"
                else:
                    observations[i], reward, ends, cut, info = env.step(action)
                    if reward is None:  # NumPy would make it NaN
                        raise TypeError("None is not a float")
                    rewards[i] = reward
                    if ends is not False or cut is not False:
                        ends, cut = as_flag("terminated", ends), as_flag("truncated", cut)
                    if ends:
                        info = without_mask(info)
                    if info and not (same_step and (ends or cut)):
                        keep_numbers(infos, info, i, self.num_envs)
                    if ends or cut:
                        terminated[i], truncated[i], over[i] = ends, cut, True
                        if same_step:
                            infos = add_final(self, infos, observations[i], info, i)
                            call = "reset"
                            observations[i], info = env.reset()
                            mask_in(info)  # it is a dict
                            call = "step"
                if ACTION_MASK in info:
                    infos = add_mask(self, infos, info, i)
        except Exception as error:
            raise self._failure(i, call, error) from None
        return self._batch_observations("step"), rewards, terminated, truncated, infos

    def _batch_observations(self, call: str) -> Any:
        """Batch the observations of all environments [N, ...]."""
        observations: list[Any] = self._env_obs
        try:
            if self._one_by_one is None:
                return concatenate(self.single_observation_space, observations, self._observations)
            np.concatenate(observations, out=self._one_by_one)
        except Exception as error:
            for i, observation in enumerate(observations):
                if why := misfit(self.single_observation_space, observation):
                    raise EnvironmentFailed(self.name_of(i), call, why) from error
            raise
        return self._observations

    def _failure(self, index: int, call: str, error: Exception) -> EnvironmentFailed:
        raised_here = error.__traceback__ is not None and error.__traceback__.tb_next is None
        is_other = any(word in str(error) for word in ("unpack", "iterable"))
        if (raised_here and is_other) or isinstance(error, NoInfo):
            return EnvironmentFailed(self.name_of(index), call, must_return(call, str(error)))
        if isinstance(error, NoFlag | BadMask):
            return EnvironmentFailed(self.name_of(index), call, str(error))
        if raised_here and call == "step" and any(words in str(error) for words in _NO_NUMBER):
            return EnvironmentFailed(self.name_of(index), call, no_reward(str(error)))
        return EnvironmentFailed.during(self.name_of(index), call, error)

    def name_of(self, index: int) -> str:
        """Name one environment in errors."""
        return f"environment {index} ({self._name})"


class EqualChoices(MultiDiscrete):
    """A MultiDiscrete of N equal choices from 0 on.

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


_AUTORESET = {
    "auto": AutoresetMode.SAME_STEP,
    "next_step": AutoresetMode.NEXT_STEP,
    "same_step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}

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
    source = factory or find_environment(config.env)
    specs = wrapper_specs(config.env_wrappers)
    if (limit := config.max_episode_steps) is not None:
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
    each = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
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
    if not isinstance(first, gymnasium.Env):
        raise ValueError(
            f"{name} must make a gymnasium.Env or a gymnasium.vector.VectorEnv, "
            f"not a {type(first).__name__}" + _about_agents(factory, first)
        )
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
    mode = autoreset_mode(env)
    if config.autoreset != "auto" and mode != _AUTORESET[config.autoreset]:
        warnings.warn(
            f"autoreset = {config.autoreset!r} has no effect: {name} resets its environments in "
            f"its own way ({mode.name.lower()})",
            stacklevel=4,
        )
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
    mode = _AUTORESET[config.autoreset]
    separate = mode if config.vectorize == "async" and not just_one else None
    others = 0 if just_one else config.envs_per_runner - 1
    makers = [
        EnvironmentFunction(make, config.env_kwargs, f"environment {i} ({name})", separate)
        for i, make in enumerate([make_first] + [make_other] * others)
    ]
    functions: list[Callable[[], Env]] = [*makers]
    if first is not None:
        functions[0] = ReusedEnvironment(makers[0].prepared(first), makers[0])
    if separate is not None:
        return EnvironmentProcesses(functions, mode, config.step_deadline_seconds, name)
    return EnvironmentsInTurn(functions, mode, name)


def _about_agents(factory: Callable[..., Any], made: Any) -> str:
    """Explain what environments with several agents need; "": it has one agent."""
    if not (hasattr(made, "possible_agents") or hasattr(made, "agents")):
        return ""
    lacking = [each for each in METHODS if not callable(getattr(made, each, None))]
    if lacking and not isinstance(made, MultiAgentVectorEnv):
        return f"; for several agents, it lacks PettingZoo's methods {all_of(lacking)}"
    return _UNNAMED if isinstance(factory, type) else _SEVERAL
