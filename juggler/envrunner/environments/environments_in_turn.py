"""Environments that are stepped in this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, iterate
from numpy.typing import NDArray

from juggler.envrunner.environments.misfits import misfit, must_return, no_reward
from juggler.envrunner.environments.step_infos import (
    BadMask,
    NoInfo,
    add_final,
    add_mask,
    mask_in,
    without_mask,
)
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.info_numbers import keep_numbers
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.flags import NoFlag, as_flag

#: What NumPy says of something else than a number.
_NO_NUMBER = ("array element", "float")


class EnvironmentsInTurn(SyncVectorEnv):
    """A faster SyncVectorEnv whose errors name the environment that raised.

    The arrays that it returns are its own memory, valid until the next step. Of the infos it keeps
    the action masks, and the numbers that steps give: [N] each, NaN where one gave none.

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
        """Reset all environments, or those in options["reset_mask"], a bool array [N]."""
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
