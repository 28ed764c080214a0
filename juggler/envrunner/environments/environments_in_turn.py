"""Environments that are stepped one after another. No torch here.

Of their infos, they pass on action masks, numbers, and the end of an episode. Nothing reads the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, iterate
from numpy.typing import NDArray

from juggler.envrunner.environments.misfits import has_other_lengths, misfit, must_return, no_reward
from juggler.envrunner.failures import EnvironmentFailed, failures_of
from juggler.envrunner.info_numbers import keep_numbers
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.flags import NoFlag, as_flag

Env = gymnasium.Env[Any, Any]


def make_environment(make: Callable[..., Env], arguments: dict[str, Any], where: str) -> Env:
    """Make one environment; `where` is its name in errors."""
    with failures_of(where, "constructor"):
        env = make(**arguments)
    # A copy, since vectors write into it and it may belong to the class.
    env.metadata = dict(env.metadata)
    return env


class EnvironmentsInTurn(SyncVectorEnv):
    """A faster SyncVectorEnv whose errors name the environment that raised.

    The last step of an episode begins the next one (SAME_STEP). The arrays that it returns are
    overwritten by the next step. Of infos, it returns only action masks, and the numbers of `step`:
    [N] each, NaN where an environment gave no number.

    Raises:
        EnvironmentFailed: in `reset` or `step`: an environment raised.
    """

    def __init__(self, functions: Sequence[Callable[[], Env]], name: str) -> None:
        super().__init__(functions, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
        self._name = name
        self._share_memory()

    def _share_memory(self) -> None:
        """View observations [N, d, ...] as [N * d, ...]."""
        self._one_by_one: NDArray[Any] | None = None
        array = self._observations
        # Without numbers, NumPy cannot tell the first size.
        if isinstance(array, np.ndarray) and array.ndim > 1 and array.size:
            self._one_by_one = array.reshape(-1, *array.shape[2:])
            self._lengths = {array.shape[1]}

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        infos: dict[str, Any] = {}
        for i in range(self.num_envs):
            try:
                self._env_obs[i], info = self.envs[i].reset(
                    seed=None if seeds is None else seeds[i], options=options
                )
                infos = add_mask(self, infos, info, i)
            except Exception as error:
                raise self._failure(i, "reset", error) from None
        return self._batch_observations("reset"), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards = self._env_obs, self._rewards
        terminated, truncated = self._terminations, self._truncations
        terminated.fill(False)
        truncated.fill(False)
        infos: dict[str, Any] = {}
        chosen = list(iterate(self.action_space, actions))
        if len(chosen) != self.num_envs:  # not an environment's fault
            raise ValueError(f"{len(chosen)} actions for {self.num_envs} environments")
        call, i = "step", 0
        # One `try` for all environments, because entering one for each takes longer than a move of
        # some; `call` and `i` tell what raised.
        try:
            for i, (env, action) in enumerate(zip(self.envs, chosen, strict=True)):
                # Results that cannot be unpacked are explained by `_failure`.
                observations[i], reward, ends, cut, info = env.step(action)
                if type(reward) is float:  # the usual case
                    rewards[i] = reward
                else:
                    put_reward(rewards, i, reward)
                if ends is not False or cut is not False:
                    ends, cut = as_flag("terminated", ends), as_flag("truncated", cut)
                if type(info) is not dict:
                    mask_in(info)  # raises if it is no mapping
                if ends or cut:
                    terminated[i], truncated[i] = ends, cut
                    if ends:
                        info = without_mask(info)
                    elif why := misfit(self.single_observation_space, observations[i]):
                        raise BadResult(f"at the end of a truncated episode, {why}")
                    # The next episode begins here, so all environments act in the next step.
                    infos = add_final(self, infos, observations[i], info, i)
                    call = "reset"
                    observations[i], info = env.reset()
                    mask_in(info)
                    call = "step"
                elif info:
                    keep_numbers(infos, info, i, self.num_envs)
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
                space = self.single_observation_space
                if any(has_other_lengths(space, each) for each in observations):
                    raise BadResult("a tuple has another length than its space")
                return concatenate(space, observations, self._observations)
            # Wrong lengths may add up to the right one.
            if set(map(len, observations)) != self._lengths:
                raise BadResult("an observation has another length than its space")
            np.concatenate(observations, out=self._one_by_one)
        except Exception as error:
            for i, observation in enumerate(observations):
                if why := misfit(self.single_observation_space, observation):
                    raise EnvironmentFailed(self.name_of(i), call, why) from error
            raise
        return self._observations

    def _failure(self, index: int, call: str, error: Exception) -> EnvironmentFailed:
        """Explain an error of an environment, or in what it returned."""
        where, reason = self.name_of(index), ""
        raised_here = error.__traceback__ is not None and error.__traceback__.tb_next is None
        if isinstance(error, NoInfo):
            reason = must_return(call, str(error))
        elif isinstance(error, NoFlag | BadResult):
            reason = str(error)
        elif raised_here and any(word in str(error) for word in ("unpack", "iterable")):
            reason = must_return(call, str(error))
        if reason:
            return EnvironmentFailed(where, call, reason)
        return EnvironmentFailed.during(where, call, error)

    def name_of(self, index: int) -> str:
        """Name one environment in errors."""
        return f"environment {index} ({self._name})"


class NoInfo(TypeError):
    """The info is not a dict.

    A `reset` that only returns an observation [2] looks like this.
    """


class BadResult(ValueError):
    """A reward, an observation or an action mask has a wrong form."""


def put_reward(rewards: NDArray[np.float64], row: int, reward: Any) -> None:
    """Convert a row's reward into `rewards` [N].

    Raises:
        BadResult: it is no number.
    """
    try:
        if reward is None or isinstance(reward, str | bytes):  # NumPy would convert it
            raise TypeError(f"{reward!r} is not a float")
        rewards[row] = reward
    except Exception as error:
        raise BadResult(no_reward(reward, error)) from None


def mask_in(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the action mask of an info, if it has one."""
    if not isinstance(info, Mapping):
        raise NoInfo(f"its info is of type {type(info).__name__}")
    return {ACTION_MASK: info[ACTION_MASK]} if ACTION_MASK in info else {}


def add_mask(
    env: VectorEnv[Any, Any, Any], infos: dict[str, Any], info: Mapping[str, Any], row: int
) -> dict[str, Any]:
    """Add the action mask of an info, if it has one.

    Raises:
        BadResult: the masks of other environments have another shape or type.
    """
    part, others = mask_in(info), infos.get(ACTION_MASK)
    try:
        if part and isinstance(others, np.ndarray) and others.dtype != object:
            size, due = np.size(part[ACTION_MASK]), others[0].size
            if size != due:  # NumPy might broadcast a single number
                raise ValueError(f"{size} numbers instead of {due}")
        return env._add_info(infos, part, row)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        reason = f"the action mask in its info is not like those of other environments: {error}"
        raise BadResult(reason) from None


def without_mask(info: dict[str, Any]) -> dict[str, Any]:
    """Remove the action mask from the info of a terminating step.

    Nothing reads the mask, and Gymnasium cannot pack masks of different kinds.
    """
    if ACTION_MASK not in info:
        return info
    return {name: value for name, value in info.items() if name != ACTION_MASK}


def add_final(
    env: VectorEnv[Any, Any, Any],
    infos: dict[str, Any],
    observation: Any,
    info: Mapping[str, Any],
    row: int,
) -> dict[str, Any]:
    """Add the last observation and info before a SAME_STEP reset.

    Raises:
        BadResult: the last masks of other environments have another shape or type.
    """
    # Copies, because the reset may write into the same memory.
    infos = env._add_info(infos, {"final_obs": deepcopy(observation), "final_info": {}}, row)
    final = add_mask(env, infos["final_info"], deepcopy(mask_in(info)), row)
    keep_numbers(final, info, row, env.num_envs)
    infos["final_info"] = final
    return infos


def keep_own_finals(env: VectorEnv[Any, Any, Any]) -> None:
    """Let Gymnasium's SyncVectorEnv copy last observations before the reset overwrites them."""
    vector = env.unwrapped
    if not isinstance(vector, SyncVectorEnv):
        return
    add: Any = vector._add_info

    def add_own(infos: dict[str, Any], info: dict[str, Any], row: int) -> dict[str, Any]:
        if "final_obs" in info and "final_info" in info:
            final = {**info["final_info"], **deepcopy(mask_in(info["final_info"]))}
            info = {**info, "final_obs": deepcopy(info["final_obs"]), "final_info": final}
        added: dict[str, Any] = add(infos, info, row)
        return added

    vars(vector)["_add_info"] = add_own
